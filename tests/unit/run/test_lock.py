"""One process at a time in a directory."""

import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
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
            MegarlError,
            match=(
                r"another `megarl train` \(process \d+ on \S+\) is at work there; .* another"
                r" run\.name"
            ),
        ),
        lock(folder, *COMMAND),
    ):
        pass
    with lock(folder, *COMMAND):
        pass


def test_the_lock_is_of_the_kind_that_file_systems_keep_for_all_nodes(tmp_path: Path) -> None:
    """One on bytes, as POSIX has them. GPFS keeps flock's for each node by itself."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    words = [sys.executable, "-c", code, str(tmp_path / ".lock")]
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
    with (
        pytest.raises(MegarlError, match=r"run\.name: cannot write in"),
        lock(tmp_path / "file" / "run", *COMMAND),
    ):
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


READS = """
import fcntl, os, sys
os.setuid(1234)
fcntl.lockf(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)
"""


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_only_its_owner_can_hold_a_lock(tmp_path: Path, before: int | None) -> None:
    """Others who may read the file could keep a run from starting. An earlier version
    let them, and left such files.
    """
    file = tmp_path / ".lock"
    if before is not None:
        file.touch()
        file.chmod(before)
    umask = os.umask(0)
    try:
        with lock(tmp_path, *COMMAND):
            assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("ours", [True, False])
def test_a_reader_of_the_run_cannot_hold_its_lock(ours: bool) -> None:
    """A file that others may read, unlike ours, lets them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        file = Path(folder) / ".lock"
        if ours:
            with lock(Path(folder), *COMMAND):
                pass
        else:
            file.touch()
        words = ["/usr/bin/python3", "-c", READS, str(file)]
        done = subprocess.run(words, capture_output=True, text=True)
    assert bool(done.returncode) == ours
    assert ("PermissionError" in done.stderr) == ours


@pytest.mark.parametrize("named", ["", "2147483647 on {host}", "nonsense"])
def test_a_holder_that_is_unknown_is_not_invented(tmp_path: Path, named: str) -> None:
    """It has not written its name, or the process that has is over."""
    file = tmp_path / ".lock"
    file.write_text(named.format(host=socket.gethostname()))
    with file.open("rb") as reader:
        fcntl.fcntl(
            reader, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        )
        expected = (
            rf"an unknown process has locked {file} .* remove the file, or give another run\.name"
        )
        with pytest.raises(MegarlError, match=expected), lock(tmp_path, *COMMAND):
            pass


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_lock_file_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / ".lock")
    else:
        (tmp_path / ".lock").symlink_to("elsewhere")
    with pytest.raises(MegarlError, match=r"run\.name: cannot write in"), lock(tmp_path, *COMMAND):
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


def test_a_lock_that_only_its_own_node_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre with localflock and NFS with nolock let two nodes have one lock."""
    monkeypatch.setattr(process, "BEAT_S", 1.0)
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, tmp_path], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(MegarlError, match=r"process \d+ on elsewhere\) is at work"),
            lock(tmp_path, *COMMAND),
        ):
            pass
        holder.kill()
    with lock(tmp_path, *COMMAND):
        assert " on elsewhere" not in (tmp_path / ".lock").read_text()
    assert not (tmp_path / ".lock").read_text(), (
        "its end is known, so that the next one need not wait"
    )
