"""The journal's files: one writer, any number of readers.

    RUN/rollouts/000000.journal   header | snapshot | record | record | …
                 000001.journal   header | snapshot (of all before) | record | …
                 …                a new file every ROTATE_BYTES
                 lock             held by the one writer

    controller
      applied(record) ─► state.apply(record), its bytes
                         on the event loop; nothing else changes the state
      write(bytes) ────► one write, one fsync, in a thread (writer.py)
    replay of a batch
      groups(tickets) ─► read back from disk; groups are not kept in memory

A record that a crash left incomplete is cut off, with a message. Opening reads only the
last file, because its snapshot is the state after all earlier ones. The snapshots also
say in which file a ticket was finished; that one is searched by the tickets in its
records' headers.
"""

import logging
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from megarl.core.base.admission import Admission
from megarl.core.base.errors import MegarlError
from megarl.core.base.locks import holder, lock_file, name_holder, open_lock_file, unknown_holder
from megarl.core.base.rundir import writing
from megarl.core.base.types import Group
from megarl.core.journal import file
from megarl.core.journal.file import GroupOffsets, RecordBytes
from megarl.core.journal.records import Admitted, Finished, JournalRecord, Removed, Snapshot, State

log = logging.getLogger(__name__)

ROTATE_BYTES = 256 << 20
"""Size of a file. Snapshots (1 to 3 MB in a long run) are about a hundredth of it, and
it is read in a second or two.
"""
REMEMBERED = 16
"""Number of newest files of which the writer keeps in memory where their groups are:
batches that are yet to come are there.
"""
LOCK_TIMEOUT_S = 10.0
"""How long to wait for a killed writer to release the lock."""


class Applied(NamedTuple):
    """The bytes of a record that was applied to the state."""

    data: RecordBytes
    ticket: int  # of a finished group, else -1
    # The first bytes of the next file if this record fills the present one, else empty.
    next_file: bytes


class FileStart(NamedTuple):
    """The state of tickets when a file was begun."""

    next_ticket: int
    unfinished: frozenset[int]


