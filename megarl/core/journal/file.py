"""One file of the journal: its format, how records are written and read, and where its
groups are.

    header | snapshot | record | record | …
    a record: mark, lengths, ticket of a group, checksums
              msgpack, in which routing is an outline (types.Routing)
              length and checksum of each rollout's packed choices of experts
              these choices

After a crash only the last record can be incomplete; damage anywhere else is an error.
Record headers contain the ticket, so groups can be located without reading them.
Choices of experts, nearly all bytes of a group that has them, are read only by who asks
for them.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import opened
from megarl.core.base.rundir import write_atomically, writing
from megarl.core.base.schema import check_schema
from megarl.core.base.types import SCHEMA_VERSION, Group, decode, encode
from megarl.core.journal.records import Finished, JournalRecord, Snapshot, State

GroupOffsets = dict[int, int]
"""The offset of each group's record in a file, by ticket, in the order in which they
were finished.
"""
FILE_HEADER = struct.Struct("<8sI")  # magic, schema version
MAGIC = b"megarlRJ"
RECORD_HEADER = struct.Struct("<4sIqIQII")
"""Mark, msgpack's bytes, ticket or -1, number of rollouts whose choices follow, their
bytes together, CRC-32 of msgpack and lengths, CRC-32 of the header up to here.
"""
CHOICES = struct.Struct("<QI")
"""Of a rollout's packed choices: bytes, CRC-32."""
MARK = b"\xa5RJ\x5a"
SEARCHED_AT_ONCE = 1 << 20
"""Bytes of a damaged file that are searched for records at a time."""
CHECKED_AT_ONCE = 1 << 24
"""Bytes of recorded choices that are read at a time to be checked."""


class Entry(NamedTuple):
    """A record's header: its offset, the payload's length, the ticket of a finished
    group (else -1), the number of rollouts with recorded choices and these choices'
    bytes, the payload's CRC-32. The payload is the msgpack, then CHOICES of each
    rollout.
    """

    offset: int
    length: int
    ticket: int
    rollouts: int
    choices: int
    checksum: int

    @property
    def end_of_payload(self) -> int:
        """The offset after the payload."""
        return self.offset + RECORD_HEADER.size + self.length

    @property
    def end(self) -> int:
        """The offset after the record."""
        return self.end_of_payload + self.choices

    @property
    def msgpack_length(self) -> int:
        """The length of the payload's first part."""
        return self.length - self.rollouts * CHOICES.size


class RecordBytes(NamedTuple):
    """The bytes of a record: header and payload, then each rollout's choices."""

    record: bytes
    choices: Sequence[np.ndarray]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return len(self.record) + sum(part.nbytes for part in self.choices)


def head(snapshot: Snapshot) -> bytes:
    """Return the first bytes of a file."""
    return FILE_HEADER.pack(MAGIC, SCHEMA_VERSION) + packed(snapshot).record


def create(path: Path, head: bytes) -> None:
    """Create a file with these bytes, complete or not at all."""
    write_atomically(path, head)
    with writing(path):  # its name in the folder has to survive, too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write(fd: int, path: Path, size: int, records: Sequence[RecordBytes]) -> None:
    """Append to a file of `size` bytes and wait until it is on disk; on failure the
    file stays as it was.
    """
    with writing(path):
        try:
            for part in _parts(records):
                unwritten = memoryview(part)
                while unwritten:
                    count = os.write(fd, unwritten)
                    unwritten = unwritten[count:]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise


def _parts(records: Sequence[RecordBytes]) -> Iterator[bytes | np.ndarray]:
    """Yield the bytes of these records in as few parts as possible without a copy of
    the choices.
    """
    small: list[bytes] = []
    for packed_record in records:
        small.append(packed_record.record)
        if packed_record.choices:
            yield b"".join(small)
            yield from packed_record.choices
            small = []
    yield b"".join(small)


