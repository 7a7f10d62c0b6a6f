"""A pool of grading processes, which survives whatever an answer does to one of them.

    check(submission) ─► a free worker ─► verdict            worker hangs: killed, replaced, verdict "timeout"
                                                                   worker dies:
                                                                   replaced, the answer
                                                                   tried once more

Workers are plain subprocesses that import neither torch nor the controller, and are
ready within a second. pebble is not used, because its workers come from
multiprocessing: they fork the controller with all its threads, or first import its main
module.
"""

import asyncio
import logging
import math
import sys

import msgspec

from megarl.core.base.contracts import WRONG, GraderDown, Verdict
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import environment

log = logging.getLogger(__name__)
START_LIMIT_S = 120.0
KILL_MARGIN_S = 2.0
"""Grace before a worker is killed: unless it hangs inside a C call, it stops by itself
at the limit.
"""
TRIES = 2


class Pool:
    """`size` workers for one grader, each with one answer at a time. Create it within a
    running event loop.
    """

    def __init__(self, size: int, limit_s: float, grader: str = "math") -> None:
        self._limit_s = limit_s
        self._grader = grader
        self._free: asyncio.Queue[asyncio.Task[asyncio.subprocess.Process]] = asyncio.Queue()
        self._workers: set[asyncio.Task[asyncio.subprocess.Process]] = set()
        self._ended: list[asyncio.Task[asyncio.subprocess.Process]] = []
        for _ in range(size):
            self._free.put_nowait(self._start())

    async def check(self, submission: Submission) -> Verdict:
        """Return the grader's verdict. GraderDown if workers fail `TRIES` times."""
        why: Exception | None = None
        for attempt in range(TRIES):
            starting = await self._free.get()
            stays = False
            try:
                verdict = await asyncio.wait_for(
                    _ask(await starting, submission), self._limit_s + KILL_MARGIN_S
                )
                stays = True
                return verdict
            except TimeoutError:
                said = "a grading process hung and is replaced; the answer counts as wrong: %.80r"
                log.warning(said, submission.answer)
                return Verdict(WRONG, timeout=True)
            except (OSError, EOFError, RuntimeError, GraderDown, ValueError) as error:
                why = error
                said = "a process of the grader %s failed (attempt %d) and is replaced: %s"
                log.warning(said, self._grader, attempt + 1, why)
            finally:
                if not stays:
                    self._end(starting)
                self._free.put_nowait(starting if stays else self._start())
        what = (
            f"processes of the grader {self._grader} failed {TRIES} times at the answer"
            f" {submission.answer[:80]!r}"
        )
        raise GraderDown(f"{what}, the last time: {why}")

    def close(self) -> None:
        for starting in list(self._workers):
            self._end(starting)

    async def end(self) -> None:
        """Close, and wait until the processes are gone, so that the event loop may be
        closed.
        """
        self.close()
        await asyncio.gather(*map(_gone, self._ended), return_exceptions=True)

    def _start(self) -> "asyncio.Task[asyncio.subprocess.Process]":
        starting = asyncio.create_task(_started(self._limit_s, self._grader))
        self._workers.add(starting)
        return starting

    def _end(self, starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
        self._workers.discard(starting)
        self._ended.append(starting)
        if not starting.done():
            starting.cancel()
        elif (
            not starting.cancelled()
            and not starting.exception()
            and starting.result().returncode is None
        ):
            starting.result().kill()


async def _gone(starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
    await (await starting).communicate()


async def _started(limit_s: float, grader: str) -> asyncio.subprocess.Process:
    """Start a worker and wait until it is ready."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "megarl.tasks.graders.worker",
        str(limit_s),
        grader,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
        env=environment(),
    )
    assert worker.stdout
    try:
        line = await asyncio.wait_for(worker.stdout.readline(), START_LIMIT_S)
    except BaseException as error:
        worker.kill()
        if isinstance(error, TimeoutError):
            raise GraderDown(
                f"a grading process was not ready within {START_LIMIT_S:g} s"
            ) from None
        raise
    if line != b"ready\n":
        raise GraderDown(
            f"a grading process ended as it started (it said {line!r}; its error is on stderr)"
        )
    return worker


async def _ask(worker: asyncio.subprocess.Process, submission: Submission) -> Verdict:
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(msgspec.json.encode(submission) + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line:
        raise EOFError(f"it ended with status {await worker.wait()}")
    score, timeout, error = msgspec.json.decode(line, type=tuple[float | None, bool, str])
    return Verdict(math.nan if score is None else score, timeout, error)
