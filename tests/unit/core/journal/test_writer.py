"""The journal behind the event loop: nothing that was taken from the queue is lost when
the controller ends.
"""

import asyncio
import threading
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.journal.journal import Journal, JournalReader
from megarl.core.journal.records import Admitted
from megarl.core.journal.writer import JournalWriter
from tests.full_disk import files_no_larger_than


def admitted(ticket: int) -> Admitted:
    return Admitted(ticket=ticket, task="math", prompt_id="p", epoch=0, due_step=0)


async def held_up(folder: Path) -> tuple[JournalWriter, threading.Event, asyncio.Task[None]]:
    """A writer at its first record, whose thread waits for the event."""
    ledger = JournalWriter(Journal.open(folder, 2, 1))
    free = threading.Event()
    ledger._thread.submit(free.wait, 10)
    ledger.write(admitted(0))
    writer = asyncio.create_task(ledger.run())
    await asyncio.sleep(0.01)
    return ledger, free, writer


def test_a_write_that_is_cancelled_before_its_turn_is_written_all_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        ledger, free, writer = await held_up(tmp_path)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        ledger.write(admitted(1))
        free.set()
        await ledger.close()

    asyncio.run(run())
    assert [r.ticket for r in JournalReader(tmp_path).replay() if isinstance(r, Admitted)] == [0, 1]


@pytest.mark.parametrize("told", [True, False], ids=["told", "cancelled"])
def test_a_full_disk_is_named_to_all_who_ask(tmp_path: Path, told: bool) -> None:
    """Also for what is queued while the write fails, and by the last who asks, if the
    first has gone away.
    """

    async def run() -> None:
        ledger, free, writer = await held_up(tmp_path)
        ledger.write(admitted(1))
        if not told:
            writer.cancel()
        with files_no_larger_than((tmp_path / "000000.journal").stat().st_size):
            free.set()
            (failure,) = await asyncio.gather(writer, return_exceptions=True)
            assert isinstance(failure, MegarlError if told else asyncio.CancelledError)
            for asked in (ledger.groups([0]), ledger.close()):
                with pytest.raises(MegarlError, match=r"000000\.journal: .*File too large"):
                    await asked
        Journal.open(tmp_path, 2, 1).close()

    asyncio.run(run())
