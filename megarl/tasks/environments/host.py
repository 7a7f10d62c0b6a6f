"""Keeps an environment's process alive, and determines which episode is to blame when
the process fails.

    episodes ── ask ──► Process ── frames ──► worker.py
                          ▲ reply, or Died(culprit)
                          └── shared memory that says which episode's code is running

A process that dies or blocks is killed, and replaced at the next request. The episode
whose code was running fails; others are replayed.
"""

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import signal
import subprocess
import sys
import time

import msgspec

from megarl.core.base.contracts import EnvironmentDown
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import decode, encode
from megarl.tasks.environments.worker import (
    HEAD,
    MARK,
    EpisodeReply,
    EpisodeRequest,
    Setup,
    frame,
    longest_reply,
)
from megarl.tasks.graders.functions import environment

log = logging.getLogger(__name__)
START_LIMIT_S = 120.0
MARGIN_S = 5.0
"""Grace after the time at which the process should itself have ended a slow call. If it
then has sent nothing for that long, it is considered blocked.
"""


class Died(Exception):
    """The process ended before it replied. culprit: the episode whose code was running;
    0 if none was, or if unknown.
    """

    def __init__(self, culprit: int, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


class Process:
    """One run of an environment's process, after its greeting."""

    def __init__(self, process: asyncio.subprocess.Process, mark: mmap.mmap, longest: int) -> None:
        """mark: the memory in which the process says whose code is running; longest:
        bytes of its longest reply.
        """
        self._process = process
        self._mark = mark
        self._longest = longest
        self._waiting: dict[int, asyncio.Future[EpisodeReply]] = {}
        self._last_reply_at = 0.0
        self.over: Died | None = None  # set once it can answer no more requests
        self._reading = asyncio.create_task(self._read())

    async def ask(self, request: EpisodeRequest) -> EpisodeReply:
        """Return the reply to a request. The process itself should end the call within
        `limit_s`. If it then sends nothing for MARGIN_S, not even to others, it is
        ended; if only this call is late, after twice the time the reply is an error.
        Raises Died if the process ends first.
        """
        assert self._process.stdin
        if self.over:
            raise Died(self.over.culprit, str(self.over))
        reply: asyncio.Future[EpisodeReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = reply
        try:
            # if it has just ended, `_read` notices that too
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(frame(encode(request)))
            for _ in range(2):  # a process that is slow because of its load gets twice the time
                done, _ = await asyncio.wait({reply}, timeout=request.limit_s + MARGIN_S)
                if done:
                    return reply.result()
                if time.monotonic() - self._last_reply_at > MARGIN_S:
                    culprit = self._running_episode() or request.episode
                    reason = f"blocked its process for more than {request.limit_s:g} s"
                    self.end(Died(culprit, reason))
                    return reply.result()  # raises Died
            error = f"took longer than {request.limit_s:g} s, and still runs"
            return EpisodeReply(call=request.call, error=error)
        finally:
            self._waiting.pop(request.call, None)

    def end(self, reason: Died) -> None:
        """Kill the process and its children. Everyone who waits for a reply gets the
        error `reason`.
        """
        if self.over:
            return
        self.over = reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Died(reason.culprit, str(reason)))

    def _running_episode(self) -> int:
        """Return the episode whose code is running, 0 if none is."""
        (episode,) = MARK.unpack_from(self._mark)
        return int(episode)

    async def _read(self) -> None:
        """Pass replies on to those who wait for them, until the process ends or writes
        what is not a reply; then end it with that reason.
        """
        assert self._process.stdout
        try:
            while True:
                reply = await _received(self._process.stdout, self._longest)
                self._last_reply_at = time.monotonic()
                waiting = self._waiting.get(reply.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (asyncio.IncompleteReadError, OSError):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), MARGIN_S)
            reason = f"ended its process ({_status(self._process.returncode)})"
        except (msgspec.DecodeError, ValueError) as error:
            reason = f"damaged its process's output ({error})"
        if not self.over:
            log.warning("a process of an environment ended: %s", reason)
        self.end(Died(self._running_episode(), reason))


