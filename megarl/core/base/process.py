"""What every process does with itself: die with its parent, log to its file, name itself, go on without a screen."""

import ctypes
import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SUPERVISOR, NODE = "MEGARL_SUPERVISOR_PID", "MEGARL_NODE"
"""Environment variables of a process that megarl started: who watches it, and, of a role, the name of its node."""


def die_with_parent() -> None:
    """The kernel kills this process when the parent dies, however it dies: no role outlives its supervisor. Linux only.

    The parent is the *thread* that forked: call this from processes started by a thread that lives as long as the role.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_supervisor() -> None:
    """In a role that `megarl train` started, or a rank that torchrun did, before anything slow: die with it, also if it is dead
    already."""
    supervisor = os.environ.pop(SUPERVISOR, None)  # not for its own children: their parent is this process
    if supervisor is not None:
        die_with_parent()
        if os.getppid() != int(supervisor):
            os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """What a dead role leaves behind becomes a child of this process, which can then find and end it. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def have_streams() -> None:
    """Before anything is opened: where stdin, stdout or stderr were closed they lead nowhere, or the next file that is opened
    would be taken for them."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it has the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (open as long as the process is)


def outlive_screen() -> None:
    """From here on what stdout or stderr do not take is lost, and this process goes on: a pager that was left, a `tee` that
    died, a full disk behind `> file` end no run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # somebody captures it, or it leads nowhere
        stream.flush()
        buffer = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
        lasting = io.TextIOWrapper(
            buffer, stream.encoding, "replace", line_buffering=stream.line_buffering, write_through=stream.write_through
        )
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)


class _Lasting(io.FileIO):
    """A file descriptor that leads nowhere once it takes nothing any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def shared_memory_mark(session: int) -> str:
    """In the name of what the processes of a session have in /dev/shm: who ends them finds what they could not remove."""
    return f"megarl-{session}-"


def remove_shared_memory(session: int) -> None:
    """Of a session that has ended."""
    for path in Path("/dev/shm").glob(f"*{shared_memory_mark(session)}*"):
        path.unlink(missing_ok=True)


def log_to(path: Path) -> None:
    """All output of this process goes to the end of this file from here on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def start_logging(role: str) -> None:
    """Lines with time and role on stderr, which the supervisor sends to RUN/logs/."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