class JournalReader:
    """Reads a journal, even of a live run, up to the last record that its writer has
    completed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._searched: dict[int, GroupOffsets] = {}  # by number of the file
        self._starts: dict[int, FileStart] = {}  # by number of the file
        self._last = -1

    def files(self) -> list[int]:
        """Return the numbers of the files, oldest first."""
        return sorted(int(p.stem) for p in self.path.glob("*.journal") if p.stem.isdecimal())

    def has_tickets(self) -> bool:
        """Return whether any ticket was ever admitted."""
        for record in self.replay():
            if isinstance(record, Admitted):
                return True
            if isinstance(record, Snapshot) and record.next_ticket > 0:
                return True
        return False

    def replay(self, first: int = 0) -> Iterator[JournalRecord]:
        """Yield all records from file number `first` on, oldest first, including the
        snapshots at the heads of files.
        """
        for number in self.files():
            if number < first:
                continue
            for entry, payload in file.scan(self._file(number)):
                yield file.record_of(self._file(number), entry, payload)

    def fold(self) -> State:
        """Return the state after all records, from the last snapshot and the records
        after it.
        """
        files = self.files()
        if not files:
            raise MegarlError(
                f"{self.path}: no journal here; give the directory of a run that has started"
            )
        return file.fold(self._file(files[-1])).state

    def state_before(self, step: int) -> State:
        """Return the state as if no ticket of batch `step` or later had been drawn, but
        with all evaluations of the run. MegarlError if earlier tickets are not settled,
        or if their records are gone.
        """
        latest = self.fold()
        tickets = latest.admission
        slots = step * tickets.prompts_per_batch  # of the batches before
        first = tickets.first_ticket(step)  # the first that is left out
        files = self.files()
        # how many files were begun before this ticket was drawn
        count = bisect_right(files, first, key=lambda number: self._start(number).next_ticket)
        if not count or slots < tickets.forgotten:
            raise MegarlError(
                f"{self.path}: what was drawn before step {step} is gone (journal.keep)"
            )
        number = files[count - 1]
        state = State.restored(file.snapshot(self._file(number)))
        if slots <= tickets.forgotten + len(tickets.queue):
            for record in self.replay(number):
                ticket = _ticket_of(record)
                if ticket is not None and ticket < first:
                    state.apply(record)
                if state.admission.next_ticket == first and not state.unfinished:
                    return structs.replace(state, evaluations=latest.evaluations)
        raise MegarlError(
            f"{self.path}: the batches before step {step} are not complete; give an earlier step"
        )

    def groups(self, tickets: Iterable[int]) -> tuple[Group, ...]:
        """Return the finished groups of these tickets, in this order, from disk, with
        outlines of their routing.
        """
        files = self._files_to_search()
        return tuple(self._group(ticket, files) for ticket in tickets)

    def whole_groups(self, tickets: Iterable[int]) -> tuple[Group, ...]:
        """Return the groups of these tickets with the recorded experts."""
        groups = []
        for group in self.groups(tickets):
            numbers = range(len(group.rollouts))
            rollouts = []
            for rollout, choices in zip(
                group.rollouts, self.choices(group.ticket, numbers), strict=True
            ):
                if rollout.routing is not None:
                    routing = rollout.routing.with_choices(choices)
                    rollout = structs.replace(rollout, routing=routing)
                rollouts.append(rollout)
            groups.append(structs.replace(group, rollouts=tuple(rollouts)))
        return tuple(groups)

    def choices(self, ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        """Return the packed choices (`Routing.packed`) of these rollouts of a finished
        group, counted from 0; b"" if none were recorded.
        """
        path, offset = self._place(ticket, self._files_to_search())
        return file.read_choices(path, offset, rollouts)

    def finished(self, limit: int | None = None) -> list[int]:
        """Return the tickets of all finished groups that are still there, in the order
        in which they were finished. limit: only so many, the newest, without a search
        of the files before theirs.
        """
        newest_first: list[int] = []
        for number in reversed(self._files_to_search()):
            if limit is not None and len(newest_first) >= limit:
                break
            newest_first += reversed(self._groups_of(number))
        return newest_first[:limit][::-1]

    def _group(self, ticket: int, files: Sequence[int]) -> Group:
        """Return the group of a ticket. files: the numbers of the files."""
        path, offset = self._place(ticket, files)
        record = file.read(path, offset)
        assert isinstance(record, Finished)
        return record.group

    def _place(self, ticket: int, files: Sequence[int]) -> tuple[Path, int]:
        """Return the file that has the group of a ticket, and its offset there."""
        numbers = [number for number in self._searched if ticket in self._searched[number]]
        if not numbers:
            numbers = self._files_that_may_have(ticket, files)
        for number in numbers:
            offset = self._groups_of(number).get(ticket)
            if offset is not None:
                return self._file(number), offset
        # a gap among the numbers may be a file that somebody removed
        missing = [self._file(n).name for n in range(max(files, default=0)) if n not in files]
        reason = "it is unfinished, removed or dropped (journal.keep)"
        if missing:
            names = ", ".join(missing[:3])
            if len(missing) > 3:
                names += " …"
            reason += f"; {names} may have had it, but is missing"
        raise MegarlError(f"{self.path}: ticket {ticket} has no group here: {reason}")

    def _files_that_may_have(self, ticket: int, files: Sequence[int]) -> list[int]:
        """Return the last file that was begun before the ticket was finished or
        removed, if there is one.
        """

        def is_settled(number: int) -> bool:
            """Return whether the ticket was settled when this file was begun."""
            start = self._start(number)
            return ticket < start.next_ticket and ticket not in start.unfinished

        # Tickets settle once, so this is false for the first files and true for the
        # rest. The group is in the last file for which it is false.
        unsettled = bisect_left(files, True, key=is_settled)
        return list(files[:unsettled][-1:])

    def _start(self, number: int) -> FileStart:
        """Return the next ticket and the unfinished ones when this file was begun."""
        if number not in self._starts:
            head = file.snapshot(self._file(number))
            unfinished = frozenset(admitted.ticket for admitted in head.unfinished)
            self._starts[number] = FileStart(head.next_ticket, unfinished)
        return self._starts[number]

    def _groups_of(self, number: int) -> GroupOffsets:
        """Return where the groups of this file are; it is searched once."""
        if number not in self._searched:
            offsets = GroupOffsets()
            for entry, _ in file.scan(self._file(number), payloads=False):
                if entry.ticket >= 0:
                    offsets[entry.ticket] = entry.offset
            self._searched[number] = offsets
        return self._searched[number]

    def _files_to_search(self) -> list[int]:
        """Return the numbers of the files. The last one of the previous call has grown
        since, so it is searched again.
        """
        files = self.files()
        self._searched.pop(self._last, None)
        self._last = max(files, default=-1)
        return files

    def _file(self, number: int) -> Path:
        """Return the path of the file with this number."""
        return self.path / f"{number:06}.journal"


def _ticket_of(record: JournalRecord) -> int | None:
    """Return the ticket that a record concerns; None if it concerns none."""
    match record:
        case Finished(group=group):
            return group.ticket
        case Admitted(ticket=ticket) | Removed(ticket=ticket):
            return ticket
    return None


class Journal(JournalReader):
    """The one writer of a journal. `state` is the state after all records that were
    applied. Call `applied` and `forget` only in the thread that reads `state`; call
    `write`, `drop` and `groups` in a single thread, too, which may be another one.
    """

    def __init__(self, path: Path, lock: int, rotate_bytes: int) -> None:
        super().__init__(path)
        self._lock = lock
        self._rotate_bytes = rotate_bytes
        self._number = self.files()[-1]
        self._fd: int | None = os.open(self._file(self._number), os.O_WRONLY | os.O_APPEND)
        # Raised by `write` once the journal is closed.
        self._failure: BaseException = MegarlError(f"{path}: the journal is closed")
        last_file = self._file(self._number)
        self.state, self._searched[self._number], self._size = file.fold(last_file)
        self._applied_size = self._size
        torn_bytes = os.fstat(self._fd).st_size - self._size
        if torn_bytes:  # left incomplete by a crash; no process has used it
            log.warning(
                "%s: the last record was cut short by a crash; %d bytes removed",
                last_file,
                torn_bytes,
            )
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    @staticmethod
    def open(
        path: Path,
        prompts_per_batch: int,
        max_lag: int,
        phase_steps: int = 1,
        rotate_bytes: int = ROTATE_BYTES,
    ) -> "Journal":
        """Open the journal in directory `path`, or begin one. MegarlError if another
        process writes it, if it is damaged, or if it has another version, batch size,
        lag or phase.
        """
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path / "lock")
        try:
            if not any(path.glob("*.journal")):
                admission = Admission(prompts_per_batch, max_lag, phase_steps)
                file.create(path / f"{0:06}.journal", file.head(State(admission).snapshot()))
            journal = Journal(path, lock, rotate_bytes)
        except BaseException:
            os.close(lock)
            raise
        admission = journal.state.admission
        for key, value, recorded in (
            ("batch.prompts", prompts_per_batch, admission.prompts_per_batch),
            ("pipeline.k", max_lag, admission.max_lag),
            ("pipeline.kind, pipeline.k: steps of a phase", phase_steps, admission.phase_steps),
        ):
            if value != recorded:
                journal.close()
                raise MegarlError(
                    f"{key}: {value}, but {path} was begun with {recorded}; keep it, or set"
                    " another run.name"
                )
        return journal

    def append(self, *records: JournalRecord) -> None:
        """Apply and write these records in order. On return they are in `state` and on
        disk.
        """
        try:
            self.write([self.applied(record) for record in records])
        except BaseException:
            self.close()
            raise

    def applied(self, record: JournalRecord, data: RecordBytes | None = None) -> Applied:
        """Apply the record to `state` and return its bytes, which must be passed to
        `write` in the order of these calls. ValueError, without any change, if the
        record contradicts the state. data: the record's bytes, if they are known.
        """
        if data is None:
            data = file.packed(record)
        self.state.apply(record)
        self._applied_size += data.size
        next_file = b""
        if self._applied_size > self._rotate_bytes:
            next_file = file.head(self.state.snapshot())
            self._applied_size = len(next_file)
        ticket = record.group.ticket if isinstance(record, Finished) else -1
        return Applied(data, ticket, next_file)

    def write(self, applied: Sequence[Applied]) -> None:
        """Write these bytes to disk, with one fsync per file and per record with
        choices, before returning. If that fails, raise MegarlError: the file then ends
        with the last complete write, the journal is closed, and every later call raises
        the same error.
        """
        if self._fd is None:
            raise self._failure
        try:
            part: list[Applied] = []  # of the present file
            for record in applied:
                part.append(record)
                if record.next_file:
                    self._write(self._fd, part)
                    self._rotate(record.next_file)
                    part = []
                elif record.data.choices:
                    # Gigabytes take seconds: no later record may come to disk first.
                    self._write(self._fd, part)
                    part = []
            if part:
                self._write(self._fd, part)
        except BaseException as failure:
            self._failure = failure
            self.close()
            raise

    def _write(self, fd: int, applied: Sequence[Applied]) -> None:
        """Write records to the present file, and remember where its groups are."""
        records = [record.data for record in applied]
        file.write(fd, self._file(self._number), self._size, records)
        for record in applied:
            if record.ticket >= 0:
                self._searched[self._number][record.ticket] = self._size
            self._size += record.data.size

    def forget(self, step: int) -> int:
        """Note that batches before `step` are never needed again; return the first
        ticket that may still be needed.
        """
        first_needed = self.state.admission.first_ticket(step)
        self.state.admission.forget(step)
        return first_needed

    def drop(self, first_needed: int) -> None:
        """Delete the files without a group of this ticket or a later one."""
        for number in self.files()[:-1]:
            if max(self._groups_of(number), default=-1) < first_needed:
                self._file(number).unlink()
                self._searched.pop(number, None)
                self._starts.pop(number, None)
                log.info("%s: dropped, all its groups were trained", self._file(number))

    def _files_to_search(self) -> list[int]:
        """Return the numbers of the files. None is searched again: the writer knows
        what it has written.
        """
        return self.files()

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            os.close(self._lock)
            self._fd = None

    def _rotate(self, head: bytes) -> None:
        """Continue in a new file that begins with `head`, a snapshot of the state."""
        assert self._fd is not None
        file.create(self._file(self._number + 1), head)
        os.close(self._fd)
        self._number += 1
        self._fd = os.open(self._file(self._number), os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._fd).st_size
        self._searched[self._number] = {}
        self._searched.pop(self._number - REMEMBERED, None)


def _lock(path: Path) -> int:
    """Return the descriptor of a file with this process's name, locked until it is
    closed. MegarlError if another holds it.
    """
    with writing(path):
        descriptor = open_lock_file(path)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock_file(descriptor)
        except BlockingIOError:
            if time.monotonic() > deadline:
                name = holder(descriptor)
                os.close(descriptor)
                raise _locked(path, name) from None
            time.sleep(0.1)
        else:
            name_holder(descriptor)
            return descriptor


def _locked(path: Path, name: str) -> MegarlError:
    """Return the error for a lock that the process `name` holds; empty if unknown."""
    waited = f"waited {LOCK_TIMEOUT_S:g} s"
    if not name:
        return MegarlError(f"{path.parent}: {unknown_holder(path)}; {waited}")
    return MegarlError(
        f"{path.parent}: {name} writes this journal ({waited}); end that run first, or give this"
        " one another run.name"
    )