class Host:
    """The process of one environment, started on demand."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        first_part = next(iter(setup.parts.values()))
        self._name = f"{first_part.key}: {setup.environment}"
        self._starting: asyncio.Task[Process] | None = None
        self.numbers = itertools.count(1)  # for episodes and calls

    def check(self) -> None:
        """Raise MegarlError if the environment is unusable. Another process checks
        that, since an import may do anything.
        """
        try:
            done = subprocess.run(
                [*_COMMAND, "-1"],  # no shared memory: no episode will run
                input=frame(encode(self._setup)),
                env=environment(),
                capture_output=True,
                timeout=START_LIMIT_S,
                start_new_session=True,
            )
            greeting: EpisodeReply = decode(done.stdout[HEAD.size :], EpisodeReply)
            if greeting.error is None:
                return
            problem = greeting.error
        except subprocess.TimeoutExpired:
            problem = f"{self._name} is not ready within {START_LIMIT_S:g} s"
        except msgspec.DecodeError:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else _status(done.returncode)
            problem = f"{self._name} cannot be used: its process ended as it started: {reason}"
        raise MegarlError(problem)

    async def process(self) -> Process:
        """Return the live process. EnvironmentDown if none can be started."""
        starting = self._starting
        if starting is None or (starting.done() and starting.result().over):
            starting = asyncio.create_task(_started(self._setup))
            self._starting = starting
        try:
            # Several episodes wait for one start, which one that is cancelled must not
            # cancel.
            return await asyncio.shield(starting)
        except (EnvironmentDown, OSError) as error:  # OSError: no process can be had
            if self._starting is starting:
                self._starting = None  # so that the next request tries again
            raise EnvironmentDown(f"{self._name}: {error}") from None

    def close(self) -> None:
        """End the process."""
        if self._starting is None:
            return
        if not self._starting.done():
            self._starting.cancel()
        elif not self._starting.cancelled() and not self._starting.exception():
            self._starting.result().end(Died(0, "was ended"))


_CODE = "import sys; from megarl.tasks.environments.worker import main; main(int(sys.argv[1]))"
_COMMAND = (sys.executable, "-c", _CODE)


async def _started(setup: Setup) -> Process:
    """Start a process and wait until it is ready. EnvironmentDown if it does not get
    ready.
    """
    descriptor = os.memfd_create("mark")
    longest = longest_reply(setup)
    try:
        os.ftruncate(descriptor, MARK.size)
        mark = mmap.mmap(descriptor, MARK.size)
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            str(descriptor),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=longest,
            env=environment(),
            pass_fds=(descriptor,),
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    try:
        await _greet(process, setup)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return Process(process, mark, longest)


async def _greet(process: asyncio.subprocess.Process, setup: Setup) -> None:
    """Send a new process its setup, and wait until it is ready. EnvironmentDown if it
    is not.
    """
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(frame(encode(setup)))
        reading = _received(process.stdout, longest_reply(setup))
        greeting = await asyncio.wait_for(reading, START_LIMIT_S)
    except TimeoutError:
        raise EnvironmentDown(f"its process was not ready within {START_LIMIT_S:g} s") from None
    except (EOFError, OSError, RuntimeError, msgspec.DecodeError, ValueError):
        raise EnvironmentDown(
            "its process ended as it started; the controller's log has the reason"
        ) from None
    if greeting.error is not None:
        raise EnvironmentDown(greeting.error)


async def _received(source: asyncio.StreamReader, longest: int) -> EpisodeReply:
    """Read one reply. ValueError or DecodeError if that is no reply, or has more than
    `longest` bytes; IncompleteReadError if the process ends.
    """
    (length,) = HEAD.unpack(await source.readexactly(HEAD.size))
    if length > longest:
        raise ValueError(f"a reply of {length:,} bytes")
    return decode(await source.readexactly(length), EpisodeReply)


def _status(code: int | None) -> str:
    """Say how a process ended. code: its status, -n for a signal, None if it runs."""
    if code is None:
        return "it still runs"
    if code < 0:
        return f"signal {-code}"
    return f"status {code}"
