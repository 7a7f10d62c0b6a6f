"""The journal behind the event loop: one thread writes and reads it, several records at a time, one fsync each time.

    write(record) ─► queue ─► [thread] journal.append(all that has come meanwhile) ─► the awaited write returns

The controller's own state runs ahead of the journal by what is in the queue; what it offers to others does not.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megarl.core.base.types import Group
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import JournalRecord
from megarl.core.telemetry.spans import UNRECORDED, Spans

T = TypeVar("T")


class Ledger:
    """Owns `journal` while it runs; nobody else may touch it then."""

    def __init__(self, journal: Journal, spans: Spans = UNRECORDED) -> None:
        self._journal, self._spans = journal, spans
        self._thread = ThreadPoolExecutor(1, "journal")
        self._queue: list[tuple[JournalRecord, asyncio.Future[None]]] = []
        self._come = asyncio.Event()

    def write(self, record: JournalRecord) -> "asyncio.Future[None]":
        """Queue a record, in the order of calls. Await the result to know that it is on disk."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((record, written))
        self._come.set()
        return written

    async def run(self) -> None:
        """Write what comes, until cancelled. Raises what the journal raises."""
        while True:
            await self._come.wait()
            self._come.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write what is in the queue."""
        batch, self._queue = self._queue, []
        if batch:
            begin = time.monotonic()
            await self._call(lambda: self._journal.append(*(record for record, _ in batch)))
            self._spans.span("controller/journal", "write", begin, time.monotonic(), records=len(batch))
        for _, written in batch:
            if not written.cancelled():
                written.set_result(None)

    async def groups(self, tickets: Sequence[int]) -> tuple[Group, ...]:
        """The finished groups of these tickets."""
        return await self._call(lambda: self._journal.groups(tickets))

    async def drop_before(self, step: int) -> None:
        """No batch before `step` will be asked for again."""
        await self._call(lambda: self._journal.drop_before(step))

    async def close(self) -> None:
        """Write what is left and let the next writer in."""
        await self.flush()
        await self._call(self._journal.close)
        self._thread.shutdown()

    async def _call(self, function: Callable[[], T]) -> T:
        # Shielded: what has been taken from the queue is written even if who asked for it is cancelled before its turn.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))
