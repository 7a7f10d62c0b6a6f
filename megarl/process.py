"""What every role process does with itself: die with its parent, log to its file, name itself."""

import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """The kernel sends `sig` when the parent dies, however it dies: no role outlives its supervisor. Linux only.

    The parent is the *thread* that forked: call this from processes started by a thread that lives as long as the role.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), sig)


def start_logging(role: str) -> None:
    """Lines with time and role on stderr, which the supervisor sends to RUN/logs/."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s", force=True
    )
