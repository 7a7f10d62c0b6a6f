"""A pool of grading processes, which survives whatever an answer does to one of them.

    check(submission) ─► a free worker ─► verdict
        the worker hangs: it is killed and replaced, the verdict is "timeout"
        the worker dies: it is replaced, and the answer tried once more

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

type Worker = asyncio.Task[asyncio.subprocess.Process]
"""A worker that is starting, or ready if the task is done."""


class Pool:
    """`size` workers for one grader, each with one answer at a time. Create it within a
    running event loop.
    """

    def __init__(self, size: int, limit_s: float, grader: str = "math") -> None:
        self._limit_s = limit_s
        self._grader = grader
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        self._workers: set[Worker] = set()
        self._ended: list[Worker] = []
        for _ in range(size):
            self._free.put_nowait(self._start())

    async def check(self, submission: Submission) -> Verdict:
        """Return the grader's verdict, wrong if a worker takes too long. A worker that
        is late, fails, or whose caller is cancelled is replaced. GraderDown if workers
        fail `TRIES` times.
        """
        last_error: Exception | None = None
        for attempt in range(TRIES):
            worker = await self._free.get()
            is_sound = False
            try:
                verdict = await asyncio.wait_for(
                    _ask(await worker, submission), self._limit_s + KILL_MARGIN_S
                )
                is_sound = True
                return verdict
            except TimeoutError:
                log.warning(
                    "a grading process hung and is replaced; the answer counts as wrong: %.80r",
                    submission.answer,
                )
                return Verdict(WRONG, timeout=True)
            except (OSError, EOFError, RuntimeError, GraderDown, ValueError) as error:
                last_error = error
                log.warning(
                    "a process of the grader %s failed (attempt %d) and is replaced: %s",
                    self._grader,
                    attempt + 1,
                    error,
                )
            finally:
                if not is_sound:
                    self._end(worker)
                    worker = self._start()
                self._free.put_nowait(worker)
        raise GraderDown(
            f"processes of the grader {self._grader} failed {TRIES} times at the answer"
            f" {submission.answer[:80]!r}, the last time: {last_error}"
        )

    def close(self) -> None:
        """End the processes."""
        for worker in list(self._workers):
            self._end(worker)

    async def end(self) -> None:
        """Close, and wait until the processes are gone, so that the event loop may be
        closed.
        """
        self.close()
        await asyncio.gather(*map(_wait_for_end, self._ended), return_exceptions=True)

    def _start(self) -> Worker:
        """Begin to start a worker, and return it before it is ready."""
        worker = asyncio.create_task(_started(self._limit_s, self._grader))
        self._workers.add(worker)
        return worker

    def _end(self, worker: Worker) -> None:
        """Take a worker out of the pool; kill its process, or cancel its start."""
        self._workers.discard(worker)
        self._ended.append(worker)
        if not worker.done():
            worker.cancel()
            return
        if worker.cancelled() or worker.exception():  # its start failed: there is no process
            return
        process = worker.result()
        if process.returncode is None:
            process.kill()


async def _wait_for_end(worker: Worker) -> None:
    """Wait until a worker's process has ended and its pipes are closed. Raises what its
    start raised, if that failed.
    """
    process = await worker
    await process.communicate()


async def _started(limit_s: float, grader: str) -> asyncio.subprocess.Process:
    """Start a worker and wait until it is ready. GraderDown if it is late or ends."""
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
    """Return a worker's verdict on a submission. EOFError if the worker ends."""
    assert worker.stdin
    assert worker.stdout
    worker.stdin.write(msgspec.json.encode(submission) + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line:
        raise EOFError(f"it ended with status {await worker.wait()}")
    score, timeout, error = msgspec.json.decode(line, type=tuple[float | None, bool, str])
    return Verdict(math.nan if score is None else score, timeout, error)
