"""One process at a time in a directory."""

import errno
import fcntl
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.run.process import lock

COMMAND = ("megarl train", "run.name")


def test_one_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        lock(folder, *COMMAND),
        pytest.raises(
            MegarlError, match=r"another `megarl train` \(process \d+\) is at work there; .* another run\.name"
        ),
        lock(folder, *COMMAND),
    ):
        pass
    with lock(folder, *COMMAND):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MegarlError, match=r"run\.name: cannot write in"), lock(tmp_path / "file" / "run", *COMMAND):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    with (
        pytest.raises(MegarlError, match=r"cannot be locked: Function not implemented.*flock"),
        lock(tmp_path, *COMMAND),
    ):
        pass
