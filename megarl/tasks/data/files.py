"""Reads the rows of one file: JSON lines, JSON, CSV, TSV, Parquet or Arrow.

    path ──► bytes, unpacked if the name ends in .gz, .bz2, .xz or .zst
        ──► rows, one at a time

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import zstandard

from megarl.core.base.errors import MegarlError
from megarl.tasks.data.rows import Raw, UnfitError, abbreviated

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
    """A line that is not a row. problem: what is wrong with it."""

    problem: str


type Numbered = tuple[int, Raw | Unreadable]


def format_of(name: str | Path) -> str | None:
    """Return the key in `READERS` for a file of this name; None if there is none."""
    path = Path(name)
    suffix = path.suffix
    formats: Mapping[str, Any] = READERS
    if suffix in PACKED:
        suffix = Path(path.stem).suffix
        formats = PACKABLE
    return suffix if suffix in formats else None


def rows_of(path: Path) -> Iterator[Numbered]:
    """Yield a file's rows with their numbers from 1: of texts the numbers of their
    lines.

    MegarlError if the file is not what its name says. Errors of the readers' libraries
    are the caller's to catch.
    """
    return READERS[format_of(path) or ""](path)


# Texts


def _zstandard(path: Path) -> BinaryIO:
    """Open a file packed by zstd, perhaps in several frames, as its writers append."""
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
    file: Any
    if path.suffix in PACKED:
        file = PACKED[path.suffix](path)
    else:
        file = path.open("rb")
    beginning = file.peek(64)[:64]
    problem = _other_than_text(beginning)
    if problem:
        file.close()
        raise MegarlError(f"{path}: {problem}")
    if beginning.startswith(BOM):
        file.read(len(BOM))
    return cast(BinaryIO, file)


def _other_than_text(beginning: bytes) -> str:
    """Return what a file that begins like this is instead of UTF-8 text, and what to
    do.
    """
    if beginning.startswith(b"\x1f\x8b"):
        return "it is packed by gzip; end its name in .gz"
    if beginning.startswith(b"\x28\xb5\x2f\xfd"):
        return "it is packed by zstd; end its name in .zst"
    if beginning.startswith(b"PK\x03\x04"):
        return "it is a zip archive; unpack it"
    if beginning.startswith(b"PAR1"):
        return "it is a Parquet file; end its name in .parquet"
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in beginning[:4]:
        return "it is UTF-16 text; save it as UTF-8, such as with `iconv -f UTF-16 -t UTF-8`"
    return _stand_in(beginning)


def _stand_in(beginning: bytes) -> str:
    """Return what a file that begins like this is if it only stands for another."""
    if beginning.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file; fetch the file with `git lfs pull`"
    if beginning.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page, not the file; download the file itself"
    return ""


def _json_lines(path: Path) -> Iterator[Numbered]:
    """Yield the rows of a file with one object per line, blank lines aside."""
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
        yield from _one_object_or_lines(path, first)


def _array(path: Path) -> Iterator[Raw | Unreadable]:
    """Yield the rows of a JSON file that is one array. MegarlError if it is not
    JSON.
    """
    with _open_text(path) as file:
        text = file.read()
    try:
        rows = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rows = _with_nan(text)
        if not isinstance(rows, list):
            raise MegarlError(f"{path}: cannot be read: {_fault(text, error)}") from None
    for row in rows:
        if isinstance(row, msgspec.Raw):
            yield _row(row)
        else:
            yield _as_object(row)


def _one_object_or_lines(path: Path, first_line: bytes) -> Iterator[Numbered]:
    """Yield the row of a file that is one object as a whole, or else its lines, with
    what is wrong with them. MegarlError if the object holds rows or columns, or if
    several objects extend over lines.
    """
    with _open_text(path) as file:
        row = _row(file.read())
    advice = "write an array of rows, or one row per line"
    if isinstance(row, Mapping) and _holds_columns(row):
        names = ", ".join(map(str, list(row)[:5]))
        raise MegarlError(
            f"{path}: it is one JSON object with the keys {names}, not rows; {advice}"
        )
    if isinstance(row, Mapping):
        yield 1, row
    elif first_line.strip() == b"{":
        raise MegarlError(f"{path}: its objects extend over several lines; {advice} (`jq -c .`)")
    else:
        yield from _json_lines(path)


def _holds_columns(row: Raw) -> bool:
    """Return whether an object is no row, but holds rows or columns: a list of objects
    that is no conversation, or two values or more that are all lists of the same length
    or all objects.
    """
    values = list(row.values())
    if any(_is_conversation(value) for value in values):
        return False
    if any(_is_list_of_objects(value) for value in values):  # such as {"data": [{…}, …]}
        return True
    if len(values) < 2:
        return False
    if all(isinstance(value, list) for value in values):
        return len({len(value) for value in values}) == 1
    return all(isinstance(value, Mapping) for value in values)


def _is_list_of_objects(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, Mapping) for item in value)


def _is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages, judging by the first."""
    if not isinstance(value, list) or not value:
        return False
    first = value[0]
    return isinstance(first, Mapping) and bool({"role", "from"} & set(first))


