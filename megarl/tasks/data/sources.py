"""Reads rows from a source one at a time; a whole file is never in memory.

    data/math.jsonl              one JSON object per line; faults are reported with
                                 their line
    data/math.json               an array of objects, which is in memory as text, or one
                                 per line
    data/math.csv, .tsv          the first line names the columns
    data/math.parquet, .arrow
    data/math.jsonl.gz           any of the texts, packed: .gz, .bz2, .xz, .zst
    data/part-*.parquet          all these files in the order of their names; `**/` is
                                 any folder
    data/math                    all files in this folder, if they are of one kind and
                                 one split
    hub:openai/gsm8k:main:train  a Hugging Face hub set: name, configuration (may be
                                 omitted), split (train by default)
    reasoning-gym:chain_sum      problems made as they are read (reasoning_gym.py)

A hub set is downloaded once into the cache of `datasets` and memory-mapped from there.
files.py reads files.
"""

import csv
import glob
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zstandard import ZstdError

from megarl.core.base.errors import MegarlError
from megarl.tasks.data import reasoning_gym
from megarl.tasks.data.files import (
    AS_UTF8,
    PACKABLE,
    PACKED,
    READERS,
    Numbered,
    TableRow,
    Unreadable,
    format_of,
    rows_in_all,
    rows_of,
)

HUB = "hub:"
HUB_FORMS = "hub:ORG/NAME, hub:ORG/NAME:SPLIT or hub:ORG/NAME:CONFIG:SPLIT"
HUB_NAME = r"[\w.-]+(?:/[\w.-]+)?"
HUB_SITE = r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/|hf://datasets/|hf://)"
HUB_PART = re.compile(rf"{HUB_SITE}(?P<name>[\w.-]+/[\w.-]+)")
HUB_URL = re.compile(
    rf"{HUB_PART.pattern}(?:/viewer/(?P<config>[\w.-]+)/(?P<split>[\w.-]+)|/tree/main)?/?"
)
"""Addresses of a set of the hub, as people copy them."""
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*://")
BESIDE_DATA = frozenset(
    {"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
)
"""Files that `datasets` writes beside those with rows."""
SPLIT = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval|heldout)(?=[-_.])")
SEVERAL = 5
"""Names shown of several files."""


class HubSet(NamedTuple):
    """A part of a set on the Hugging Face hub. config: None for the only one."""

    name: str
    config: str | None
    split: str


def is_source(name: str) -> bool:
    """Return whether this is the name of a source of rows rather than of a recipe."""
    if name.startswith(HUB) or reasoning_gym.is_gym(name) or ELSEWHERE.match(name):
        return True
    is_folder = "/" in name and Path(name).is_dir()  # a recipe may share a folder's name
    return is_folder or format_of(name) is not None


def is_hub(source: str) -> bool:
    """Return whether a source is a set of the hub, whose rows users cannot correct."""
    return source.startswith(HUB) or HUB_URL.fullmatch(_address(source)) is not None


def problem(source: str) -> str | None:
    """Return why this source cannot be read, as far as that is clear without reading
    it.
    """
    if reasoning_gym.is_gym(source):
        return reasoning_gym.problem(source)
    try:
        _place_of(source)
    except MegarlError as error:
        return str(error)
    return None


def stream(source: str) -> Iterator[Numbered]:
    """Yield rows with their numbers from 1. MegarlError as in `problem`.

    In one file of text a row's number is that of its line, so blank lines count; else
    rows are counted.
    """
    if reasoning_gym.is_gym(source):
        fault = reasoning_gym.problem(source)
        if fault:
            raise MegarlError(fault)
        return enumerate(reasoning_gym.rows(source), 1)
    return _catch_errors(source, _place_of(source))


def _catch_errors(source: str, place: HubSet | list[Path]) -> Iterator[Numbered]:
    """Yield the rows of a source; turn its readers' errors into a MegarlError."""
    try:
        if isinstance(place, HubSet):
            yield from _hub_rows(place)
        else:
            yield from _rows(place)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise MegarlError(f"{source}: the byte 0x{byte:02x} is not UTF-8; {AS_UTF8}") from None
    except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise _unreadable(source, error) from error
    except (EOFError, zlib.error, lzma.LZMAError, ZstdError, csv.Error) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: BaseException) -> MegarlError:
    """Return the error for a source that its reader could not read: with the first line
    of the reader's, and for a hub set with a way around the hub.
    """
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else type(error).__name__
    advice = ""
    if is_hub(source):
        download = "`hf download ORG/NAME --repo-type dataset --local-dir DIR`"
        advice = f"; download its files ({download}; without a network, elsewhere) and name them"
    return MegarlError(f"{source}: cannot be read: {first}{advice}")


def _rows(paths: list[Path]) -> Iterator[Numbered]:
    """Yield the rows of files. Rows of several files are numbered in one count, and a
    fault then says in which file and where it is.
    """
    if len(paths) == 1:
        yield from rows_of(paths[0])
        return
    count = 0
    for path in paths:
        for line, row in rows_of(path):
            count += 1
            if isinstance(row, Unreadable):
                row = Unreadable(f"{path.name}:{line}: {row.problem}")
            yield count, row


