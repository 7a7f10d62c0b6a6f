"""Reads the rows of one file: JSON lines, JSON, CSV, TSV, Parquet or Arrow.

    path ──► bytes, unpacked if the name ends in .gz, .bz2, .xz or .zst ──► rows, one at a time

Each file has its own columns, so the parts of a set may differ in columns that nobody
reads. In Parquet and Arrow a column is converted only when a row is asked for it.

JSON is not read through `datasets`, which reports no line numbers and gives a column
one type: texts become dates, whole numbers are rounded, texts beside numbers get
quotes.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import zstandard

from megarl.core.base.errors import MegarlError
from megarl.tasks.data.rows import Raw, UnfitError, shown

BATCH_BYTES = 32 << 20
"""Bytes of a Parquet file converted at once, as far as its metadata says."""
MOST_ROWS = 1024
"""Rows of Parquet or Arrow converted at once."""
LONGEST_FIELD = 1 << 30
"""Most characters in a field of CSV; Python's own limit is 131,072."""
BOM = b"\xef\xbb\xbf"
"""With this some programs begin a UTF-8 file."""
AS_UTF8 = "save the file as UTF-8, such as with `iconv -f LATIN1 -t UTF-8`"


class Unreadable(NamedTuple):
    """A line that is not a row."""

    why: str


type Numbered = tuple[int, Raw | Unreadable]


def format_of(name: str | Path) -> str | None:
    """Return the key in `READERS` for a file of this name; None if it cannot be read."""
    path = Path(name)
    packed = path.suffix in PACKED
    suffix = Path(path.stem).suffix if packed else path.suffix
    readable = PACKABLE if packed else READERS
    return suffix if suffix in readable else None


def rows_of(path: Path) -> Iterator[Numbered]:
    """Yield a file's rows with their numbers from 1: of texts the numbers of their
    lines.

    MegarlError if the file is not what its name says. Errors of the readers' libraries
    are the caller's to catch.
    """
    return READERS[format_of(path) or ""](path)


# Texts


def _zstandard(path: Path) -> BinaryIO:
    reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    return cast(BinaryIO, io.BufferedReader(reader))


PACKED: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}


def _open_text(path: Path) -> BinaryIO:
    """Open a text, unpacked, after its byte-order mark."""
    file = PACKED[path.suffix](path) if path.suffix in PACKED else path.open("rb")
    begin = file.peek(64)[:64]
    if what := _other_than_text(begin):
        file.close()
        raise MegarlError(f"{path}: {what}")
    if begin.startswith(BOM):
        file.read(len(BOM))
    return cast(BinaryIO, file)


def _other_than_text(begin: bytes) -> str:
    """Return what a file that begins like this is instead of UTF-8 text, and what to
    do.
    """
    if begin.startswith(b"\x1f\x8b"):
        return "it is packed by gzip; end its name in .gz"
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        return "it is packed by zstd; end its name in .zst"
    if begin.startswith(b"PK\x03\x04"):
        return "it is a zip archive; unpack it"
    if begin.startswith(b"PAR1"):
        return "it is a Parquet file; end its name in .parquet"
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in begin[:4]:
        return "it is UTF-16 text; save it as UTF-8, such as with `iconv -f UTF-16 -t UTF-8`"
    return _stand_in(begin)


def _stand_in(begin: bytes) -> str:
    """Return what a file that begins like this is if it only stands for another."""
    if begin.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file; fetch the file with `git lfs pull`"
    if begin.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page, not the file; download the file itself"
    return ""


def _json_lines(path: Path) -> Iterator[Numbered]:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _row(line)


def _json(path: Path) -> Iterator[Numbered]:
    """Yield the rows of a JSON file: an array of objects, or one object per line."""
    with _open_text(path) as file:
        lines = (line for line in file if line.strip())
        first = next(lines, b"")
        second = next(lines, b"")
    if first.lstrip().startswith(b"["):
        yield from enumerate(_array(path), 1)
    elif second and isinstance(_row(first), Mapping):
        yield from _json_lines(path)
    elif first:
        yield from _alone(path, first)


def _array(path: Path) -> Iterator[Raw | Unreadable]:
    with _open_text(path) as file:
        text = file.read()
    try:
        rows = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rows = _with_nan(text)
        if not isinstance(rows, list):
            raise MegarlError(f"{path}: cannot be read: {_why(text, error)}") from None
    for row in rows:
        yield _row(row) if isinstance(row, msgspec.Raw) else _as_object(row)


def _alone(path: Path, first: bytes) -> Iterator[Numbered]:
    """Yield the only row of a file. MegarlError if it holds columns, or rows over
    lines.
    """
    with _open_text(path) as file:
        only = _row(file.read())
    advice = "write an array of rows, or one row per line"
    if isinstance(only, Mapping) and _holds_columns(only):
        names = ", ".join(map(str, list(only)[:5]))
        raise MegarlError(
            f"{path}: it is one JSON object with the keys {names}, not rows; {advice}"
        )
    if isinstance(only, Mapping):
        yield 1, only
    elif first.strip() == b"{":
        raise MegarlError(f"{path}: its objects extend over several lines; {advice} (`jq -c .`)")
    else:
        yield from _json_lines(path)


