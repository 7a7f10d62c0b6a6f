"""Reads tables as other programs export them, into rows by column name.

    CSV, TSV    wandb, TensorBoard, pandas, spreadsheets: , or ; or tab, quotes, UTF-8
                or UTF-16
    JSON        an array of objects, an object a line, or pandas' columns
    Parquet

Each of them also as .gz.

The first bytes say what a file is, rather than its name. Numbers may have thousands
separators, decimal commas and percent signs: whether a comma is a decimal mark, the
other numbers of a column or file say, since 1,234 by itself does not. Two columns of
one name are an error, as either could be meant.
"""

import csv
import gzip
import io
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import LARGEST_BYTES, contents
from megarl.core.base.rundir import Row

log = logging.getLogger(__name__)
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
SEPARATORS = ",;\t"
type Placed = tuple[str, Row]
"""A row, and where it stands, for messages."""


def name_of(path: Path) -> str:
    """Return the file's name without its suffixes: `run` of run.csv.gz."""
    return Path(path.name.removesuffix(".gz")).stem


def read_table(path: Path) -> list[Placed]:
    """Read the rows of a file, by its first bytes; by its suffix only if no bracket of
    JSON comes first. MegarlError, with the place, for anything that is no table.
    """
    data = _decompressed(path, _bytes(path))
    if data.startswith(b"PAR1"):
        return _parquet(path, data)
    if data.startswith(b"PK"):
        raise MegarlError(
            f"{path}: a workbook or a ZIP archive; save the sheet as CSV, or unpack it"
        )
    text = _text(path, data)
    is_json = text.lstrip().startswith(("{", "["))
    if is_json or Path(path.name.removesuffix(".gz")).suffix in JSON_SUFFIXES:
        return _json(path, text)
    return _delimited(path, text)


def _bytes(path: Path) -> bytes:
    """Return a file's contents, also of a pipe, such as a shell's `<(command)`."""
    if not path.is_fifo():
        return contents(path)
    with path.open("rb") as pipe:
        data = pipe.read(LARGEST_BYTES + 1)
    if len(data) > LARGEST_BYTES:
        raise MegarlError(f"{path}: more than {LARGEST_BYTES >> 20} MiB, too much for a table")
    return data


def _decompressed(path: Path, data: bytes) -> bytes:
    """Return a file's data without gzip, if it has any. MegarlError if it is damaged or
    larger than LARGEST_BYTES.
    """
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            plain = file.read(LARGEST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise MegarlError(f"{path}: cannot be decompressed ({error}); write it again") from None
    if len(plain) > LARGEST_BYTES:
        raise MegarlError(
            f"{path}: more than {LARGEST_BYTES >> 20} MiB once decompressed, too much for a table"
        )
    return plain


def _text(path: Path, data: bytes) -> str:
    """Decode UTF-8 or, with a byte order mark, UTF-16; MegarlError if it is no text."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise MegarlError(
            f"{path}: not text in UTF-8 ({error.reason} at byte {error.start}); save it as such"
        ) from None
    if "\0" in text:
        raise MegarlError(f"{path}: not a table of text: it has zero bytes")
    return text


def _parquet(path: Path, data: bytes) -> list[Placed]:
    """Return the rows of a Parquet file, numbered from 1. MegarlError if it cannot be
    read or two columns have one name.
    """
    import pyarrow  # comes with `datasets`; only here, since it takes long
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(data))
    except (pyarrow.ArrowException, OSError) as error:
        raise MegarlError(f"{path}: cannot be read as Parquet ({error}); write it again") from None
    _refuse_repeated(str(path), table.column_names)
    return [(f"{path}, row {n}", row) for n, row in enumerate(table.to_pylist(), 1)]


# Text with separators.


def _delimited(path: Path, text: str) -> list[Placed]:
    """Read rows of text with separators. A line that begins with # is a remark."""
    all_lines = io.StringIO(text, newline="")
    lines = [line for line in all_lines if line.strip() and not line.startswith("#")]
    separator = ""
    if lines and re.fullmatch(r"sep=.\s*", lines[0]):  # Excel's first line, such as sep=;
        separator = lines.pop(0)[len("sep=")]
    try:
        if not separator:  # the one that divides the header into most fields
            separator = max(SEPARATORS, key=lambda mark: len(_fields(lines[:1], mark)))
        rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True))
    except csv.Error as error:
        raise MegarlError(f"{path}: not a CSV file ({error})") from None
    header = rows[0] if rows else []
    names = [name.strip() for name in header]
    _refuse_header(path, names)
    placed = []
    for n, fields in enumerate(rows[1:], 1):
        place = f"{path}, row {n}"
        row = _named(place, names, fields)
        if any(row.values()):  # not a line of separators only
            placed.append((place, row))
    return _with_plain_numbers(placed)