def packed(record: JournalRecord) -> RecordBytes:
    """Return a record's bytes. A group with gigabytes of choices takes seconds."""
    ticket = -1
    choices: list[np.ndarray] = []
    if isinstance(record, Finished):
        ticket = record.group.ticket
        choices = _choices_of(record.group)
        record = msgspec.structs.replace(record, group=record.group.outline)
    payload = encode(record)
    for part in choices:
        payload += CHOICES.pack(part.nbytes, zlib.crc32(part))
    total = sum(part.nbytes for part in choices)
    checksum = zlib.crc32(payload)
    # without its last field, the header's own checksum
    header = RECORD_HEADER.pack(MARK, len(payload), ticket, len(choices), total, checksum, 0)[:-4]
    header_checksum = zlib.crc32(header).to_bytes(4, "little")
    return RecordBytes(header + header_checksum + payload, choices)


def _choices_of(group: Group) -> list[np.ndarray]:
    """Return each rollout's packed choices [bytes] uint8; nothing if none has any."""
    if not group.has_routing:
        return []
    choices = []
    for rollout in group.rollouts:
        nothing = np.zeros(0, np.uint8)
        choices.append(nothing if rollout.routing is None else rollout.routing.packed)
    return choices


def _entry(header: bytes, offset: int) -> Entry | None:
    """Parse a record's header at `offset`; None if it is incomplete or damaged."""
    if len(header) < RECORD_HEADER.size:
        return None
    mark, *fields, header_checksum = RECORD_HEADER.unpack(header)
    if mark != MARK or zlib.crc32(header[:-4]) != header_checksum:
        return None
    return Entry(offset, *fields)


def scan(
    path: Path, payloads: bool = True, with_choices: bool = False
) -> Iterator[tuple[Entry, bytes]]:
    """Yield a file's intact records, up to a truncated last one. Raise MegarlError if
    intact records follow a damaged one, or if the file is not a journal of this
    version. payloads: False yields b"" for each. with_choices: whether choices of
    experts must be intact, too.
    """
    # A buffer has a MiB on NFS, and would be filled for each header.
    with opened(path, -1 if payloads else 0) as file:
        size = os.fstat(file.fileno()).st_size
        _check_header(path, file.read(FILE_HEADER.size))
        while (offset := file.tell()) < size:
            entry = _entry(file.read(RECORD_HEADER.size), offset)
            if entry is None or entry.end > size:
                _check_tail(path, file, offset, size)
                return
            payload = file.read(entry.length) if payloads else b""
            is_intact = not payloads or zlib.crc32(payload) == entry.checksum
            if is_intact and with_choices:
                is_intact = _choices_are_intact(file, entry, payload)
            if not is_intact:
                _check_tail(path, file, offset, size)
                return
            file.seek(entry.end)
            yield entry, payload


def _choices_are_intact(file: BinaryIO, entry: Entry, payload: bytes) -> bool:
    """Return whether the choices have their checksums. The file is at the first."""
    for size, checksum in CHOICES.iter_unpack(payload[entry.msgpack_length :]):
        checksum_of_read = 0
        unread = size
        while unread:
            part = file.read(min(unread, CHECKED_AT_ONCE))
            if not part:
                return False  # it was cut meanwhile
            checksum_of_read = zlib.crc32(part, checksum_of_read)
            unread -= len(part)
        if checksum_of_read != checksum:
            return False
    return True


def _check_header(path: Path, header: bytes) -> None:
    """Raise MegarlError unless these bytes begin a journal of this version."""
    if len(header) < FILE_HEADER.size or FILE_HEADER.unpack(header)[0] != MAGIC:
        raise MegarlError(f"{path}: not a rollout journal (offset 0); move it away or restore it")
    version = FILE_HEADER.unpack(header)[1]
    check_schema(path, version, SCHEMA_VERSION)