def _row(text: bytes | msgspec.Raw) -> Raw | Unreadable:
    """Return the row whose JSON text this is, or what is wrong with it."""
    try:
        return _as_object(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        row = _with_nan(bytes(text))
        if row is None:
            return Unreadable(_fault(bytes(text), error))
        return _as_object(row)


def _as_object(row: object) -> Raw | Unreadable:
    """Return a decoded value if it is an object, else what it is instead."""
    if isinstance(row, dict):
        return row
    return Unreadable(f"{type(row).__name__}, not an object")


def _with_nan(text: bytes) -> Any:
    """Decode JSON that has NaN or Infinity, as Python writes them; None if it has
    neither, or is not JSON otherwise.
    """
    if b"NaN" not in text and b"Infinity" not in text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fault(text: bytes, error: Exception) -> str:
    """Return why a text is not JSON."""
    try:
        text.decode()
    except UnicodeDecodeError as decode_error:
        return f"the byte 0x{text[decode_error.start]:02x} is not UTF-8; {AS_UTF8}"
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
        number = lines.line_num + 1  # of the row's first line: a value may have several
        for values in lines:
            if len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            elif values:
                problem = f"{len(values)} values, where the first line names {len(columns)} columns"
                yield number, Unreadable(problem)
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
            except (ValueError, OverflowError):  # perhaps only in another row's value
                return _single_value(column, name, row)
        return self._values[name][row]


def _single_value(column: Any, name: str, row: int) -> Any:
    """Convert one value of a column. UnfitError if that is impossible, as of a date
    beyond Python's.
    """
    try:
        return column[row].as_py()
    except (ValueError, OverflowError) as error:
        raise UnfitError(f"the column {name!r} cannot be read: {abbreviated(str(error))}") from None


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
    for start in range(0, table.num_rows, MOST_ROWS):
        part = table.slice(start, MOST_ROWS)
        columns = _LazyColumns(part)
        for row in range(part.num_rows):
            yield TableRow(columns, row)


def rows_in_all(tables: Iterable[Any]) -> Iterator[TableRow]:
    """Yield the rows of one table after the other."""
    for table in tables:
        yield from rows_in(table)


def _parquet(path: Path) -> Iterator[Numbered]:
    """Yield the rows of a Parquet file."""
    import pyarrow.parquet as pq

    _check_table(path)
    with pq.ParquetFile(path, memory_map=True) as file:
        batches = file.iter_batches(batch_size=_rows_at_once(file.metadata))
        yield from enumerate(rows_in_all(batches), 1)


def _rows_at_once(metadata: Any) -> int:
    """Return how many rows of a Parquet file take `BATCH_BYTES`, if all are as large as
    the mean of its largest group; 1 to `MOST_ROWS`.
    """
    largest_row = 1.0  # bytes
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_rows:
            largest_row = max(largest_row, group.total_byte_size / group.num_rows)
    return int(max(1, min(MOST_ROWS, BATCH_BYTES / largest_row)))


def _arrow(path: Path) -> Iterator[Numbered]:
    """Yield the rows of an Arrow file, in either of Arrow's formats: stream or file."""
    import pyarrow as pa

    _check_table(path)
    with pa.memory_map(str(path)) as file:
        try:
            batches = iter(pa.ipc.open_stream(file))
        except pa.ArrowInvalid:  # the other of Arrow's two formats
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield from enumerate(rows_in_all(batches), 1)


def _check_table(path: Path) -> None:
    """Raise MegarlError if a file is empty, or only stands for a table as a pointer of
    Git LFS does.
    """
    with path.open("rb") as file:
        beginning = file.read(64)
    if not beginning:
        raise MegarlError(f"{path}: it is empty, without a byte")
    problem = _stand_in(beginning)
    if problem:
        raise MegarlError(f"{path}: {problem}")


PACKABLE: Mapping[str, Callable[[Path], Iterator[Numbered]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": partial(_csv_rows, ","),
    ".tsv": partial(_csv_rows, "\t"),
}
READERS = {**PACKABLE, ".parquet": _parquet, ".arrow": _arrow}
