"""What a process needs of its machine: to die with its parent, log to its file and go on without a screen; one process at a
time in a directory; free ports; signals that ask a command to save and end, counted instead of ending it.

Slurm sends the same signal to all processes of a job at times, and the batch script passes on what it gets: a repetition within
`ONE_WISH_S` is the same wish. Not so Ctrl-C, which a person presses.
"""

import ctypes
import fcntl
import io
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import writing

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


@contextmanager
def lock(folder: Path, command: str, key: str) -> Iterator[None]:
    """Be the only `command` that works there; the kernel lets go of it when we die. key: what names another folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise MegarlError(f"{key}: cannot write in {folder}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 100).decode()
            raise MegarlError(
                f"{folder}: another `{command}` (process {owner}) works there; end it, or give another {key}"
            ) from None
        except OSError as error:
            raise MegarlError(
                f"{folder}: cannot be locked: {error.strerror}; the file system has to have flock (Lustre: mount -o flock)"
            ) from None
        with writing(folder / ".lock"):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


LOWEST_PORT, PORTS_WANTED = 10_000, 5_000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """That many different ports of `host`, an address of this machine, that nobody listens on now.

    They lie below those that the kernel gives to outgoing connections, so that none takes one before it is used, and are
    drawn at random, so that runs which look at the same moment find others.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = first_outgoing if first_outgoing > LOWEST_PORT + PORTS_WANTED else 65_536
    found: list[int] = []
    for port in random.SystemRandom().sample(range(LOWEST_PORT, last), last - LOWEST_PORT):
        if len(found) == count:
            return found
        with socket.socket() as s, suppress(OSError):
            s.bind((host, port))
            found.append(port)
    raise MegarlError(f"{host}: of the ports {LOWEST_PORT} to {last} only {len(found)} are free; {count} are needed")


def check_free(key: str, host: str, port: int) -> None:
    """MegarlError if `host`, an address of this machine, cannot be listened on at `port`. key: where the user chose it."""
    with socket.socket() as s:
        # Connections of the last life in TIME_WAIT do not matter.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise MegarlError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another") from None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what the batch scripts ask Slurm for ahead of a job's end (`#SBATCH --signal`)."""
ONE_WISH_S = 5.0


class Wish:
    """How often we were asked to end, and by what first."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0
        self._last = -ONE_WISH_S

    def heard(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT or now - self._last > ONE_WISH_S:
            self.count += 1
            self.signal = self.signal or number
        self._last = now


@contextmanager
def wishes() -> Iterator[Wish]:
    """Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal are counted; not a closed terminal under `nohup`."""
    wish = Wish()
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, wish.heard) for number in numbers}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