def _fields(lines: Sequence[str], separator: str) -> list[str]:
    """Return the fields of the first of these lines; none if there is no line."""
    return next(csv.reader(lines, delimiter=separator, skipinitialspace=True), [])


def _refuse_header(path: Path, names: Sequence[str]) -> None:
    """Raise MegarlError if columns cannot be told by these names."""
    _refuse_repeated(str(path), names)
    if names and all(_number_of(name, ".") for name in names):
        raise MegarlError(
            f"{path}: its first line has numbers only; write a line with the columns' names"
            " above it"
        )


def _refuse_repeated(place: str, names: Sequence[str]) -> None:
    """Raise MegarlError if two columns have one name. Several may have none."""
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        columns = [str(n) for n, name in enumerate(names, 1) if name == repeated[0]]
        raise MegarlError(
            f"{place}: columns {' and '.join(columns)} are both called {repeated[0]!r}; rename or"
            " remove one"
        )


def _named(place: str, names: Sequence[str], fields: Sequence[str]) -> Row:
    """Return a row's fields by name, without those of columns that have no name, such
    as pandas' index. MegarlError if there are fewer fields than names, or more that are
    not blank; a blank row may have any number.
    """
    surplus = fields[len(names) :]
    is_blank = not any(field.strip() for field in fields)
    has_surplus = any(field.strip() for field in surplus)
    if not is_blank and (len(fields) < len(names) or has_surplus):
        raise MegarlError(
            f"{place}: {len(names)} headers, but another number of fields ({len(fields)})"
        )
    return {name: field.strip() for name, field in zip(names, fields, strict=False) if name}


# Numbers as people and spreadsheets write them.

GROUPS = re.compile(r"(?<=\d)[ \u00a0\u202f'’](?=\d{3}(?!\d))")
"""A blank or an apostrophe in front of three digits."""
POINT = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(,\d{3})+)?(\.\d*)?([eE][-+]?\d+)?")
COMMA = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(\.\d{3})+)?(,\d*)?([eE][-+]?\d+)?")
MARKS = {".": POINT, ",": COMMA}
"""Numbers by the mark before their decimals."""


def _number_of(text: str, mark: str) -> str | None:
    """Return a number as Python writes it, if the text is one with `mark` before its
    decimals; else None. 54% is 0.54.
    """
    is_percent = text.endswith("%")
    digits = GROUPS.sub("", text.removesuffix("%").rstrip())
    if not MARKS[mark].fullmatch(digits) or not any(character.isdigit() for character in digits):
        return None
    thousands_mark = "," if mark == "." else "."
    plain = digits.replace(thousands_mark, "").replace(mark, ".")
    return repr(float(plain) / 100) if is_percent else plain


def _with_plain_numbers(rows: Sequence[Placed]) -> list[Placed]:
    """Return the rows with all numbers as Python writes them. A column whose numbers
    all may have either mark before their decimals has the mark of the other columns.
    """
    certain_marks: dict[str, set[str]] = {}
    for _, row in rows:
        for name, text in row.items():
            certain_marks.setdefault(name, set()).update(_certain_mark(text))  # "" adds none
    mark_of_file = _single(set().union(*certain_marks.values()))
    marks = {}
    for name, marks_of_column in certain_marks.items():
        marks[name] = _single(marks_of_column) if marks_of_column else mark_of_file
    plain_rows = []
    for place, row in rows:
        plain_row = {name: _plain(text, marks[name]) for name, text in row.items()}
        plain_rows.append((place, plain_row))
    return plain_rows


def _certain_mark(text: str) -> str:
    """Return the mark before the decimals if this text can be a number with that mark
    alone; else "".
    """
    if "." not in text and "," not in text:
        return ""
    marks = [mark for mark in MARKS if _number_of(text, mark)]
    return marks[0] if len(marks) == 1 else ""


def _single(marks: set[str]) -> str:
    """Return the mark if there is one; "" if there is none, or several contradict."""
    return next(iter(marks)) if len(marks) == 1 else ""


