"""Reads rows from a source one at a time; a whole file is never in memory.

    data/math.jsonl                one JSON object per line; faults are reported with their line
    data/math.json                 an array of objects, which is in memory as text, or one per line
    data/math.parquet, .arrow      read by Hugging Face `datasets`; `data/part-*.parquet` means all these files in order
    hub:openai/gsm8k:main:train    a Hugging Face hub set: name, configuration (may be omitted), split (train by default)
    reasoning-gym:chain_sum        problems that are made as they are read (reasoning_gym.py)

A hub set is downloaded once into the cache of `datasets` and memory-mapped from there.
"""

import glob
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject
from megarl.tasks.data import reasoning_gym

HUB = "hub:"
BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""The loader of `datasets` for each file suffix. JSON is read here: `datasets` reports no line numbers, and gives a column one
type, so that texts become dates, whole numbers are rounded, and texts beside numbers get quotes and second backslashes."""
SUFFIXES = (".jsonl", ".json", *BUILDERS)


class Unreadable(NamedTuple):
    """A line that is not a JSON object."""

    why: str


type Numbered = tuple[int, JsonObject | Unreadable]


def is_source(name: str) -> bool:
    """Return whether this is the name of a source of rows rather than of a recipe."""
    return name.startswith(HUB) or reasoning_gym.is_gym(name) or Path(name).suffix in SUFFIXES


def problem(source: str) -> str | None:
    """Return why this source cannot be read, as far as that is clear without reading it; else None."""
    if reasoning_gym.is_gym(source):
        return reasoning_gym.problem(source)
    if source.startswith(HUB):
        wrong = f"{source!r} is not hub:ORG/NAME, hub:ORG/NAME:SPLIT or hub:ORG/NAME:CONFIG:SPLIT"
        return None if _hub(source) else wrong
    suffix = Path(source).suffix
    if not os.path.isfile(source) and not (suffix in SUFFIXES[1:] and glob.glob(source)):
        return f"{source!r} is not a file"
    return None if suffix in SUFFIXES else f"{source!r} ends in none of {', '.join(SUFFIXES)}"


def stream(source: str) -> Iterator[Numbered]:
    """Yield rows with their numbers from 1; for JSONL, line numbers, with blank lines skipped. MegarlError as in `problem`."""
    if wrong := problem(source):
        raise MegarlError(wrong)
    if reasoning_gym.is_gym(source):
        return enumerate(reasoning_gym.rows(source), 1)
    if Path(source).suffix == ".jsonl" and not source.startswith(HUB):
        return _lines(Path(source))
    if Path(source).suffix == ".json" and not source.startswith(HUB):
        return enumerate(chain.from_iterable(_rows(Path(path)) for path in sorted(glob.glob(source))), 1)
    return enumerate(_dataset(source), 1)


def _lines(path: Path) -> Iterator[Numbered]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _row(line)


def _rows(path: Path) -> Iterator[JsonObject | Unreadable]:
    """Yield the rows of a JSON file: an array of objects, or one per line."""
    with path.open("rb") as file:
        is_array = next((line for line in file if line.strip()), b"").lstrip().startswith(b"[")
    if not is_array:
        yield from (row for _, row in _lines(path))
        return
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise MegarlError(f"{path}: cannot be read: {error}") from None
    yield from map(_row, rows)


def _row(text: bytes | msgspec.Raw) -> JsonObject | Unreadable:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable(str(error))
    return row if isinstance(row, dict) else Unreadable(f"{type(row).__name__}, not an object")


def _dataset(source: str) -> Iterator[JsonObject]:
    """Yield rows through `datasets`: files streamed, hub sets from its cache."""
    import datasets  # takes two seconds and is needed only here

    try:
        if hub := _hub(source):
            name, config, split = hub
            yield from datasets.load_dataset(name, config, split=split)
        else:
            builder, files = BUILDERS[Path(source).suffix], sorted(glob.glob(source))
            yield from datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__ is not None:
            error = error.__cause__  # its own text says only that the set could not be generated
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        away = "; without a network, copy its files here and name them instead" if source.startswith(HUB) else ""
        raise MegarlError(f"{source}: cannot be read: {first}{away}") from error


def _hub(source: str) -> tuple[str, str | None, str] | None:
    """Parse `hub:…` into name, configuration and split; None if it is malformed."""
    parts = source.removeprefix(HUB).split(":")
    if not source.startswith(HUB) or not all(parts) or len(parts) > 3:
        return None
    name, *config, split = parts if len(parts) > 1 else [*parts, "train"]
    return name, config[0] if config else None, split
