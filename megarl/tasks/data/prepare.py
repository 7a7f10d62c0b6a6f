"""`megarl data prepare`: turn any source into files of the project's own rows, cleaned,
split, decontaminated, streamed.

    OUT/train.jsonl        RL prompts                    OUT/report.json     counts, and which rows were left out and why
    OUT/heldout.jsonl      prompts never trained on      OUT/removed.jsonl   each row found in an evaluation set, with the match

The source is read twice, by survey.py and by the writers; memory holds 35 bytes per
row, however large the rows are. Rows keep the source's order, since drawing prompts
shuffles them in each epoch. Files appear complete or not at all.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

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
from megarl.core.base.rundir import write_atomically
from megarl.core.base.types import JsonObject
from megarl.tasks.data.contamination import Hit, overlap_with
from megarl.tasks.data.rows import PromptRow
from megarl.tasks.data.sources import stream
from megarl.tasks.data.survey import LeftOut, Reader, RowShape, chosen, survey

FORMATS = ("jsonl", "parquet", "arrow")
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
        return Text(
            f"{task.completed / (task.finished_time or task.elapsed or math.inf):,.0f} rows/s"
        )


def prepare(
    source: str,
    out: Path,
    read: Reader,
    heldout: int,
    against: Sequence[str],
    form: str,
    console: Console,
) -> Prepared:
    outputs = {out / f"{side}.{form}" for side in ("train", "heldout") for form in FORMATS}
    if Path(source).resolve() in {path.resolve() for path in (*outputs, out / "removed.jsonl")}:
        raise MegarlError(
            f"{out}: the source is in this directory and would be overwritten; name another"
            " directory"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MegarlError(f"{out}: cannot make this directory: {error.strerror}") from None
    evaluation = overlap_with(against)
    bars = (
        TextColumn("{task.description:>8}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _RowsPerSecond(),
        TimeElapsedColumn(),
    )
    with Progress(*bars, console=console) as progress, ExitStack() as stack:
        if evaluation is None:
            (out / "removed.jsonl").unlink(missing_ok=True)  # left by an earlier preparation
        else:
            add_removed = stack.enter_context(_file(out / "removed.jsonl", RowShape()))

        def removed(row: PromptRow, number: int, hit: Hit) -> None:
            add_removed({"number": number, "id": row.id, "prompt": row.prompt, **hit._asdict()})

        rows = progress.track(stream(source), description="reading")
        surveyed = survey(source, read, heldout, evaluation, rows, removed)
        progress.update(progress.task_ids[0], total=len(surveyed.kept))
        kept = int(surveyed.kept.sum())
        held = int(surveyed.heldout.sum())
        paths = [out / f"{side}.{form}" for side in ("train", "heldout")[: 2 if held else 1]]
        adds = [stack.enter_context(_file(path, surveyed.shape)) for path in paths]
        for row, is_held in progress.track(chosen(surveyed), total=kept, description="writing"):
            adds[is_held](_as_written(row, surveyed.shape))
    for stale in outputs - set(paths):
        stale.unlink(missing_ok=True)
    left_out = surveyed.left_out
    report = {
        "source": source,
        "rows": len(surveyed.kept),
        "train": kept - held,
        "heldout": held,
        "evaluation_texts": len(evaluation or ()),
        "left_out": dict(left_out.counts),
        "first": {
            name: [f"{number}: {what}" for number, what in first]
            for name, first in left_out.first.items()
        },
    }
    write_atomically(out / "report.json", msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return Prepared(len(surveyed.kept), kept - held, held, left_out)


def _as_written(row: PromptRow, shape: RowShape) -> JsonObject:
    """Return a row in the project's own format, each column with the type that it has
    in all rows.
    """
    messages = row.messages or ({"role": "user", "content": row.prompt},)
    return {
        "id": row.id,
        "prompt": list(messages) if shape.has_messages else row.prompt,
        "answer": list(row.answers) if shape.has_alternatives else row.answer,
        "difficulty": row.difficulty,
    }


@contextmanager
def _file(path: Path, shape: RowShape) -> Iterator[Callable[[JsonObject], None]]:
    """Yield a function that appends a row to the file. The file has another name until
    it is complete.
    """
    part = path.with_name(f".{path.name}.part")
    rows = list[JsonObject]()
    try:
        with _opened(part, path.suffix, shape) as write:

            def add(row: JsonObject) -> None:
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
    with (pq.ParquetWriter if suffix == ".parquet" else pa.ipc.new_stream)(
        str(path), schema
    ) as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema))
