"""The journal on a real file system: what is appended comes back after any crash, and
damage is never passed over.
"""

import errno
import logging
import multiprocessing
import os
import random
import resource
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Group, Prompt, Routing, encode, int32
from megarl.core.journal import journal as journal_module
from megarl.core.journal.file import RECORD_HEADER, record_of, scan
from megarl.core.journal.journal import REMEMBERED, Journal, JournalReader
from megarl.core.journal.records import (
    Admitted,
    Evaluated,
    Finished,
    JournalRecord,
    PublishedVersion,
    Removed,
    Session,
    Snapshot,
    State,
)
from tests import make


def finished(
    ticket: int, correct: bool = True, tokens: int = 5, void: str = "", time: float = 0.0
) -> Finished:
    """Every third group has recorded experts."""
    segment = make.segment(range(tokens), ticket, logprob=-ticket)
    routing = None
    if ticket % 3 == 2:
        table = np.arange(tokens * 6).reshape(tokens, 3, 2) % 5
        routing = Routing.of(table + ticket, 256)
    rollout = make.rollout(segment, reward=1.0 if correct else -1.0, routing=routing)
    prompt = Prompt(id=f"p{ticket % 3}", tokens=int32([7, 8]), answer="15")
    return Finished(
        group=Group(ticket=ticket, prompt=prompt, rollouts=() if void else (rollout,), void=void),
        time=time,
    )


def admitted(ticket: int) -> Admitted:
    return Admitted(
        ticket=ticket,
        task="math",
        prompt_id=f"p{ticket % 3}",
        epoch=ticket // 3,
        due_step=ticket // 2,
    )


def published(version: int, time: float = 0.0) -> PublishedVersion:
    return PublishedVersion(version=version, time=time, compute_hours=0.5, servers=("a", "b"))


def written(path: Path, count: int, rotate_bytes: int = 1 << 20) -> list[JournalRecord]:
    """A journal with `count` tickets, admitted and finished one by one, two a batch."""
    records: list[JournalRecord] = []
    journal = Journal.open(path, 2, 1, rotate_bytes=rotate_bytes)
    for ticket in range(count):
        records += [admitted(ticket), finished(ticket)]
        journal.append(*records[-2:])
    journal.close()
    return records


def same(a: State, b: State) -> bool:
    return encode(a.snapshot()) == encode(b.snapshot())


def last_file(path: Path) -> Path:
    return sorted(path.glob("*.journal"))[-1]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "LOCK_TIMEOUT_S", 0.3)


def test_records_come_back_in_order(tmp_path: Path) -> None:
    evaluated = Evaluated(
        version=3, time=9.0, compute_hours=0.5, pass_rate=0.25, n_prompts=10, samples=2
    )
    records: list[JournalRecord] = [
        Session(session="s", time=1.0, devices=2, compute_unit="core"),
        admitted(0),
        admitted(1),
        finished(1),
        published(3),
        Removed(ticket=0, reason="zero variance", pass_rate=1.0, generated_tokens=40),
        evaluated,
    ]
    journal = Journal.open(tmp_path, 2, 1)
    journal.append(*records[:2])
    journal.append(*records[2:])
    snapshot, *found = journal.replay()
    assert isinstance(snapshot, Snapshot)
    assert [encode(r) for r in found] == [encode(r) for r in records]
    journal.close()
    again = Journal.open(tmp_path, 2, 1)
    assert same(again.state, journal.state)
    assert same(again.state, again.fold())
    again.close()


def test_state_is_the_fold(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 2, 1)
    journal.append(*(admitted(t) for t in range(4)))
    journal.append(finished(2, correct=False), finished(0), finished(1, void="server answered 400"))
    journal.append(published(1), published(0))
    state = journal.state
    assert list(state.unfinished) == [3]
    assert state.admission.unfinished() == [3]
    assert state.admission.batch(0) == (0, 1)
    math = state.tasks["math"]
    assert (math.drawn, math.last.prompt_id, math.last.epoch) == (4, "p0", 1)
    assert math.pass_rates == {"p2": 0.0, "p0": 1.0}  # a void group says nothing about p1
    assert (state.finished, state.void, state.removed) == (3, 1, 0)
    assert state.generated_tokens == 10
    assert state.published_version == 1
    journal.append(Removed(ticket=3, reason="zero variance", pass_rate=0.0, generated_tokens=7))
    assert state.tasks["math"].pass_rates["p0"] == 0.0  # the latest
    assert (state.removed, state.generated_tokens) == (1, 17)
    journal.append(Admitted(ticket=4, task="code", prompt_id="p0", epoch=0, due_step=1))
    assert state.tasks["math"].pass_rates["p0"] == 0.0
    assert (state.tasks["code"].drawn, state.tasks["code"].pass_rates) == (1, {})
    journal.append(Admitted(ticket=5, task="math", prompt_id="p1", epoch=2, due_step=2, reset=True))
    assert (state.tasks["math"].drawn, state.tasks["math"].pass_rates) == (5, {})
    journal.close()


