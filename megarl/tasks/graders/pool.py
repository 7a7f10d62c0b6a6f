"""A pool of grading processes. It survives whatever an answer does to one of them.

    check(submission) ─► a free worker ─► verdict            worker hangs: killed, replaced, verdict "timeout"
                                                                   worker dies:  replaced, the answer tried once more

Workers are plain subprocesses that import neither torch nor the controller, and are ready within a second. pebble is
not used: its workers are multiprocessing's, which fork the controller with all its threads or first import its main module.
"""

import asyncio
import logging
import sys

import msgspec

from megarl.core.base.contracts import WRONG, GraderDown, Verdict
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import environment

log = logging.getLogger(__name__)
START_LIMIT_S = 120.0
KILL_MARGIN_S = 2.0
"""Grace before killing: a worker stops by itself at the limit unless it hangs inside a C call."""
TRIES = 2


class Pool:
    """`size` workers of one grader, each asked one thing at a time. Made within a running event loop."""

    def __init__(self, size: int, limit_s: float, grader: str = "math") -> None:
        self._limit_s, self._grader = limit_s, grader
        self._free: asyncio.Queue[asyncio.Task[asyncio.subprocess.Process]] = asyncio.Queue()
        self._workers: set[asyncio.Task[asyncio.subprocess.Process]] = set()
        for _ in range(size):
            self._free.put_nowait(self._start())

    async def check(self, submission: Submission) -> Verdict:
        """Return the grader's verdict. GraderDown if workers fail at it `TRIES` times."""
        for attempt in range(TRIES):
            starting, healthy = await self._free.get(), False
            try:
                verdict = await asyncio.wait_for(_ask(await starting, submission), self._limit_s + KILL_MARGIN_S)
                healthy = True
                return verdict
            except TimeoutError:
                log.warning(
                    "a grading process hung and is replaced; the answer counts as wrong: %.80r", submission.answer
                )
                return Verdict(WRONG, timeout=True)
            except (OSError, EOFError, GraderDown, asyncio.IncompleteReadError, ValueError) as error:
                log.warning("a grading process failed and is replaced (attempt %d): %s", attempt + 1, error)
            finally:
                if not healthy:
                    self._end(starting)
                self._free.put_nowait(starting if healthy else self._start())
        raise GraderDown(f"grading processes failed {TRIES} times at the answer {submission.answer[:80]!r}")

    def close(self) -> None:
        for starting in list(self._workers):
            self._end(starting)

    def _start(self) -> "asyncio.Task[asyncio.subprocess.Process]":
        starting = asyncio.create_task(_started(self._limit_s, self._grader))
        self._workers.add(starting)
        return starting

    def _end(self, starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
        self._workers.discard(starting)
        if not starting.done():
            starting.cancel()
        elif not starting.cancelled() and not starting.exception() and starting.result().returncode is None:
            starting.result().kill()


async def _started(limit_s: float, grader: str) -> asyncio.subprocess.Process:
    """Start a worker and wait until it is ready."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "megarl.tasks.graders.worker", str(limit_s), grader,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        env=environment(),
    )  # fmt: skip
    assert worker.stdout
    try:
        line = await asyncio.wait_for(worker.stdout.readline(), START_LIMIT_S)
    except BaseException as error:
        worker.kill()
        if isinstance(error, TimeoutError):
            raise GraderDown(f"a grading process was not ready within {START_LIMIT_S:g} s") from None
        raise
    if line != b"ready\n":
        raise GraderDown(f"a grading process ended as it started (it said {line!r}; its error is on stderr)")
    return worker


async def _ask(worker: asyncio.subprocess.Process, submission: Submission) -> Verdict:
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(msgspec.json.encode(submission) + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line:
        raise EOFError("it ended")
    return msgspec.json.decode(line, type=Verdict)
