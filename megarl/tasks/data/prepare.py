"""`megarl data prepare`: turn any source into files of the project's own rows, cleaned,
split, decontaminated, streamed.

    OUT/train.jsonl      RL prompts
    OUT/heldout.jsonl    prompts never trained on
    OUT/report.json      counts, and which rows were left out and why
    OUT/removed.jsonl    each row found in an evaluation set, with the match

The source is read twice, by survey.py and by the writers; memory holds 35 bytes per
row, however large the rows are. Rows keep the source's order, since drawing prompts
shuffles them in each epoch. Files appear complete or not at all.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as ProgressTask
from rich.text import Text

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import made_directory, write_atomically
from megarl.core.base.types import JsonObject
from megarl.tasks.data.contamination import Hit, overlap_with
from megarl.tasks.data.rows import PromptRow
from megarl.tasks.data.sources import stream
from megarl.tasks.data.survey import LeftOut, Reader, RowShape, chosen, survey

FORMATS = ("jsonl", "parquet", "arrow")
SIDES = ("train", "heldout")
REMOVED = "removed.jsonl"
BATCH = 4096
"""Rows written at once."""


class Prepared(NamedTuple):
    """The result of a preparation: the numbers of rows read and written, and the rows
    left out.
    """

    rows: int
    train: int
    heldout: int
    left_out: LeftOut


class _RowsPerSecond(ProgressColumn):
    """The progress bar's column of rows per second."""

    def render(self, task: ProgressTask) -> Text:
        """Return the column's text."""
        seconds = task.finished_time or task.elapsed or math.inf
        return Text(f"{task.completed / seconds:,.0f} rows/s")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _RowsPerSecond(),
        TimeElapsedColumn(),
        console=console,
    )


def prepare(
    source: str,
    directory: Path,
    read: Reader,
    heldout: int,
    against: Sequence[str],
    form: str,
    console: Console,
) -> Prepared:
    """Write a source's rows to files in this directory, as the module says. heldout:
    the number of rows to hold out. against: evaluation sets. form: one of FORMATS.
    """
    outputs = {directory / f"{side}.{suffix}" for side in SIDES for suffix in FORMATS}
    _check_source(directory, source, outputs)
    with made_directory(directory), _progress(console) as progress, ExitStack() as stack:
        evaluation = overlap_with(against)
        if evaluation is None:
            (directory / REMOVED).unlink(missing_ok=True)  # left by an earlier preparation
        else:
            add_removed = stack.enter_context(_file(directory / REMOVED, RowShape()))

        def removed(row: PromptRow, number: int, hit: Hit) -> None:
            """Write down a row that was found in an evaluation set."""
            add_removed({"number": number, "id": row.id, "prompt": row.prompt, **hit._asdict()})

        rows = progress.track(stream(source), description="reading")
        surveyed = survey(source, read, heldout, evaluation, rows, removed)
        progress.update(progress.task_ids[0], total=len(surveyed.is_kept))
        row_count = int(surveyed.is_kept.sum())
        heldout_count = int(surveyed.is_held_out.sum())
        paths = [directory / f"train.{form}"]
        if heldout_count:
            paths.append(directory / f"heldout.{form}")
        adds = [stack.enter_context(_file(path, surveyed.shape)) for path in paths]
        chosen_rows = progress.track(chosen(surveyed), total=row_count, description="writing")
        for row, is_held_out in chosen_rows:
            add = adds[1] if is_held_out else adds[0]
            add(_as_written(row, surveyed.shape))
    for stale in outputs - set(paths):
        stale.unlink(missing_ok=True)
    prepared = Prepared(
        rows=len(surveyed.is_kept),
        train=row_count - heldout_count,
        heldout=heldout_count,
        left_out=surveyed.left_out,
    )
    _write_report(directory / "report.json", source, prepared, len(evaluation or ()))
    return prepared


def _check_source(directory: Path, source: str, outputs: set[Path]) -> None:
    """Raise MegarlError if the source would be overwritten."""
    written = {path.resolve() for path in (*outputs, directory / REMOVED)}
    if Path(source).resolve() in written:
        raise MegarlError(
            f"{directory}: the source is in this directory and would be overwritten; name another"
            " directory"
        )


def _write_report(path: Path, source: str, prepared: Prepared, evaluation_texts: int) -> None:
    """Write as JSON how many rows were kept and left out, and why. evaluation_texts:
    how many texts they were compared with.
    """
    examples = {}
    for reason, rows in prepared.left_out.first.items():
        examples[reason] = [f"{number}: {fault}" for number, fault in rows]
    report = {
        "source": source,
        "rows": prepared.rows,
        "train": prepared.train,
        "heldout": prepared.heldout,
        "evaluation_texts": evaluation_texts,
        "left_out": dict(prepared.left_out.counts),
        "first": examples,
    }
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _as_written(row: PromptRow, shape: RowShape) -> JsonObject:
    """Return a row in the project's own format. If any row has messages or several
    answers (shape), all have lists of them, because a column of Parquet has one type.
    """
    prompt: Any = row.prompt
    if shape.has_messages:
        prompt = list(row.messages) or [{"role": "user", "content": row.prompt}]
    answer: Any = row.answer
    if shape.has_alternatives:
        answer = list(row.answers)
    return {"id": row.id, "prompt": prompt, "answer": answer, "difficulty": row.difficulty}


@contextmanager
def _file(path: Path, shape: RowShape) -> Iterator[Callable[[JsonObject], None]]:
    """Yield a function that appends a row to the file. The file has another name until
    it is complete, at the end of the block; if the block fails, it is removed.
    """
    part = path.with_name(f".{path.name}.part")
    rows = list[JsonObject]()
    try:
        with _opened(part, path.suffix, shape) as write:

            def add(row: JsonObject) -> None:
                """Append a row; rows are written BATCH at a time."""
                rows.append(row)
                if len(rows) == BATCH:
                    write(rows)
                    rows.clear()

            yield add
            write(rows)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    os.replace(part, path)


@contextmanager
def _opened(
    path: Path, suffix: str, shape: RowShape
) -> Iterator[Callable[[list[JsonObject]], object]]:
    """Yield a function that writes rows: as JSONL, Parquet, or an Arrow stream for
    `datasets`.
    """
    if suffix == ".jsonl":
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            yield lambda rows: file.write(encoder.encode_lines(rows))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    prompt = messages if shape.has_messages else text
    answer = pa.list_(text) if shape.has_alternatives else text
    schema = pa.schema(
        [("id", text), ("prompt", prompt), ("answer", answer), ("difficulty", pa.int64())]
    )
    open_writer = pq.ParquetWriter if suffix == ".parquet" else pa.ipc.new_stream
    with open_writer(str(path), schema) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema))
