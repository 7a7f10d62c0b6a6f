"""Temporary folders of agents and programs, which a later process removes if ours is
killed before it could.

An agent's folder is its TMPDIR, too, so it also tells which processes are the agent's,
in whatever group or session they are.

    scratch() ─► TMPDIR/megarl-BOOT-… , locked ─► removed at the end of the block
                  └─ SIGKILL: the kernel drops the lock
                              ─► removed by the next process that needs one

A lock says that a folder is in use. A process's id would not: it is used again, and
each container has its own.

Whoever has a folder may put anything in it: thousands of nested directories, a hundred
thousand files, directories that nobody may enter. `rm` copes with all of it, and what
it leaves is logged: a folder that stays is no reason to stop a run.
"""

import asyncio
import fcntl
import logging
import os
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from megarl.tasks.graders.inside import NOBODY

log = logging.getLogger(__name__)
PREFIX = f"megarl-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-"
"""Says whose kernel has the locks: nodes may share TMPDIR on a file system that does
not (Lustre with `localflock`).
"""
YOUNG_S = 60.0
"""A folder that was changed since then may have been made by a process that is about to
lock it.
"""
REMOVAL_LIMIT_S = 600.0
"""Time limit for a folder's removal."""
SHOWN_BYTES = 1000
"""Most of what a removal printed that is logged."""
PLUMBING: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.DEVNULL,
    "start_new_session": True,
}
"""How a removal is started."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Have a folder of one's own for the block.

    Its removal may take long: coroutines use `async_scratch`.
    """
    folder, lock = _make()
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)  # only now, or another process would remove it too


@asynccontextmanager
async def async_scratch() -> AsyncIterator[Path]:
    """Have a folder of one's own for the block; it is removed beside the event loop."""
    folder, lock = _make()
    try:
        yield folder
    finally:
        try:
            await _async_remove(folder)
        finally:
            os.close(lock)  # also if that is cancelled: a later process removes the rest


def hand_over(folder: Path) -> None:
    """Make an empty folder of ours that of the agent or program, if that will be
    nobody.
    """
    if becomes_nobody():
        os.chown(folder, NOBODY, NOBODY)


def becomes_nobody() -> bool:
    """Return whether agents and programs run as nobody: under root, if nobody exists
    here.

    In some containers root is the only user, and outside they are an ordinary one.
    """
    if os.getuid() != 0:
        return False
    return _is_mapped("/proc/self/uid_map") and _is_mapped("/proc/self/gid_map")


def _is_mapped(table: str) -> bool:
    """Return whether this user namespace has an id for nobody. table: the file with its
    ids of users or groups, each line a range: the first id, that id outside the
    namespace, and the range's length.
    """
    for line in Path(table).read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def _make() -> tuple[Path, int]:
    """Return a new folder, and the descriptor that locks it until it is closed."""
    _sweep(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks, where nothing is swept either
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def remove(folder: Path) -> None:
    """Remove a folder with everything in it; if that is impossible, the log says
    why.
    """
    if _removed_empty(folder):
        return
    try:
        process = subprocess.Popen(_removal(folder), **PLUMBING)
        output, _ = process.communicate(timeout=REMOVAL_LIMIT_S)
        _log_rest(folder, output)
    except subprocess.TimeoutExpired:
        _give_up(folder, process.pid)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)


async def _async_remove(folder: Path) -> None:
    """Remove a folder as `remove` does. If this is cancelled, a later process removes
    the rest.
    """
    if _removed_empty(folder):
        return
    try:
        process = await asyncio.create_subprocess_exec(*_removal(folder), **PLUMBING)
        output, _ = await asyncio.wait_for(process.communicate(), REMOVAL_LIMIT_S)
        _log_rest(folder, output)
    except TimeoutError:
        _give_up(folder, process.pid)
    except OSError as error:
        log.warning("%s cannot be removed: %s", folder, error)


def _give_up(folder: Path, removal: int) -> None:
    """End a removal that takes too long. It is not waited for: a file system may not
    answer it.
    """
    with suppress(ProcessLookupError):
        os.killpg(removal, signal.SIGKILL)
    log.warning(
        "%s is not removed after %g s; a later process removes what is left",
        folder,
        REMOVAL_LIMIT_S,
    )


def _removed_empty(folder: Path) -> bool:
    """Remove an empty folder, which takes no other process; return whether the folder
    is gone.
    """
    with suppress(OSError):
        folder.rmdir()
    return not os.path.lexists(folder)


def _removal(folder: Path) -> list[str]:
    """Return the command that removes a folder, and prints the end of what it complains
    of.

    It may complain of each file. The disk may be full, so the complaints go to no file.
    """
    removal = 'rm -rf -- "$1"'
    if os.getuid() != 0:  # root may enter every directory, and chmod would follow a link
        removal = f'{removal} || {{ chmod -R u+rwx -- "$1"; {removal}; }}'
    script = f"{{ {removal}; }} 2>&1 | tail -c {SHOWN_BYTES}"
    return ["sh", "-c", script, "sh", str(folder)]  # the second sh is $0, the folder $1


def _log_rest(folder: Path, output: bytes) -> None:
    """Log the last complaint of a removal that has failed."""
    if os.path.lexists(folder):
        lines = output.decode(errors="replace").strip().splitlines() or ["no reason is given"]
        log.warning("%s cannot be removed: %s", folder, lines[-1])


@cache
def _sweep(temporary: str) -> None:
    """Begin to remove what killed processes left there: once in a process, and beside
    it, for an agent may leave much.
    """
    with suppress(RuntimeError):  # the machine has no room for a thread
        threading.Thread(target=remove_abandoned, args=(Path(temporary),), daemon=True).start()


def remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders that nobody has locked."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or gone
            lock = _opened(folder)
            try:
                if _is_abandoned(lock):
                    kill_users(folder)
                    remove(folder)
            finally:
                os.close(lock)


def _is_abandoned(folder: int) -> bool:
    """Return whether an open folder is ours and was not changed just now; if so, it is
    locked. folder: its descriptor. OSError if another process has locked it.
    """
    about = os.fstat(folder)
    if about.st_uid not in _owners() or time.time() - about.st_mtime <= YOUNG_S:
        return False
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _opened(folder: Path) -> int:
    """Open a folder, and return its descriptor. One of ours that may not be entered
    gets its rights back first. OSError if it is a link, or another user's.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(folder, flags)
    except PermissionError:
        about = os.lstat(folder)
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            raise
        folder.chmod(0o700)
        return os.open(folder, flags)


def _owners() -> set[int]:
    """Return the users whose folders are ours."""
    if becomes_nobody():
        return {os.getuid(), NOBODY}
    return {os.getuid()}


def kill_users(folder: Path) -> None:
    """Kill the processes whose TMPDIR this is, such as browsers, tmux and what it
    runs.
    """
    for _ in range(2):  # in the first round one may have started another
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or it has ended
                if b"TMPDIR=%s\0" % os.fsencode(folder) in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
