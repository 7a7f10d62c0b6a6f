"""Locks of files, by which one process at a time works in a directory, and their
holders.

    open_lock_file ─► lock_file ─► name_holder
                       └─ BlockingIOError: another process has it; `holder` says which

Whoever can open a file, if only to read it, can lock it and so keep us from our work.
So nobody else may open lock files.
"""

import errno
import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path

WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""C's `struct flock` of a lock for writing, on all bytes."""
HOLDER = re.compile(r"(\d+) on (\S+)")
LONGEST_NAME = 100


def open_lock_file(path: Path) -> int:
    """Open a file to lock it, and make it if there is none.

    OSError if that is impossible, or if the path is a link or no regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    if status.st_uid == os.getuid():
        os.fchmod(descriptor, 0o600)  # it may have been made with other rights
    return descriptor


def lock_file(descriptor: int) -> None:
    """Lock an open file until it is closed.

    BlockingIOError if another process has locked it, OSError if none can. The lock is
    one on bytes, which GPFS and others keep on all nodes together, unlike flock's.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE_FILE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without such locks, as a sandbox may have
            raise
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def name_holder(descriptor: int) -> None:
    """Write into a file that we have locked which process this is."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)


def host_named(descriptor: int) -> str:
    """Return the node of the process that the file names; "" if it names none."""
    match = HOLDER.fullmatch(_text(descriptor))
    return match[2] if match else ""


def holder(descriptor: int) -> str:
    """Say which process has locked the file.

    "" if that is unknown: the file names none, or one of this node that has ended.
    """
    match = HOLDER.fullmatch(_text(descriptor))
    if match is None:
        return ""
    process, host = match.groups()
    if host == socket.gethostname() and not os.path.exists(f"/proc/{process}"):
        return ""
    return f"process {process} on {host}"


def unknown_holder(path: Path) -> str:
    """Say that an unknown process has locked this file, and what to do."""
    return (
        f"an unknown process has locked {path} (`fuser -v {path}`, as root, names it); end it or,"
        " if it is not yours, remove the file"
    )


def _text(descriptor: int) -> str:
    """Return what is written in a lock file."""
    return os.pread(descriptor, LONGEST_NAME, 0).decode(errors="replace")