def test_compute_hours_add_up_over_sessions(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 1, 0)
    assert journal.state.compute_hours(5.0) == 0
    journal.append(Session(session="one", time=0.0, devices=4, compute_unit="gpu"))
    journal.append(admitted(0), finished(0, time=3600.0))
    assert journal.state.compute_hours(7200.0) == 8.0
    # the controller restarts within the session: the clock never stopped
    journal.append(Session(session="one", time=0.0, devices=4, compute_unit="gpu"))
    assert journal.state.compute_hours(7200.0) == 8.0
    # the supervisor died some time after the last record, and starts again much later
    # with fewer devices
    journal.append(Session(session="two", time=50_000.0, devices=2, compute_unit="gpu"))
    assert journal.state.compute_hours(50_000.0) == 4.0
    assert journal.state.compute_hours(53_600.0) == 6.0
    journal.close()


def test_groups_are_read_back_from_any_file(tmp_path: Path) -> None:
    records = written(tmp_path, 40, rotate_bytes=2000)
    groups = {r.group.ticket: r.group for r in records if isinstance(r, Finished)}
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=2000)
    assert len(journal.files()) > 5
    wanted = [39, 0, 17, 3]
    whole = journal.whole_groups(wanted)
    assert [encode(g) for g in whole] == [encode(groups[t]) for t in wanted]
    assert any(group.has_routing for group in whole)
    outlines = [encode(groups[t].outline) for t in wanted]
    assert [encode(g) for g in journal.groups(wanted)] == outlines
    assert journal.finished() == list(range(40))
    assert [type(r) for r in journal.replay() if not isinstance(r, Snapshot)] == [
        type(r) for r in records
    ]
    journal.append(admitted(40))
    with pytest.raises(MegarlError, match="ticket 40 has no group here"):
        journal.groups([40])
    journal.append(finished(40))
    assert journal.groups([40])[0].ticket == 40
    journal.close()


def test_choices_are_read_alone_and_checked(tmp_path: Path) -> None:
    """Damage in an old file is found by who asks for these experts, not by who reads
    the group.
    """
    journal = Journal.open(tmp_path, 2, 1)
    rollouts = []
    for rows in (4, 0, 7):
        table = np.full((rows, 3, 2), rows)
        routing = Routing.of(table, 256) if rows else None
        rollouts.append(make.rollout(make.segment([1] * 9), reward=1.0, routing=routing))
    group = msgspec.structs.replace(finished(0).group, rollouts=tuple(rollouts))
    journal.append(admitted(0), Finished(group=group, time=0.0), admitted(1), finished(1))
    assert journal.choices(0, [2, 0, 1]) == [b"\x07" * 42, b"\x04" * 24, b""]
    assert journal.choices(1, [0]) == [b""]
    journal.close()
    file = last_file(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"\x07" * 42, b"\x07" * 41 + b"\x06"))
    reader = JournalReader(tmp_path)
    assert reader.choices(0, [0]) == [b"\x04" * 24]
    [read] = reader.groups([0])
    assert [r.routing is not None for r in read.rollouts] == [True, False, True]
    with pytest.raises(MegarlError, match=r"000000\.journal: damaged at offset"):
        reader.choices(0, [2])
    with pytest.raises(MegarlError, match=r"000000\.journal: damaged at offset"):
        Journal.open(tmp_path, 2, 1)


def test_every_file_begins_with_the_fold_of_those_before(tmp_path: Path) -> None:
    written(tmp_path, 40, rotate_bytes=2000)
    state: State | None = None
    for record in JournalReader(tmp_path).replay():
        if isinstance(record, Snapshot):
            assert state is None or encode(state.snapshot()) == encode(record)
            state = State.restored(record)
        else:
            assert state is not None
            state.apply(record)


