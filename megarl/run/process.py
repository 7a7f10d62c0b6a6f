"""A command's own process and its machine: death with the supervisor, survival of a
lost screen, one command at a time per directory, free ports, and signals that ask a
command to save and end; these are counted instead of ending it.

Slurm sends signals more than once: to all processes of a job, while the batch script
forwards its own; or for the time limit and then for a preemption. So only the first
counts, except that Ctrl-C always does, since a person presses it.
"""

import ctypes
import io
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Buffer, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from megarl.core.base.errors import MegarlError
from megarl.core.base.locks import (
    holder,
    host_named,
    lock_file,
    name_holder,
    open_lock_file,
    unknown_holder,
)
from megarl.core.base.process import SUPERVISOR, die_with_parent, shared_memory_mark
from megarl.core.base.rundir import writing

PR_SET_CHILD_SUBREAPER = 36


def die_with_supervisor() -> None:
    """Make a role or rank die with its supervisor or torchrun, even if that is dead
    already. Call it before anything slow.
    """
    # removed, because this process's children have another parent
    supervisor = os.environ.pop(SUPERVISOR, None)
    if supervisor is not None:
        die_with_parent()
        if os.getppid() != int(supervisor):
            os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make processes that a dead role leaves children of this process, which can then
    find and kill them. Linux only.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def have_streams() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr; otherwise the next opened
    file would get its number.
    """
    streams = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    for number, (name, mode) in enumerate(streams):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
        # Python sets None where a stream was closed at its start
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  (open as long as the process lives)


def outlive_screen() -> None:
    """From now on, discard output if writing it fails, so that a closed pager, a dead
    `tee` or a full disk ends no run.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue  # a test captures it, or `have_streams` has opened it
        stream.flush()
        buffer = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
        # write_through (PYTHONUNBUFFERED) would stop at our buffer, which the end of a
        # line flushes, too.
        line_buffering = stream.line_buffering or stream.write_through
        lasting = io.TextIOWrapper(
            buffer, stream.encoding, "replace", line_buffering=line_buffering
        )
        setattr(sys, name, lasting)
        setattr(sys, f"__{name}__", lasting)


class _Lasting(io.FileIO):
    """A file descriptor that is redirected to /dev/null once writing to it fails."""

    def write(self, data: Buffer, /) -> int:
        """Write the data; if that fails, discard it and all that follows."""
        try:
            return super().write(data)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def remove_shared_memory(session: int) -> None:
    """Remove the shared memory of a session that has ended."""
    for path in Path("/dev/shm").glob(f"*{shared_memory_mark(session)}*"):
        path.unlink(missing_ok=True)


def remove_abandoned_shared_memory() -> None:
    """Remove the shared memory of all sessions that have ended, such as those of roles
    whose supervisor was killed.
    """
    alive = set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            alive.add(os.getsid(pid))
    mark = re.compile(shared_memory_mark(r"(\d+)"))
    matches = [mark.search(path.name) for path in Path("/dev/shm").iterdir()]
    sessions = {int(match[1]) for match in matches if match is not None}
    for session in sessions - alive:
        with suppress(PermissionError):  # another user's
            remove_shared_memory(session)


BEAT_S = 5.0
"""Interval at which the holder of a lock sets the time of its file, for other nodes,
which may not see the lock (Lustre with localflock, NFS with nolock).
"""
LONG_AGO_S = 600.0
"""A lock file of another node whose time is older than this was left behind; nobody
waits to see whether it is still set.
"""


@contextmanager
def lock(folder: Path, command: str, key: str) -> Iterator[None]:
    """Lock the folder, so that only one `command` works there; the kernel unlocks it
    when we die. key: the option's name.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # unbuffered, so that closing it writes nothing
        file = os.fdopen(open_lock_file(path), "rb+", buffering=0)
    except OSError as error:
        raise MegarlError(f"{key}: cannot write in {folder}: {error.strerror}") from None
    with file:
        elsewhere = host_named(file.fileno()) not in ("", socket.gethostname())
        try:
            lock_file(file.fileno())
            if elsewhere and _beats(path):  # that node's lock is not seen from here
                raise BlockingIOError
        except BlockingIOError:
            process = holder(file.fileno())
            if process:
                problem = f"another `{command}` ({process}) is at work there; end it"
            else:
                problem = unknown_holder(path)
            raise MegarlError(f"{folder}: {problem}, or give another {key}") from None
        except OSError as error:
            raise MegarlError(
                f"{folder}: cannot be locked: {error.strerror}; the file system must support flock"
                " (Lustre: mount -o flock)"
            ) from None
        with writing(path):
            name_holder(file.fileno())
        released = threading.Event()
        threading.Thread(target=_beat, args=(path, released), daemon=True).start()
        try:
            yield
        finally:
            released.set()
            with suppress(OSError):
                file.truncate(0)  # a successor on another node need not wait


def _beat(path: Path, released: threading.Event) -> None:
    """Set the file's time every BEAT_S until the lock is released."""
    while not released.wait(BEAT_S):
        with suppress(OSError):
            os.utime(path)


def _beats(path: Path) -> bool:
    """Return whether a process on another node still sets the time of this file. It
    looks whether the time changes, so the nodes' clocks may differ by minutes.
    """
    first = path.stat().st_mtime
    if time.time() - first >= LONG_AGO_S:
        return False
    end = time.monotonic() + 3 * BEAT_S
    while time.monotonic() < end:
        time.sleep(BEAT_S / 5)
        with path.open("rb") as file:  # NFS asks its server when a file is opened
            if os.fstat(file.fileno()).st_mtime != first:
                return True
    return False


LOWEST_PORT = 10_000
PORTS_WANTED = 5_000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return this many distinct ports of `host`, an address of this machine, on which
    nobody is listening. They are below the kernel's range for outgoing connections, so
    that no connection takes one before it is used, unless that range leaves too few.
    They are drawn at random, so that runs that look at the same time find different
    ones.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first_outgoing if first_outgoing > LOWEST_PORT + PORTS_WANTED else 65_536
    candidates = list(range(LOWEST_PORT, end))
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            break
        with socket.socket() as s, suppress(OSError):  # OSError: somebody listens there
            s.bind((host, port))
            ports.append(port)
    if len(ports) < count:
        raise MegarlError(
            f"{host}: of the ports {LOWEST_PORT} to {end - 1} only {len(ports)} are free; {count}"
            " are needed"
        )
    return ports


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask to end. Batch scripts make Slurm send SIGUSR1 before a job's end
(`#SBATCH --signal`).
"""
MAKE_ROOM = (signal.SIGTERM, signal.SIGUSR1)
"""Signals to a job that has to end now and will be resumed later."""


class StopRequest:
    """How often this process was asked to end, and by which signal first."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0

    def heard(self, number: int, _frame: FrameType | None) -> None:
        """Count a signal: the first, and each Ctrl-C (see the module)."""
        if number == signal.SIGINT or not self.count:
            self.count += 1
            self.signal = self.signal or number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Count Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal (unless under `nohup`)
    instead of ending.
    """
    request = StopRequest()
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
    earlier = {number: signal.signal(number, request.heard) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
