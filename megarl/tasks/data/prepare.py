"""`megarl data prepare`: turn any source into files of the project's own rows, cleaned, split, decontaminated, streamed.

    OUT/train.jsonl        prompts of RL                 OUT/report.json     counts, and what was left out and why
    OUT/heldout.jsonl      prompts never trained on      OUT/removed.jsonl   each row found in an evaluation set, with the match

The source is read twice, by survey.py and by the writers; memory holds 35 bytes a row, whatever a row's size. Rows keep the
source's order: drawing shuffles anew each epoch. Files appear complete or not at all.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_atomically
from megarl.tasks.data.contamination import Hit, Overlap, overlap_with
from megarl.tasks.data.rows import Row
from megarl.tasks.data.survey import LeftOut, Reader, Survey, chosen, survey

FORMATS = ("jsonl", "parquet", "arrow")
BATCH = 4096
"""Rows written at once."""
TICK = 1000
"""Rows between two updates of the progress bar."""


class Prepared(NamedTuple):
    """The result of a preparation. train, heldout: rows written. evaluation: number of texts decontaminated against."""

    source: str
    rows: int
    train: int
    heldout: int
    evaluation: int
    left_out: LeftOut

    def report(self) -> dict[str, object]:
        """Return the contents of report.json."""
        reasons = self.left_out.counts.items()
        named = {name: [f"{number}: {what}" for number, what in first] for name, first in self.left_out.first.items()}
        return {
            "source": self.source, "rows": self.rows, "train": self.train, "heldout": self.heldout,
            "evaluation_texts": self.evaluation, "left_out": dict(reasons), "first": named,
        }  # fmt: skip


def prepare(
    source: str, out: Path, read: Reader, heldout: int, against: Sequence[str], form: str, console: Console
) -> Prepared:
    """Write the files and return what was done."""
    if Path(source).resolve() in [path.resolve() for path in _outputs(out)]:
        raise MegarlError(f"{out}: the source lies there and would be written over; name another directory")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegarlError(f"{out}: cannot make this directory: {error.strerror}") from None
    evaluation = overlap_with(against)
    with _progress(console) as ticks:
        found = _surveyed(source, out, read, heldout, evaluation, ticks)
        kept = int(found.kept.sum())
        train, held = _write(found, out, form, ticks("writing", kept))
    done = Prepared(source, len(found.kept), train, held, len(evaluation or ()), found.left_out)
    write_atomically(out / "report.json", msgspec.json.format(msgspec.json.encode(done.report())) + b"\n")
    return done


type Ticks = Callable[[str, int | None], Callable[[], object]]


def _surveyed(source: str, out: Path, read: Reader, heldout: int, evaluation: Overlap | None, ticks: Ticks) -> Survey:
    """Survey the source; rows that match an evaluation text go to removed.jsonl, if there are such texts."""
    if evaluation is None:
        (out / "removed.jsonl").unlink(missing_ok=True)  # left by an earlier preparation
        return survey(source, read, heldout, tick=ticks("reading", None))
    with JsonlFile(out / "removed.jsonl") as removed:

        def write(row: Row, number: int, hit: Hit) -> None:
            removed.add([{"number": number, "id": row.id, "prompt": row.prompt, **hit._asdict()}])

        return survey(source, read, heldout, evaluation, ticks("reading", None), write)


def _write(found: Survey, out: Path, form: str, tick: Callable[[], object]) -> tuple[int, int]:
    """Write the chosen rows; return how many went to train and heldout. Without held-out rows there is no such file."""
    sides = ("train", "heldout") if found.heldout.any() else ("train",)
    counts = [0, 0]
    with ExitStack() as stack:
        files = [_file(out / f"{side}.{form}") for side in sides]
        for file in files:
            stack.enter_context(file)
        waiting: list[list[dict[str, object]]] = [[], []]
        for row, held in chosen(found):
            waiting[held].append(msgspec.structs.asdict(row))
            counts[held] += 1
            tick()
            if len(waiting[held]) == BATCH:
                files[held].add(waiting[held])
                waiting[held] = []
        for file, rest in zip(files, waiting, strict=False):
            file.add(rest)
    for stale in set(_outputs(out)) - {file.path for file in files}:
        stale.unlink(missing_ok=True)
    return counts[0], counts[1]


def _outputs(out: Path) -> list[Path]:
    """List the prompt files that any preparation writes there."""
    return [out / f"{side}.{form}" for side in ("train", "heldout") for form in FORMATS]


@contextmanager
def _progress(console: Console) -> Iterator[Ticks]:
    """Show progress bars: a task's name and total, if known, give the function to call for each row."""
    shown = Progress(
        TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(), console=console,
    )  # fmt: skip

    counts: dict[TaskID, int] = {}

    def ticks(name: str, total: int | None) -> Callable[[], object]:
        task, begun = shown.add_task(name, total=total, rate=""), time.monotonic()
        counts[task] = 0

        def tick() -> None:
            counts[task] += 1
            if counts[task] % TICK == 0:
                rate = counts[task] / max(time.monotonic() - begun, 1e-9)
                shown.update(task, completed=counts[task], rate=f"{rate:,.0f} rows/s")

        return tick

    with shown:
        yield ticks
        for task, count in counts.items():
            shown.update(task, completed=count, total=count)


# Files, written under another name until they are complete


class JsonlFile:
    """Writes one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(f".{path.name}.part")

    def __enter__(self) -> Self:
        self._file = self.part.open("wb")
        return self

    def add(self, rows: list[dict[str, object]]) -> None:
        self._file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        _settle(self.part, self.path, kind is None)


class TableFile:
    """Writes Parquet, or the Arrow stream that `datasets` reads, with the columns of the project's rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.part = path, path.with_name(f".{path.name}.part")

    def __enter__(self) -> Self:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._schema = pa.schema(
            [("id", pa.string()), ("prompt", pa.string()), ("answer", pa.string()), ("difficulty", pa.int64())]
        )
        writer = pq.ParquetWriter if self.path.suffix == ".parquet" else pa.ipc.new_stream
        self._writer = writer(str(self.part), self._schema)
        return self

    def add(self, rows: list[dict[str, object]]) -> None:
        import pyarrow as pa

        self._writer.write_table(pa.Table.from_pylist(rows, self._schema))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._writer.close()
        _settle(self.part, self.path, kind is None)


def _file(path: Path) -> JsonlFile | TableFile:
    """Return the writer for the file's suffix."""
    return JsonlFile(path) if path.suffix == ".jsonl" else TableFile(path)


def _settle(part: Path, path: Path, whole: bool) -> None:
    if whole:
        os.replace(part, path)
    else:
        part.unlink(missing_ok=True)
