"""What every role does as a process: it raises its limits, imports, dies with its
parent, marks its shared memory, logs, checks a port.
"""

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError, printable

PR_SET_PDEATHSIG = 1
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SUPERVISOR = "MEGARL_SUPERVISOR_PID"
NODE = "MEGARL_NODE"
NODE_RANK = "MEGARL_NODE_RANK"
"""Variables of a process that megarl started: its supervisor's pid; for a role its
node's name and place among its nodes.
"""


def raise_limits() -> None:
    """Raise the soft limits of this process and its children to the hard ones: Slurm
    takes small ones from the submitting shell. Open files: each request is a connection
    of the controller's, and a learner's rank has 630 sockets in a world of 64 ranks.
    Locked memory: NCCL registers its buffers with InfiniBand. Processes: threads count,
    of all roles on the node.
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC):
        _, hard = resource.getrlimit(limit)
        # Linux sets no limit of files above fs.nr_open, even if a container began with
        # one.
        with suppress(ValueError):
            resource.setrlimit(limit, (hard, hard))


def dump_no_core() -> None:
    """Set the soft limit of core dumps to 0, for this process and its children: when
    NCCL ends the ranks of a learner, each would write hundreds of gigabytes, and be
    restarted only then. `start_logging` has the stacks written; `prlimit
    --core=unlimited --pid PID` still allows a dump.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def bind_no_threads() -> None:
    """Remove the variables, set by some clusters, with which OpenMP would bind all
    roles on a node to its first core.
    """
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        os.environ.pop(name, None)


@contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector, which would take a fifth of a role's start,
    and freeze what was imported.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def imported(named: str) -> Any:
    """Return the user's function or class `package.module:name`, from PYTHONPATH or the
    working directory.
    """
    module, _, name = named.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    return getattr(importlib.import_module(module), name)


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent dies, however it dies: no role
    outlives its supervisor. The parent is the *thread* that forked: it has to live as
    long as the role.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def ignore_late_signals() -> None:
    """Ignore the signals that end a process, once its work is done: with Python's
    default handlers it would look killed.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def shared_memory_mark(session: int | str) -> str:
    """Return a prefix for this session's names in /dev/shm, by which its files can be
    found after it ends. It includes the PID namespace: containers number their sessions
    independently and may share the folder.
    """
    return f"megarl-{os.stat('/proc/self/ns/pid').st_ino}-{session}-"


def log_to(path: Path) -> None:
    """Append all output of this process to this file from here on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


def start_logging(role: str) -> None:
    """Log with time and role to stderr, i.e. to RUN/logs/; if compiled code crashes,
    also what each thread was doing.
    """
    faulthandler.enable(2)  # standard error
    handler = logging.StreamHandler()  # to stderr
    handler.setFormatter(_Printable(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


LONGEST_MESSAGE = 1 << 16
"""Most characters of a message in a log, a traceback included."""


class _Printable(logging.Formatter):
    """Formats messages so that a terminal can show them, and no longer than
    LONGEST_MESSAGE. They quote what agents print, what graders say of answers, and
    errors, which may be as long as what they read.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, without its middle if it is too long."""
        text = super().format(record)
        if len(text) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            text = f"{text[:half]} … {text[-half:]}"
        return printable(text)


def check_free(host: str, port: int) -> None:
    """Raise MegarlError if `port` of this machine's address `host` is not free."""
    with socket.socket() as s:
        # Connections of an earlier process that are still in TIME_WAIT do not matter.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise MegarlError(
                f"--port: cannot listen on {host}:{port}: {error.strerror}; choose another"
            ) from None


def without_proxy(host: str) -> dict[str, str]:
    """Return the environment variables with which HTTP clients connect to `host`
    directly, though a node has a proxy.
    """
    hosts = [os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), host]
    direct = ",".join(filter(None, hosts))
    return {"NO_PROXY": direct, "no_proxy": direct}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables within this context, and restore them at its end."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
