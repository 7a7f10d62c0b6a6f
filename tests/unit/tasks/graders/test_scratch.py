"""Temporary folders that outlive a killed process, and who removes them."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.tasks.graders import scratch as folders
from megarl.tasks.graders.functions import environment as worker_environment
from megarl.tasks.graders.scratch import PREFIX, async_scratch, remove_abandoned, scratch

pytestmark = pytest.mark.processes
HOLDS = """
import os, subprocess, time
from megarl.tasks.graders.scratch import scratch
with scratch() as folder:
    (folder / "left").touch()
    environment = os.environ | {"TMPDIR": str(folder)}
    child = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    print(folder, child.pid, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_removed_once_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the processes end that have it as TMPDIR. What is young, linked or held by a
    living process stays.
    """
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in "ab"
    ]
    children: list[psutil.Process] = []
    try:
        told = [process.stdout.readline().split() for process in holders if process.stdout]
        killed, held = (Path(folder) for folder, _ in told)
        children += [psutil.Process(int(pid)) for _, pid in told]
        holders[0].kill()
        holders[0].wait()
        young, link, another = (
            tmp_path / name for name in (f"{PREFIX}young", f"{PREFIX}link", "another")
        )
        young.mkdir()
        another.mkdir()
        link.symlink_to(another)
        for old in (killed, held, another):
            os.utime(old, (0, 0))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with scratch() as ours:
            until = time.monotonic() + 10
            while killed.exists():
                assert time.monotonic() < until, "it is left for ever"
                time.sleep(0.01)
            remove_abandoned(tmp_path)
            assert set(tmp_path.iterdir()) == {held, young, link, another, ours}
        psutil.wait_procs(children[:1], timeout=10)
        assert [
            child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children
        ] == [False, True]
        assert (held / "left").exists()
        assert not ours.exists()
    finally:
        for process in holders:
            process.kill()
            process.communicate()
        for child in children[1:]:
            child.kill()


MAKES = [
    "import os\nfor _ in range(3000): os.mkdir('d' * 100); os.chdir('d' * 100)",
    (
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); [os.chmod(f, 0) for f in"
        " ('a/b', 'a', '.')]"
    ),
    "import os; os.mkfifo('f'); os.symlink('/', 'l')",
    "[open(b'-rf %c' % n, 'w') for n in range(1, 256) if n != 47]",
]
"""Programs that leave something in the working directory: depth, what is shut, no
files, odd names.
"""
ORDINARY = """
import os, sys
from pathlib import Path
from megarl.tasks.graders.scratch import remove, remove_abandoned
if os.getuid() == 0:
    os.setgid(1234)
    os.setuid(1234)
prefix, place, *programs = sys.argv[1:]
for number, program in enumerate(programs):
    now, later = Path(place, f"now-{number}"), Path(place, f"{prefix}later-{number}")
    for folder in (now, later):
        folder.mkdir()
        os.chdir(folder)
        exec(program)
        os.chdir("/")
    remove(now)
    os.utime(later, (0, 0))
remove_abandoned(Path(place))
print(os.listdir(place))
"""


def test_whatever_is_in_a_folder_an_ordinary_user_removes_it() -> None:
    """In the process that made it, and as one that a killed process left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # in memory, so that it is quick
        os.chmod(place, 0o777)
        words = [sys.executable, "-c", ORDINARY, PREFIX, place, *MAKES]
        done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.fixture
def unremovable(tmp_path: Path) -> Iterator[Path]:
    """A folder with a file in it that not even root may remove."""
    folder = tmp_path / f"{PREFIX}a"
    folder.mkdir()
    (folder / "file").touch()
    if subprocess.run(["chattr", "+i", folder / "file"], capture_output=True).returncode:
        pytest.skip("only root can make such a file, on some file systems")
    yield folder
    subprocess.run(["chattr", "-i", folder / "file"], check=True)


def test_what_cannot_be_removed_is_logged_and_stays(
    unremovable: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is no reason not to remove what comes after it."""
    later = tmp_path / f"{PREFIX}b"
    later.mkdir()
    for folder in (unremovable, later):
        os.utime(folder, (0, 0))
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [unremovable]
    assert "cannot be removed" in caplog.text
    assert "Operation not permitted" in caplog.text


@pytest.mark.parametrize(
    ("table", "mapped"),
    [
        ("0 0 4294967295", True),
        ("0 1000 1\n1 100000 65536", True),
        ("0 1000 1", False),
        ("0 1000 1\n1 100000 65533", False),
    ],
)
def test_a_container_may_not_know_nobody(tmp_path: Path, table: str, mapped: bool) -> None:
    """Where root is the only user, it is an ordinary one outside, and agents stay that
    user.
    """
    (tmp_path / "uid_map").write_text(table)
    assert folders._is_mapped(str(tmp_path / "uid_map")) is mapped


@pytest.mark.parametrize("fault", ["a missing sh", "a slow rm"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_removal_that_fails_is_no_error(
    fault: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault == "a slow rm":
        (tmp_path / "rm").write_text("#!/bin/sh\n/bin/sleep 60")
        (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv(
        "PATH", str(tmp_path) if fault == "a missing sh" else f"{tmp_path}:/usr/bin:/bin"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "REMOVAL_LIMIT_S", 0.1)
    if kind == "sync":
        with scratch() as folder:
            (folder / "file").touch()
    else:
        folder = asyncio.run(leave_a_file())
    reason = (
        "cannot be removed: .*No such file"
        if fault == "a missing sh"
        else "is not removed after 0.1 s"
    )
    assert re.search(f"{folder} {reason}", caplog.text)


async def leave_a_file() -> Path:
    async with async_scratch() as folder:
        (folder / "file").touch()
    return folder


def test_the_event_loop_goes_on_while_a_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have left a hundred thousand files."""

    async def ticks() -> int:
        count = 0
        leaving = asyncio.create_task(leave_a_file())
        while not leaving.done():
            await asyncio.sleep(0.01)
            count += 1
        assert not leaving.result().exists()
        return count

    (tmp_path / "rm").write_text('#!/bin/sh\n/bin/sleep 0.5\nexec /bin/rm "$@"')
    (tmp_path / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert asyncio.run(ticks()) > 10


def test_workers_can_make_temporary_files_where_the_jobs_folder_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container does not have it. Python looks elsewhere by itself; what an
    environment starts, such as a shell, does not.
    """
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, "/nowhere/job-1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    made = subprocess.run(
        ["mktemp"], env=worker_environment(), capture_output=True, text=True, check=True
    )
    Path(made.stdout.strip()).unlink()