def _hub_rows(place: HubSet) -> Iterator[tuple[int, TableRow]]:
    """Yield the rows of a set on the hub, with their numbers from 1. RuntimeError if
    `datasets` cannot load it.
    """
    import datasets  # takes two seconds and is needed only here

    try:
        dataset = datasets.load_dataset(place.name, place.config, split=place.split)
    except datasets.exceptions.DatasetGenerationError as error:
        # its own text says only that the set could not be generated
        raise RuntimeError(str(error.__cause__ or error)) from error
    except datasets.exceptions.DatasetsError as error:
        raise RuntimeError(str(error)) from error
    tables = dataset.with_format("arrow").iter(batch_size=1000)  # images stay undecoded
    yield from enumerate(rows_in_all(tables), 1)


# Names


def _place_of(source: str) -> HubSet | list[Path]:
    """Return what a source names. MegarlError if there is no such thing."""
    if is_hub(source):
        return _hub_set(source)
    if ELSEWHERE.match(source):
        raise MegarlError(_elsewhere(source))
    if not source:
        raise MegarlError("'' names no file")  # Path("") is the working directory
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    files = [path] if path.is_file() else _glob(source)
    if not files:
        raise MegarlError(f"{source!r} is not a file{_perhaps_hub(source)}")
    return _all_readable(source, files)


def _glob(pattern: str) -> list[Path]:
    """Return the data files of a pattern, in the order of their names."""
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    return [path for path in paths if path.is_file() and path.name not in BESIDE_DATA]


def _all_readable(source: str, files: list[Path]) -> list[Path]:
    """Return the files. MegarlError if one has a format that cannot be read."""
    unreadable = [path for path in files if format_of(path) is None]
    if not unreadable:
        return files
    file = unreadable[0]
    name = repr(source) if len(files) == 1 else f"{str(file)!r}, one of {source!r},"
    formats = f"{', '.join(READERS)}; {', '.join(PACKABLE)} also with {', '.join(PACKED)}"
    advice = "; unpack it" if file.suffix in (*PACKED, ".zip", ".tar", ".tgz") else ""
    raise MegarlError(f"{name} ends in none of {formats}{advice}")


def _in_folder(folder: Path) -> list[Path]:
    """Return a folder's files, in the order of their names. MegarlError if there are
    none, or if they are of several formats or splits, so that they are no parts of one
    whole.
    """
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and format_of(path) and path.name not in BESIDE_DATA:
            files.append(path)
    if not files:
        raise MegarlError(
            f"{str(folder)!r} is a folder without files that can be read; name files, or a pattern,"
            f" such as {folder}/**/*.parquet"
        )
    formats = {format_of(path) for path in files}
    if len(formats) > 1 or len(_splits(files)) > 1:
        names = ", ".join(path.name for path in files[:SEVERAL])
        suffixes = "".join(files[0].suffixes)
        raise MegarlError(
            f"{str(folder)!r} is a folder with {names}; name one of them, or a pattern, such as"
            f" {folder}/train*{suffixes}"
        )
    return files


def _splits(files: list[Path]) -> set[str]:
    """Return the splits that the files' names name."""
    matches = [SPLIT.search(path.name) for path in files]
    return {match[1] for match in matches if match}


def _perhaps_hub(source: str) -> str:
    """Return advice for a name that could be one of the hub's; "" for others."""
    name = source.removeprefix("datasets/")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and format_of(name) is None:
        return f"; the set of this name on the Hugging Face hub is hub:{name}"
    return ""


def _address(source: str) -> str:
    """Return an address without its query and fragment."""
    return re.split(r"[?#]", source, maxsplit=1)[0]


def _hub_set(source: str) -> HubSet:
    """Read `hub:…`, or the address of a set of the hub. MegarlError if malformed."""
    address = HUB_URL.fullmatch(_address(source))
    if address:
        return HubSet(address["name"], address["config"], address["split"] or "train")
    name, *parts = source.removeprefix(HUB).split(":")
    has_path = any("/" in part for part in parts)
    if not re.fullmatch(HUB_NAME, name) or not all(parts) or len(parts) > 2 or has_path:
        raise MegarlError(f"{source!r} is not {HUB_FORMS}")
    config = parts[0] if len(parts) == 2 else None
    split = parts[-1] if parts else "train"
    return HubSet(name, config, split)


def _elsewhere(source: str) -> str:
    """Return what to write instead of the address of something that cannot be read."""
    of_hub = HUB_PART.match(source)
    if of_hub is None:
        return f"{source!r} is not a file of this machine; download it and name the file"
    name = of_hub["name"].partition("@")[0]
    download = f"`hf download {name} --repo-type dataset --local-dir DIR`"
    return (
        f"{source!r} is a part of a set; write hub:{name}[[:CONFIG]:SPLIT], or {download} and DIR/…"
    )
