"""Temporary folders of agents and programs, which a later process removes if ours is killed before it could.

An agent's folder is its TMPDIR, too, so it also tells which processes are the agent's, in whatever group or session they are.

    scratch() ─► TMPDIR/megarl-BOOT-… , locked ─► removed at the end of the block
                                          └─ SIGKILL: the kernel drops the lock ─► removed by the next process that needs one

A lock says that a folder is in use. A process's id would not: it is used again, and each container has its own.

Whoever has a folder may put anything in it: thousands of nested directories, a hundred
thousand files, directories that nobody may enter. `rm` copes with all of it, and what it leaves
is logged: a folder that stays is no reason to stop a run.
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
from typing import IO, Any

from megarl.tasks.graders.inside import NOBODY

log = logging.getLogger(__name__)
PREFIX = f"megarl-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-"
"""Says whose kernel has the locks: nodes may share TMPDIR on a file system that does not (Lustre with `localflock`)."""
YOUNG_S = 60.0
"""A folder that was changed since then may have been made by a process that is about to lock it."""
REMOVAL_LIMIT_S = 600.0
"""Time limit for a folder's removal."""
SHOWN_BYTES = 1000
"""Most of what a removal printed that is logged."""
SLOW = "%s is not removed after %g s; what is left is removed by a later process"


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
        os.close(lock)


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
            os.close(lock)


def hand_over(folder: Path) -> None:
    """Make an empty folder of ours that of the agent or program, if that will be nobody."""
    if becomes_nobody():
        os.chown(folder, NOBODY, NOBODY)


def becomes_nobody() -> bool:
    """Return whether agents and programs run as nobody: under root, if nobody exists here.

    In some containers root is the only user, and outside they are an ordinary one.
    """
    if os.getuid() != 0:
        return False
    return _is_mapped("/proc/self/uid_map") and _is_mapped("/proc/self/gid_map")


def _is_mapped(table: str) -> bool:
    """Return whether this user namespace has an id for nobody.

    Each line of its table has the first id of a range, that id outside, and the range's length.
    """
    for line in Path(table).read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def _make() -> tuple[Path, int]:
    """Return a new folder, and the descriptor that locks it."""
    _sweep(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks, where nothing is swept either
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def remove(folder: Path) -> None:
    """Remove a folder with everything in it; if that is impossible, the log says why."""
    if _removed_empty(folder):
        return
    with tempfile.TemporaryFile() as output:
        try:
            subprocess.run(_removal(folder), **_with_output(output), timeout=REMOVAL_LIMIT_S)
            _log_rest(folder, output)
        except subprocess.TimeoutExpired:
            log.warning(SLOW, folder, REMOVAL_LIMIT_S)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error)


async def _async_remove(folder: Path) -> None:
    """Remove a folder as `remove` does. If this is cancelled, a later process removes the rest."""
    if _removed_empty(folder):
        return
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(*_removal(folder), **_with_output(output))
            await asyncio.wait_for(process.wait(), REMOVAL_LIMIT_S)
            _log_rest(folder, output)
        except TimeoutError:
            log.warning(SLOW, folder, REMOVAL_LIMIT_S)
        except OSError as error:
            log.warning("%s cannot be removed: %s", folder, error)


def _removed_empty(folder: Path) -> bool:
    """Remove an empty folder, which takes no other process; return whether the folder is gone."""
    with suppress(OSError):
        folder.rmdir()
    return not os.path.lexists(folder)


def _removal(folder: Path) -> list[str]:
    """Return the command that removes a folder, even one with directories that its owner may not enter."""
    return ["sh", "-c", 'rm -rf -- "$1" || { chmod -R u+rwx -- "$1"; rm -rf -- "$1"; }', "sh", str(folder)]


def _with_output(output: IO[bytes]) -> dict[str, Any]:
    """Return how a removal is started. It may complain of each file, so a file takes what it prints."""
    return {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "start_new_session": True}


def _log_rest(folder: Path, output: IO[bytes]) -> None:
    """Log the last complaint of a removal that has failed."""
    if os.path.lexists(folder):
        output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_BYTES))
        lines = output.read().decode(errors="replace").strip().splitlines()
        log.warning("%s cannot be removed: %s", folder, lines[-1] if lines else "no reason is given")


@cache
def _sweep(temporary: str) -> None:
    """Begin to remove what killed processes left there: once in a process, and beside it, for an agent may leave much."""
    with suppress(RuntimeError):  # the machine has no room for a thread
        threading.Thread(target=remove_abandoned, args=(Path(temporary),), daemon=True).start()


def remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders that nobody has locked."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or gone
            lock = _opened(folder)
            try:
                about = os.fstat(lock)
                if about.st_uid in _owners() and time.time() - about.st_mtime > YOUNG_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    kill_users(folder)
                    remove(folder)
            finally:
                os.close(lock)


def _opened(folder: Path) -> int:
    """Open a folder, even one that its owner may not enter.

    OSError if it is a link, or another user's.
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
    return {os.getuid(), NOBODY} if becomes_nobody() else {os.getuid()}


def kill_users(folder: Path) -> None:
    """Kill the processes whose TMPDIR this is, such as browsers, tmux and what it runs."""
    for _ in range(2):  # one may be starting another
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or it has ended
                if b"TMPDIR=%s\0" % os.fsencode(folder) in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