def test_files_no_checkpoint_replays_are_dropped(tmp_path: Path) -> None:
    written(tmp_path, 40, rotate_bytes=2000)
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=2000)
    whole = JournalReader(tmp_path).fold()
    before = journal.files()
    journal.drop(journal.forget(10))
    assert 0 < len(journal.files()) < len(before)
    assert [g.ticket for g in journal.groups(range(20, 40))] == list(range(20, 40))
    with pytest.raises(MegarlError, match="ticket 0 has no group here"):
        journal.groups([0])
    assert [journal.state.admission.batch(s) for s in range(10, 20)] == [
        whole.admission.batch(s) for s in range(10, 20)
    ]
    journal.append(admitted(40), finished(40))
    journal.close()
    again = Journal.open(tmp_path, 2, 1)
    assert again.state.finished == 41
    assert again.state.admission.batch(10) == (20, 21)
    again.close()


def test_a_file_with_one_late_group_is_kept(tmp_path: Path) -> None:
    """A slow ticket of an early file is what a replay needs: its file stays, whatever
    else is in it.
    """
    journal = Journal.open(tmp_path, 1, 30, rotate_bytes=2000)
    journal.append(*(admitted(t) for t in range(30)), finished(20))
    first = next(n for n in journal.files() if 20 in journal._groups_of(n))
    for ticket in [*range(20), *range(21, 30)]:
        journal.append(finished(ticket))
    journal.drop(journal.forget(20))
    assert first in journal.files()
    assert journal.groups([20])[0].ticket == 20
    journal.drop(journal.forget(21))
    assert first not in journal.files()
    journal.close()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_cut_anywhere_it_opens_with_the_whole_records_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal")
    records = written(path, 6)
    file = last_file(path)
    ends = []
    size = file.stat().st_size
    for entry, _ in scan(file):
        ends.append(entry.end)
    assert ends[-1] == size
    cut = data.draw(st.integers(ends[0], size))
    os.truncate(file, cut)
    reader = JournalReader(path)
    complete = sum(1 for end in ends[1:] if end <= cut)
    assert (
        len(list(reader.replay())) == 1 + complete
    )  # a reader sees what is complete, and leaves the rest alone
    assert file.stat().st_size == cut
    journal = Journal.open(path, 2, 1)
    assert file.stat().st_size == ends[complete]
    snapshot = next(iter(reader.replay()))
    assert isinstance(snapshot, Snapshot)
    expected = State.restored(snapshot)
    for record in records[:complete]:
        expected.apply(record)
    assert same(journal.state, expected)
    if complete % 2:  # the last ticket was admitted and its group is lost
        journal.append(finished(complete // 2))
    journal.close()


def test_a_torn_tail_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, 2)
    with last_file(tmp_path).open("ab") as file:
        file.write(bytes(100))  # a file system may leave zeros after a power failure
    with caplog.at_level(logging.WARNING):
        Journal.open(tmp_path, 2, 1).close()
    assert "the last record was cut short by a crash; 100 bytes removed" in caplog.text
    caplog.clear()
    Journal.open(tmp_path, 2, 1).close()
    assert caplog.text == ""


def test_a_file_of_any_size_is_read_in_little_memory(tmp_path: Path) -> None:
    """A stranger's may be a few bytes on the disk, and more than memory when it is
    read.
    """
    written(tmp_path, 2)
    file = last_file(tmp_path)
    count = len(list(scan(file)))
    os.truncate(file, 64 << 20)
    tracemalloc.start()
    assert len(list(scan(file))) == count
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_pipe_is_no_journal(tmp_path: Path) -> None:
    written(tmp_path, 1)
    file = last_file(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(MegarlError, match="where a regular file belongs"):
        JournalReader(tmp_path).fold()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_damage_in_the_middle_is_an_error_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal")
    written(path, 6)
    file = last_file(path)
    entries = [entry for entry, _ in scan(file)]
    damaged = data.draw(st.integers(1, len(entries) - 2))
    at = data.draw(st.integers(entries[damaged].offset, entries[damaged].end - 1))
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    searched = data.draw(st.sampled_from([RECORD_HEADER.size, 2 * RECORD_HEADER.size + 1, 1 << 20]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("megarl.core.journal.file.SEARCHED_AT_ONCE", searched)
        with pytest.raises(
            MegarlError, match=f"{file.name}: damaged at offset {entries[damaged].offset} "
        ):
            Journal.open(path, 2, 1)
    assert file.read_bytes() == content
    with pytest.raises(MegarlError, match="damaged"):  # the lock was given back with the error
        Journal.open(path, 2, 1)


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_record_that_comes_twice_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What admits, finishes or removes a ticket is refused the second time; the rest
    says again what is known.
    """
    path = tmp_path_factory.mktemp("journal")
    written(path, 3)
    journal = Journal.open(path, 2, 1)
    journal.append(
        admitted(3), admitted(4), Removed(ticket=3, reason="no variance"), published(1, 2.0)
    )
    journal.append(
        Evaluated(version=1, time=3.0, compute_hours=0.1, pass_rate=0.5, n_prompts=2, samples=1)
    )
    before = journal.state
    journal.close()
    file = last_file(path)
    content = file.read_bytes()
    found = list(scan(file))
    n = data.draw(st.integers(1, len(found) - 1))
    at = found[data.draw(st.integers(n, len(found) - 1))][0].end
    entry, payload = found[n]
    file.write_bytes(content[:at] + content[entry.offset : entry.end] + content[at:])
    if isinstance(record_of(file, entry, payload), Admitted | Finished | Removed):
        with pytest.raises(MegarlError, match=f"offset {at}: contradicts the records before it"):
            Journal.open(path, 2, 1)
    else:
        again = Journal.open(path, 2, 1)
        assert same(again.state, before)
        again.close()


@pytest.mark.parametrize("rotate_bytes", [1 << 20, 2000])
def test_a_copied_record_of_an_earlier_session_is_refused(
    tmp_path: Path, rotate_bytes: int
) -> None:
    """It would change compute hours. The first session is then in the last file, or
    only in the snapshot at its head.
    """
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=rotate_bytes)
    journal.append(
        Session(session="first-life", time=0.0, devices=4, compute_unit="gpu"), admitted(0)
    )
    journal.append(
        finished(0, time=3600.0),
        Session(session="second-life", time=9000.0, devices=4, compute_unit="gpu"),
    )
    for ticket in range(1, 20):
        journal.append(admitted(ticket), finished(ticket, time=12_600.0))
    hours = journal.state.compute_hours(12_600.0)
    assert (hours, len(journal.files()) > 1) == (8.0, rotate_bytes == 2000)
    journal.close()
    first, second = (
        path.read_bytes()[entry.offset : entry.end]
        for path in sorted(tmp_path.glob("*.journal"))
        for entry, payload in scan(path)
        if isinstance(record_of(path, entry, payload), Session)
    )
    file = last_file(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole + second)  # as a restarted controller does
    assert JournalReader(tmp_path).fold().compute_hours(12_600.0) == hours
    file.write_bytes(whole + first)
    with pytest.raises(
        MegarlError, match=rf"offset {len(whole)}: contradicts .*: session first-life begins again"
    ):
        Journal.open(tmp_path, 2, 1)


def test_a_file_that_is_gone_is_named_when_its_groups_are_asked_for(tmp_path: Path) -> None:
    written(tmp_path, 40, rotate_bytes=2000)
    reader = JournalReader(tmp_path)
    lost = max(reader._groups_of(2))
    kept = [t for t in range(40) if t not in reader._groups_of(2)]
    (tmp_path / "000002.journal").unlink()
    journal = Journal.open(tmp_path, 2, 1)
    assert [group.ticket for group in journal.groups(kept)] == kept
    with pytest.raises(
        MegarlError, match=f"ticket {lost} has no group here: .*; 000002.journal may have had it"
    ):
        journal.groups([lost])
    journal.close()


def test_damage_in_an_old_file_is_found_when_it_is_read(tmp_path: Path) -> None:
    written(tmp_path, 40, rotate_bytes=2000)
    reader = JournalReader(tmp_path)
    file = tmp_path / "000000.journal"
    entry = next(entry for entry, _ in scan(file) if entry.ticket == 0)
    content = bytearray(file.read_bytes())
    content[entry.end - 1] ^= 1
    file.write_bytes(content)
    with pytest.raises(MegarlError, match=f"000000.journal: damaged at offset {entry.offset} "):
        reader.groups([0])
    with pytest.raises(MegarlError, match=f"000000.journal: damaged at offset {entry.offset} "):
        list(reader.replay())


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 1)
    file = last_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[8] = 99
    file.write_bytes(content)
    with pytest.raises(MegarlError, match=r"000000\.journal: written in schema version 99"):
        Journal.open(tmp_path, 2, 1)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "000000.journal").write_text('{"step": 0}\n')
    with pytest.raises(MegarlError, match=r"not a rollout journal \(offset 0\)"):
        Journal.open(tmp_path, 2, 1)


def test_another_batch_size_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 1)
    with pytest.raises(MegarlError, match=r"batch.prompts: 3, but .* was begun with 2"):
        Journal.open(tmp_path, 3, 1)
    with pytest.raises(MegarlError, match=r"pipeline.k: 4, but .* was begun with 1"):
        Journal.open(tmp_path, 2, 4)
    with pytest.raises(MegarlError, match=r"steps of a phase: 4, but .* was begun with 1"):
        Journal.open(tmp_path, 2, 1, phase_steps=4)
    Journal.open(tmp_path, 2, 1).close()


def test_a_contradiction_is_not_written(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 2, 1)
    journal.append(admitted(0), finished(0))
    size = last_file(tmp_path).stat().st_size
    with pytest.raises(ValueError, match="ticket 0 is not unfinished"):
        journal.append(finished(0))
    assert last_file(tmp_path).stat().st_size == size
    with pytest.raises(MegarlError, match="the journal is closed"):
        journal.append(admitted(1))
    Journal.open(tmp_path, 2, 1).close()


def test_a_file_system_that_fails_while_a_file_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records that filled the last one are whole; nothing is written behind them by
    this writer.
    """
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=1500)
    fsync = os.fsync

    def evicted(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", evicted)
    for _ in range(2):
        with pytest.raises(
            MegarlError, match=r"000001\.journal: cannot be written: Input/output error"
        ):
            journal.write(
                [journal.applied(admitted(journal.state.admission.next_ticket)) for _ in range(100)]
            )
    monkeypatch.undo()
    whole = [r.ticket for r in JournalReader(tmp_path).replay() if isinstance(r, Admitted)]
    assert 0 < len(whole) < 100
    again = Journal.open(tmp_path, 2, 1)
    assert again.state.admission.next_ticket == len(whole)
    again.close()


def hold(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    Journal.open(path, 2, 1)
    ready.set()
    multiprocessing.Event().wait()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path, ready))
    other.start()
    try:
        assert ready.wait(60)
        with pytest.raises(MegarlError, match=rf"process {other.pid} on \S+ writes this journal"):
            Journal.open(tmp_path, 2, 1)
        assert list(JournalReader(tmp_path).fold().unfinished) == []  # reading needs no lock
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600  # who can read it can hold it
    finally:
        other.kill()
        other.join(60)
    Journal.open(tmp_path, 2, 1).close()


def test_a_journal_of_many_files_is_listed_once_and_searched_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run has thousands of them, and the learner waits for its batch."""
    written(tmp_path, 40, rotate_bytes=1000)
    files = JournalReader.files
    listed = list[int]()
    monkeypatch.setattr(JournalReader, "files", lambda self: listed.append(1) or files(self))
    reader = JournalReader(tmp_path)
    assert len(files(reader)) > 20
    assert reader.finished(3) == [37, 38, 39]
    assert len(reader._searched) < 6
    assert [group.ticket for group in reader.groups(range(20))] == list(range(20))
    assert reader.finished() == reader.finished(100) == list(range(40))
    assert len(listed) == 4


def io_counts() -> dict[str, int]:
    """This process's, so far: rchar, bytes read; syscr, calls to read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def bytes_read() -> int:
    return io_counts()["rchar"]


def test_a_search_for_groups_reads_headers_alone(tmp_path: Path) -> None:
    """Not a buffer for each, which on NFS has a MiB: as much as a group of long
    rollouts.
    """
    journal = Journal.open(tmp_path, 2, 1)
    for ticket in range(50):
        journal.append(admitted(ticket), finished(ticket, tokens=20_000))
    journal.close()
    before = bytes_read()
    assert len(JournalReader(tmp_path).finished()) == 50
    assert bytes_read() - before < 20_000


def test_an_old_batch_is_found_by_the_snapshots_of_few_files(tmp_path: Path) -> None:
    """After a month there are thousands of files, with a thousand headers each."""
    written(tmp_path, 600, rotate_bytes=6000)
    reader = JournalReader(tmp_path)
    before = bytes_read()
    assert len(reader.files()) > 30
    assert [group.ticket for group in reader.groups(range(20, 30))] == list(range(20, 30))
    assert (
        bytes_read() - before < sum(file.stat().st_size for file in tmp_path.glob("*.journal")) / 4
    )


def test_the_last_file_is_searched_once_for_all_groups_of_a_batch(tmp_path: Path) -> None:
    written(tmp_path, 200)
    before = io_counts()
    assert len(JournalReader(tmp_path).groups(range(100, 200))) == 100
    assert io_counts()["syscr"] - before["syscr"] < 3000


def test_a_group_is_found_whenever_it_was_finished(tmp_path: Path) -> None:
    rng = random.Random(0)
    journal = Journal.open(tmp_path, 4, 30, rotate_bytes=2500)
    running = list[int]()
    removed = set[int]()
    for ticket in range(120):
        journal.append(admitted(ticket))
        running.append(ticket)
        while running and (len(running) > 20 or ticket == 119):
            one = running.pop(rng.randrange(len(running)))
            journal.append(
                finished(one) if one % 7 else Removed(ticket=one, reason="zero variance")
            )
            removed |= {one} if one % 7 == 0 else set()
    assert len(journal.files()) > 15
    for ticket in range(120):
        for of in (JournalReader(tmp_path), journal):
            if ticket in removed:
                with pytest.raises(MegarlError, match=f"ticket {ticket} has no group here"):
                    of.groups([ticket])
            else:
                assert of.groups([ticket])[0].ticket == ticket
    journal.close()


def test_a_writer_does_not_remember_where_all_groups_of_a_long_run_are(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=1000)
    for ticket in range(60):
        journal.append(admitted(ticket), finished(ticket))
    assert len(journal.files()) > 2 * REMEMBERED
    assert sum(map(len, journal._searched.values())) < 40
    assert [group.ticket for group in journal.groups(range(60))] == list(range(60))
    journal.close()


def test_a_reader_sees_the_appends_of_a_live_writer(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, 2, 1, rotate_bytes=1500)
    reader = JournalReader(tmp_path)
    for ticket in range(20):
        journal.append(admitted(ticket))
        assert list(reader.fold().unfinished) == [ticket]
        journal.append(finished(ticket))
        assert reader.groups([ticket])[0].ticket == ticket
    assert reader.finished() == list(range(20))
    journal.close()


def test_what_is_written_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    written(tmp_path / "whole", 3)
    whole = last_file(tmp_path / "whole").read_bytes()
    entries = [entry for entry, _ in scan(last_file(tmp_path / "whole"))]
    half = entries[3].offset + 40
    live = tmp_path / "live"  # a record's write is under way
    live.write_bytes(whole[:half])
    records = scan(live)
    seen = [next(records)[0]]
    with live.open("ab") as file:
        file.write(whole[half:])
    assert seen + [entry for entry, _ in records] == entries[:3]
    assert [entry for entry, _ in scan(live)] == entries


FILL = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_journal import *
journal = Journal.open(Path(sys.argv[1]), 2, 1)
journal.append(admitted(0), finished(0))
size = last_file(Path(sys.argv[1])).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, resource.RLIM_INFINITY))
try:
    journal.append(admitted(1), finished(1, tokens=1000))
except MegarlError as error:
    assert last_file(Path(sys.argv[1])).stat().st_size == size, "not truncated back"
    print(error)
"""


def test_no_room_is_an_error_that_leaves_the_file_whole(tmp_path: Path) -> None:
    """The kernel refuses in the middle of a write, as on a full disk: a process with a
    limit on the size of files.
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    script = FILL.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "000000.journal: cannot be written: File too large; make room and resume" in done.stdout
    journal = Journal.open(tmp_path, 2, 1)
    assert journal.state.finished == 1
    journal.append(admitted(1), finished(1))
    journal.close()


def test_no_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no journal here"):
        JournalReader(tmp_path).fold()


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    written(tmp_path, 3)
    group = JournalReader(tmp_path).groups([2])[0]
    np.testing.assert_array_equal(group.rollouts[0].tokens, np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(group.rollouts[0].logprobs, np.full(5, -2, np.float32))
