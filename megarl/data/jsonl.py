"""JSONL files that users write: typed rows, or one error that names every faulty line."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from megarl.errors import MegarlError

SHOWN = 10
"""Faults listed in an error; the rest are counted."""


def read_rows[R: msgspec.Struct](path: Path, kind: type[R], faults_of: Callable[[R, int], Iterable[str]]) -> list[R]:
    """The rows of a file, blank lines passed over. `faults_of(row, line)` yields what is wrong with a row, if anything.

    MegarlError: no such file, nothing in it, lines that are not such a row (keys it does not know are ignored), faults.
    """
    if not path.is_file():
        raise MegarlError(f"{path}: no such file; it should have JSON rows with {', '.join(kind.__struct_fields__)}")
    decoder = msgspec.json.Decoder(kind)
    rows: list[R] = []
    faults: list[str] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            faults.append(f"{path}:{number}: not a row of {', '.join(kind.__struct_fields__)}: {error}")
            continue
        faults += [f"{path}:{number}: {fault}" for fault in faults_of(row, number)]
        rows.append(row)
    if faults:
        raise MegarlError(listed(f"{path}: {len(faults)} fault{'s' * (len(faults) > 1)}:", faults))
    if not rows:
        raise MegarlError(f"{path}: no rows in it")
    return rows


def listed(head: str, items: list[str]) -> str:
    """The head and the first items, one a line."""
    more = [f"… and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return "\n".join([head, *items[:SHOWN], *more])