def _holds_columns(row: Raw) -> bool:
    """Return whether an object's values are columns: lists of equal lengths, or
    objects.
    """
    values = list(row.values())
    if any(_is_conversation(value) for value in values):
        return False
    lists = [value for value in values if isinstance(value, list)]
    of_rows = [value for value in lists if value and all(isinstance(one, Mapping) for one in value)]
    if of_rows:  # such as {"data": [{…}, …]}
        return True
    same_length = len(lists) == len(values) > 1 and len({len(value) for value in lists}) == 1
    return same_length or (len(values) > 1 and all(isinstance(value, Mapping) for value in values))


def _is_conversation(value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and bool({"role", "from"} & set(first))


def _row(text: bytes | msgspec.Raw) -> Raw | Unreadable:
    try:
        return _as_object(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        row = _with_nan(bytes(text))
        return Unreadable(_why(bytes(text), error)) if row is None else _as_object(row)


def _as_object(row: object) -> Raw | Unreadable:
    return row if isinstance(row, dict) else Unreadable(f"{type(row).__name__}, not an object")


def _with_nan(text: bytes) -> Any:
    """Decode JSON that has NaN or Infinity, as Python writes them; None if it has
    neither.
    """
    if b"NaN" not in text and b"Infinity" not in text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _why(text: bytes, error: Exception) -> str:
    """Return why a text is not JSON."""
    try:
        text.decode()
    except UnicodeDecodeError as wrong:
        return f"the byte 0x{text[wrong.start]:02x} is not UTF-8; {AS_UTF8}"
    if text.lstrip().startswith((b"{'", b"[{'")):
        return "it is Python's notation, not JSON; write rows with json.dumps"
    return str(error)


def _csv_rows(delimiter: str, path: Path) -> Iterator[Numbered]:
    """Yield the rows of CSV or TSV, whose first line names the columns; values are
    texts.
    """
    csv.field_size_limit(LONGEST_FIELD)
    with io.TextIOWrapper(_open_text(path), "utf-8", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        columns = [name.strip() for name in next(lines, [])]
        if len(set(columns)) < len(columns):
            raise MegarlError(f"{path}: its first line names a column twice: {', '.join(columns)}")
        number = lines.line_num + 1
        for values in lines:
            if len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            elif values:
                has = f"{len(values)} values, where the first line names {len(columns)} columns"
                yield number, Unreadable(has)
            number = lines.line_num + 1


# Tables


class _LazyColumns:
    """The columns of a part of a table, each converted when a row is first asked for
    it.
    """

    def __init__(self, table: Any) -> None:
        self.places = {name: place for place, name in enumerate(table.schema.names)}
        self._table = table
        self._values: dict[str, list[Any]] = {}

    def value(self, name: str, row: int) -> Any:
        """Return a value. UnfitError if it cannot be converted."""
        if name not in self._values:
            column = self._table.column(self.places[name])
            try:
                self._values[name] = column.to_pylist()
            except (ValueError, OverflowError):  # perhaps of one value
                return _single_value(column, name, row)
        return self._values[name][row]


def _single_value(column: Any, name: str, row: int) -> Any:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        raise UnfitError(f"the column {name!r} cannot be read: {shown(str(error))}") from None


class TableRow(Mapping[str, Any]):
    """A row of a table."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: _LazyColumns, row: int) -> None:
        self._columns = columns
        self._row = row

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns.places:
            raise KeyError(name)
        return self._columns.value(name, self._row)

    def __contains__(self, name: object) -> bool:
        return name in self._columns.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.places)

    def __len__(self) -> int:
        return len(self._columns.places)


def rows_in(table: Any) -> Iterator[TableRow]:
    """Yield the rows of a pyarrow table or record batch."""
    for begin in range(0, table.num_rows, MOST_ROWS):
        part = table.slice(begin, MOST_ROWS)
        columns = _LazyColumns(part)
        for row in range(part.num_rows):
            yield TableRow(columns, row)


def _parquet(path: Path) -> Iterator[Numbered]:
    import pyarrow.parquet as pq

    _check_table(path)
    with pq.ParquetFile(path, memory_map=True) as file:
        at_once = _rows_at_once(file.metadata)
        batches = file.iter_batches(batch_size=at_once)
        yield from enumerate((row for batch in batches for row in rows_in(batch)), 1)


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows of a Parquet file have `BATCH_BYTES`, at most `MOST_ROWS`."""
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    largest = max((g.total_byte_size / g.num_rows for g in groups if g.num_rows), default=1)
    return int(max(1, min(MOST_ROWS, BATCH_BYTES / max(largest, 1))))


def _arrow(path: Path) -> Iterator[Numbered]:
    import pyarrow as pa

    _check_table(path)
    with pa.memory_map(str(path)) as file:
        try:
            batches = iter(pa.ipc.open_stream(file))
        except pa.ArrowInvalid:  # the other of Arrow's two formats
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from enumerate((row for batch in batches for row in rows_in(batch)), 1)


def _check_table(path: Path) -> None:
    with path.open("rb") as file:
        begin = file.read(64)
    if not begin:
        raise MegarlError(f"{path}: it is empty, without a byte")
    if what := _stand_in(begin):
        raise MegarlError(f"{path}: {what}")


PACKABLE: Mapping[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": partial(_csv_rows, ","),
    ".tsv": partial(_csv_rows, "\t"),
}
READERS = {**PACKABLE, ".parquet": _parquet, ".arrow": _arrow}