def _plain(text: str, mark: str) -> str:
    """Return a number as Python writes it, and any other text as it is. If the mark is
    not known (""), 1.234 has a decimal point, and 1,234 stays as it is, so that a
    message can say that it is no number.
    """
    if not mark and "," in text:
        return text
    number = _number_of(text, mark or ".")
    return text if number is None else number


# JSON.


def _json(path: Path, text: str) -> list[Placed]:
    """Read an array of objects, columns as pandas writes them, or an object a line. One
    object that is no table by columns is a row.
    """
    try:
        document = _parsed(text)
    except ValueError as error:  # also of several objects, an object a line
        if text.lstrip().startswith("["):
            raise MegarlError(f"{path}: cannot be read as JSON ({error})") from None
        return list(_json_lines(path, text))
    except RecursionError:
        raise MegarlError(f"{path}: brackets are nested too deep for a table") from None
    if isinstance(document, list):
        return _objects(path, document)
    if isinstance(document, dict):
        rows = _rows_of_columns(path, document)
        if rows is not None:
            return [(f"{path}, row {n}", row) for n, row in enumerate(rows, 1)]
    place = f"{path}, line 1"
    return [(place, _object(place, document))]


def _objects(path: Path, rows: Sequence[object]) -> list[Placed]:
    """Return the rows of an array, all of which must be objects."""
    placed = []
    for n, row in enumerate(rows, 1):
        place = f"{path}, row {n}"
        placed.append((place, _object(place, row)))
    return placed


def _json_lines(path: Path, text: str) -> Iterator[Placed]:
    """Yield an object a line. A last line that is not complete is left out with a
    warning: a crash has cut it off, or it is being written.
    """
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = _parsed(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:  # no line break ends it
                log.warning("%s: cut off, and left out", place)
                return
            raise MegarlError(f"{place}: cannot be read as JSON ({error})") from None
        yield place, _object(place, row)


def _parsed(text: str) -> object:
    """Parse JSON. ValueError if it is none, or if an object has a name twice."""
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, object]]) -> Row:
    """Return an object by its (name, value) pairs. ValueError if a name is repeated."""
    names = Counter(name for name, _ in pairs)
    name, count = names.most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ValueError(f"{name!r} is there {count} times in one object")
    return dict(pairs)


def _object(place: str, row: object) -> Row:
    """Return a row that JSON gave. MegarlError if it is no object."""
    if isinstance(row, list):
        raise MegarlError(
            f"{place}: not a JSON object but a list without names, as in TensorBoard's JSON; save"
            " its CSV"
        )
    if not isinstance(row, dict):
        raise MegarlError(f"{place}: not a JSON object")
    return row


def _rows_of_columns(path: Path, document: Row) -> list[Row] | None:
    """Return the rows of an object that has them by column, as pandas writes them
    (orient: columns, split or table), as lists, or by index; None for another object.
    """
    data = document.get("data")
    if isinstance(data, list):  # orient: split has columns beside it, table has not
        names = document.get("columns")
        if isinstance(names, list):
            return _split_rows(path, [str(name) for name in names], data)
        return [row for _, row in _objects(path, data)]
    values = list(document.values())
    if values and all(isinstance(value, list) for value in values):  # {name: [value, …], …}
        if len({len(value) for value in values}) > 1:
            lengths = ", ".join(f"{name} {len(value)}" for name, value in document.items())
            raise MegarlError(f"{path}: columns of different lengths: {lengths}")
        return [dict(zip(document, row, strict=True)) for row in zip(*values, strict=True)]
    if values and all(isinstance(value, dict) for value in values):
        if all(name.isdecimal() for name in document):  # {index: row, …}
            return values
        return _indexed_rows(document)  # {name: {index: value, …}, …}
    return None


def _split_rows(path: Path, names: Sequence[str], data: Sequence[object]) -> list[Row]:
    """Return rows that are lists beside a list of the columns' names."""
    _refuse_repeated(str(path), names)
    rows = []
    for values in data:
        if not isinstance(values, list):
            raise MegarlError(f"{path}: `data` beside `columns` is not a list of rows")
        rows.append(dict(zip(names, values, strict=False)))
    return rows


def _indexed_rows(columns: Mapping[str, Row]) -> list[Row]:
    """Return the rows of columns that have their values by index."""
    first_column = next(iter(columns.values()))
    rows = []
    for index in first_column:
        rows.append({name: column.get(index) for name, column in columns.items()})
    return rows