def _check_tail(path: Path, file: BinaryIO, offset: int, size: int) -> None:
    """Raise MegarlError if intact records follow an incomplete one at `offset`: a crash
    cannot cause that, so the file is damaged. What was written since the file had
    `size` bytes is left out.
    """
    start = offset + 1
    while size - start >= RECORD_HEADER.size:
        file.seek(start)
        part = file.read(min(SEARCHED_AT_ONCE, size - start))
        if not part:
            return  # it was cut meanwhile
        if _has_header(part):
            raise MegarlError(
                f"{path}: damaged at offset {offset} (checksum), with intact records after it;"
                " restore the file from a backup"
            )
        # A header may begin at the part's end.
        start += max(1, len(part) - RECORD_HEADER.size + 1)


def _has_header(part: bytes) -> bool:
    """Return whether an intact header of a record is in this part of a file."""
    at = part.find(MARK)
    while at >= 0:
        if _entry(part[at : at + RECORD_HEADER.size], 0) is not None:
            return True
        at = part.find(MARK, at + 1)
    return False


def record_of(path: Path, entry: Entry, payload: bytes) -> JournalRecord:
    """Decode a record. MegarlError if it is of an unknown kind."""
    try:
        return decode(memoryview(payload)[: entry.msgpack_length], JournalRecord)
    except msgspec.MsgspecError as error:
        raise MegarlError(
            f"{path}: offset {entry.offset}: not a record that this version of megarl knows:"
            f" {error}"
        ) from None


def read(path: Path, offset: int) -> JournalRecord:
    """Return the record at `offset`. MegarlError if it is damaged."""
    with opened(path) as file:
        entry, payload = _read(path, file, offset)
    return record_of(path, entry, payload)


def read_choices(path: Path, offset: int, rollouts: Sequence[int]) -> list[bytes]:
    """Return the packed choices of these rollouts of the group at `offset`, counted
    from 0; b"" if none were recorded. MegarlError if they are damaged.
    """
    choices_of_rollouts: list[bytes] = []
    with opened(path) as file:
        entry, payload = _read(path, file, offset)
        table = list(CHOICES.iter_unpack(payload[entry.msgpack_length :]))
        for rollout in rollouts:
            if rollout >= len(table):
                choices_of_rollouts.append(b"")
                continue
            size, checksum = table[rollout]
            start = entry.end_of_payload + sum(size for size, _ in table[:rollout])
            file.seek(start)
            choices = file.read(size)
            if zlib.crc32(choices) != checksum:
                raise _damaged(path, start)
            choices_of_rollouts.append(choices)
    return choices_of_rollouts


def _read(path: Path, file: BinaryIO, offset: int) -> tuple[Entry, bytes]:
    """Return the header and the payload of the record at `offset`. MegarlError if they
    are damaged.
    """
    file.seek(offset)
    entry = _entry(file.read(RECORD_HEADER.size), offset)
    payload = file.read(entry.length) if entry else b""
    if entry is None or zlib.crc32(payload) != entry.checksum:
        raise _damaged(path, offset)
    return entry, payload


def _damaged(path: Path, offset: int) -> MegarlError:
    return MegarlError(
        f"{path}: damaged at offset {offset} (checksum); restore the file from a backup"
    )


def snapshot(path: Path) -> Snapshot:
    """Return the state at the head of a file. MegarlError if it is damaged."""
    for entry, payload in scan(path):
        record = record_of(path, entry, payload)
        if isinstance(record, Snapshot):
            return record
        break
    raise MegarlError(
        f"{path}: damaged at offset {FILE_HEADER.size}: no snapshot there; restore it from a backup"
    )


class Folded(NamedTuple):
    """What a file's records add up to. end: the offset after the last intact one."""

    state: State
    groups: GroupOffsets
    end: int


def fold(path: Path) -> Folded:
    """Replay a file, all of whose bytes are checked."""
    state = State.restored(snapshot(path))
    groups = GroupOffsets()
    end = 0
    for entry, payload in scan(path, with_choices=True):
        try:
            state.apply(record_of(path, entry, payload))
        except ValueError as error:
            raise MegarlError(
                f"{path}: offset {entry.offset}: contradicts the records before it: {error}"
            ) from None
        if entry.ticket >= 0:
            groups[entry.ticket] = entry.offset
        end = entry.end
    return Folded(state, groups, end)
