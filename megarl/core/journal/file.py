"""One file of the journal: its format, how records are written and read, and where its
groups are.

    header | snapshot | record | record | …
    a record: mark, length, ticket of a group, checksums; then msgpack

After a crash only the last record can be incomplete; damage anywhere else is an error.
Record headers contain the ticket, so groups can be located without reading them.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import opened
from megarl.core.base.rundir import write_atomically, writing
from megarl.core.base.schema import check_schema
from megarl.core.base.types import SCHEMA_VERSION, decode, encode
from megarl.core.journal.records import Finished, JournalRecord, Snapshot, State

GroupOffsets = dict[int, int]
"""The offset of each group's record in a file, by ticket, in the order in which they
were finished.
"""
FILE_HEADER = struct.Struct("<8sI")  # magic, schema version
MAGIC = b"megarlRJ"
RECORD_HEADER = struct.Struct("<4sIqII")
"""Mark, payload bytes, ticket or -1, CRC-32 of the payload, CRC-32 of the header up to
here.
"""
MARK = b"\xa5RJ\x5a"
SEARCHED_AT_ONCE = 1 << 20
"""Bytes of a damaged file that are searched for records at a time."""


class Entry(NamedTuple):
    """A record's header: its offset, the payload's length, the ticket of a finished
    group (else -1), the payload's CRC-32.
    """

    offset: int
    length: int
    ticket: int
    checksum: int

    @property
    def end(self) -> int:
        """The offset after the record."""
        return self.offset + RECORD_HEADER.size + self.length


def head(snapshot: Snapshot) -> bytes:
    """Return the first bytes of a file."""
    return FILE_HEADER.pack(MAGIC, SCHEMA_VERSION) + packed(snapshot)


def create(path: Path, head: bytes) -> None:
    """Create a file with these bytes, complete or not at all."""
    write_atomically(path, head)
    with writing(path):  # its name in the folder has to survive, too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write(fd: int, path: Path, size: int, data: bytes) -> None:
    """Append to a file of `size` bytes and wait until it is on disk; on failure the
    file stays as it was.
    """
    with writing(path):
        try:
            unwritten = memoryview(data)
            while unwritten:
                count = os.write(fd, unwritten)
                unwritten = unwritten[count:]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise


def packed(record: JournalRecord) -> bytes:
    """Return a record's header and payload."""
    payload = encode(record)
    ticket = record.group.ticket if isinstance(record, Finished) else -1
    # without its last field, the header's own checksum
    header = RECORD_HEADER.pack(MARK, len(payload), ticket, zlib.crc32(payload), 0)[:-4]
    header_checksum = zlib.crc32(header).to_bytes(4, "little")
    return header + header_checksum + payload


def _entry(header: bytes, offset: int) -> Entry | None:
    """Parse a record's header at `offset`; None if it is incomplete or damaged."""
    if len(header) < RECORD_HEADER.size:
        return None
    mark, length, ticket, checksum, header_checksum = RECORD_HEADER.unpack(header)
    if mark != MARK or zlib.crc32(header[:-4]) != header_checksum:
        return None
    return Entry(offset, length, ticket, checksum)


def scan(path: Path, payloads: bool = True) -> Iterator[tuple[Entry, bytes]]:
    """Yield a file's intact records, up to a truncated last one. Raise MegarlError if
    intact records follow a damaged one, or if the file is not a journal of this
    version. payloads: False yields b"" for each.
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
            if payloads and zlib.crc32(payload) != entry.checksum:
                _check_tail(path, file, offset, size)
                return
            file.seek(entry.end)
            yield entry, payload


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
        return decode(payload, JournalRecord)
    except msgspec.MsgspecError as error:
        raise MegarlError(
            f"{path}: offset {entry.offset}: not a record that this version of megarl knows:"
            f" {error}"
        ) from None


def read(path: Path, offset: int) -> JournalRecord:
    """Return the record at `offset`. MegarlError if it is damaged."""
    with opened(path) as file:
        file.seek(offset)
        entry = _entry(file.read(RECORD_HEADER.size), offset)
        payload = file.read(entry.length) if entry else b""
    if entry is None or zlib.crc32(payload) != entry.checksum:
        raise MegarlError(
            f"{path}: damaged at offset {offset} (checksum); restore the file from a backup"
        )
    return record_of(path, entry, payload)


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
    """Replay a file."""
    state = State.restored(snapshot(path))
    groups = GroupOffsets()
    end = 0
    for entry, payload in scan(path):
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
