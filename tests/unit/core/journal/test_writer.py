"""The journal behind the event loop: nothing that was taken from the queue is lost when the controller ends."""

import asyncio
import threading
from pathlib import Path

from megarl.core.journal.journal import Journal, JournalReader
from megarl.core.journal.records import Admitted
from megarl.core.journal.writer import JournalWriter


def admitted(ticket: int) -> Admitted:
    return Admitted(ticket=ticket, task="math", prompt_id="p", epoch=0, due=0)


def test_a_write_that_is_cancelled_before_its_turn_is_written_all_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        ledger, busy = JournalWriter(Journal.open(tmp_path, 2, 1)), threading.Event()
        ledger._thread.submit(busy.wait, 10)
        ledger.write(admitted(0))
        writer = asyncio.create_task(ledger.run())
        await asyncio.sleep(0.01)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        ledger.write(admitted(1))
        busy.set()
        await ledger.close()

    asyncio.run(run())
    assert [r.ticket for r in JournalReader(tmp_path).replay() if isinstance(r, Admitted)] == [0, 1]
