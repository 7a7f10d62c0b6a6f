"""One process at a time in a directory."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.run import process
from megarl.run.process import lock

COMMAND = ("megarl train", "run.name")


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        lock(folder, *COMMAND),
        pytest.raises(
            MegarlError, match=r"another `megarl train` \(process \d+ on \S+\) is at work there; .* another run\.name"
        ),
        lock(folder, *COMMAND),
    ):
        pass
    with lock(folder, *COMMAND):
        pass


def test_the_lock_is_of_the_kind_that_file_systems_keep_for_all_nodes(tmp_path: Path) -> None:
    """One on bytes, as POSIX has them. GPFS keeps flock's for each node by itself."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    words = [sys.executable, "-c", code, tmp_path / ".lock"]
    with lock(tmp_path, *COMMAND):
        assert b"BlockingIOError" in subprocess.run(words, stderr=subprocess.PIPE).stderr
    assert subprocess.run(words).returncode == 0


def test_a_kernel_without_such_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", without)
    test_one_at_a_time(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MegarlError, match=r"run\.name: cannot write in"), lock(tmp_path / "file" / "run", *COMMAND):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "fcntl", without)
    with (
        pytest.raises(MegarlError, match=r"cannot be locked: Function not implemented.*flock"),
        lock(tmp_path, *COMMAND),
    ):
        pass


ELSEWHERE = """
import socket, sys, time
from pathlib import Path
from megarl.run import process
socket.gethostname = lambda: "elsewhere"
process.lock_file = lambda _: None
process.BEAT_S = 0.1
with process.lock(Path(sys.argv[1]), "megarl train", "run.name"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_that_only_its_own_node_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre with localflock and NFS with nolock let two nodes have one lock."""
    monkeypatch.setattr(process, "BEAT_S", 1.0)
    with subprocess.Popen([sys.executable, "-c", ELSEWHERE, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(MegarlError, match=r"process \d+ on elsewhere\) is at work"), lock(tmp_path, *COMMAND):
            pass
        holder.kill()
    with lock(tmp_path, *COMMAND):
        assert " on elsewhere" not in (tmp_path / ".lock").read_text()
    assert not (tmp_path / ".lock").read_text(), "its end is known, so that the next one need not wait"
