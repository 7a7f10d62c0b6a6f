"""A journal that does not block the event loop: a record changes the state at once and
is on disk when the write is awaited.

    write(record) ─► state.apply, bytes ─► queue
                  ─► [thread] all queued records: one write, one fsync ─► returns

`settle` makes the bytes of a group with experts in a thread before. `groups` first
writes the queue, so every batch that the learner gets is on disk.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from megarl.core.base.types import Group
from megarl.core.journal import file
from megarl.core.journal.file import RecordBytes
from megarl.core.journal.journal import Applied, Journal
from megarl.core.journal.records import Finished, JournalRecord, Removed, State
from megarl.core.telemetry.spans import spans


class JournalWriter:
    """Owns `journal` while it runs. state: the state after all records, written or
    queued.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.state: State = journal.state
        self._thread = ThreadPoolExecutor(1, "journal")
        self._queue: list[tuple[Applied, asyncio.Future[None]]] = []
        self._has_records = asyncio.Event()

    async def settle(self, record: Finished | Removed) -> None:
        """Apply the record that ends a ticket, and write it. The bytes of a group with
        experts are made in a thread: gigabytes would hold the event loop up for
        seconds.
        """
        data = None
        if isinstance(record, Finished) and record.group.has_routing:
            data = await asyncio.to_thread(file.packed, record)
        await self.write(record, data)

    def write(
        self, record: JournalRecord, data: RecordBytes | None = None
    ) -> "asyncio.Future[None]":
        """Apply a record and queue it. Await the result to be sure that it is on disk.
        data: the record's bytes, if they are known.
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((self._journal.applied(record, data), written))
        self._has_records.set()
        return written

    async def run(self) -> None:
        """Write queued records until cancelled. Raises errors of the journal."""
        while True:
            await self._has_records.wait()
            self._has_records.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write the queued records. A failure is raised again by every later call,
        since the first caller may be gone.
        """
        batch = self._queue
        self._queue = []
        records = [applied for applied, _ in batch]
        timed = spans.timed("controller/journal", "write", records=len(batch))
        with timed if batch else nullcontext():
            await self._call(lambda: self._journal.write(records))
        for _, written in batch:
            if not written.cancelled():
                written.set_result(None)

    async def groups(self, tickets: Sequence[int]) -> tuple[Group, ...]:
        """Return the groups of these tickets, from disk, with outlines of their
        routing.
        """
        await self.flush()
        return await self._call(lambda: self._journal.groups(tickets))

    async def choices(self, ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        """Return the packed choices of these rollouts of a group, from disk, as
        `JournalReader.choices`.
        """
        return await self._call(lambda: self._journal.choices(ticket, rollouts))

    async def drop_before(self, step: int) -> None:
        """Delete the files that no batch from `step` on needs."""
        first_needed = self._journal.forget(step)
        await self._call(lambda: self._journal.drop(first_needed))

    async def close(self) -> None:
        """Write the rest of the queue and release the journal. Raises the error if a
        record could not be written.
        """
        try:
            await self.flush()
        finally:
            await self._call(self._journal.close)
            self._thread.shutdown()

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Call a function in the journal's thread. It runs to its end even if the
        caller is cancelled (`shield`), or records taken from the queue would be lost.
        """
        call = asyncio.get_running_loop().run_in_executor(self._thread, function)
        return await asyncio.shield(call)
