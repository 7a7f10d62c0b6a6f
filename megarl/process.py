"""What every role process does with itself: die with its parent, log to its file, name itself."""

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

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
