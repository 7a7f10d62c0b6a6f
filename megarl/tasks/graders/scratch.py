"""Temporary folders of agents and programs, which a later process removes if ours is killed before it could.

An agent's folder is its TMPDIR, too, so it also tells which processes are the agent's, in whatever group or session they are.

    scratch() ─► TMPDIR/megarl-BOOT-… , locked ─► removed at the end of the block
                                          └─ SIGKILL: the kernel drops the lock ─► removed by the next process that needs one

A lock says that a folder is in use. A process's id would not: it is used again, and each container has its own.
"""

import fcntl
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = f"megarl-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}-"
"""Says whose kernel has the locks: nodes may share TMPDIR on a file system that does not (Lustre with `localflock`)."""
YOUNG_S = 60.0
"""A folder that was changed since then may have been made by a process that is about to lock it."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Have a folder of one's own for the block."""
    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        held = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks, where nothing is swept either
                fcntl.flock(held, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(held)


@cache
def _sweep(temporary: str) -> None:
    """Begin to remove what killed processes left there: once in a process, and beside it, for an agent may leave much."""
    threading.Thread(target=remove_abandoned, args=(Path(temporary),), daemon=True).start()


def remove_abandoned(temporary: Path) -> None:
    """Remove this user's folders that nobody has locked."""
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, another user's, or gone
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(held)
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > YOUNG_S:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    kill_users(folder)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def kill_users(folder: Path) -> None:
    """Kill the processes whose TMPDIR this is, such as browsers, tmux and what it runs."""
    for _ in range(2):  # one may be starting another
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # another user's, or it has ended
                if b"TMPDIR=%s\0" % os.fsencode(folder) in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
