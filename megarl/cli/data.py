"""`megarl data`: arguments in, files and views out. Everything heavy is imported when a command runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer
from typer import Argument, Option

from megarl.cli import parameters as p
from megarl.core.base.errors import MegarlError

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.core.base.tokenizer import Tokenizer
    from megarl.core.recipe import Recipe
    from megarl.tasks.data.survey import Reader

app = typer.Typer(name="data", help="Look at prompt sets, prepare them, make the quickstart's.")


@app.command()
def inspect(
    source: Annotated[
        str, Argument(help="prompts or traces: a file or hub:…; or a recipe", autocompletion=p.recipe_names)
    ],
    overrides: p.Overrides,
    column: p.Column,
    mapping: p.Mapping = "",
    tokenizer: Annotated[Path | None, Option(help="count tokens with that of this model directory")] = None,
    samples: Annotated[int, Option(min=0, help="rows shown of each set")] = 3,
) -> int:
    """Lengths, difficulties, answer types and samples."""
    from rich.console import Console

    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.core.recipe import load
    from megarl.lab.inspection.data import look, show, show_left_out
    from megarl.tasks.data.sources import is_source
    from megarl.tasks.data.survey import survey
    from megarl.tasks.data.traces import are_traces

    if not is_source(source):
        if mapping or column:
            raise MegarlError("--mapping, --column: of a recipe its tasks say them (data.tasks.NAME.mapping, .columns)")
        _inspect_recipe(load(source, overrides), tokenizer, samples)
        return 0
    console, counter = Console(), load_tokenizer(tokenizer) if tokenizer else None
    if not mapping and not column and are_traces(source):
        _inspect_traces(source, counter, samples, None, [], console)
        return 0
    found = survey(source, _reader(mapping, column))
    show_left_out(found, console)
    seen, _ = look(found, str, counter, samples)
    show(source, seen, console, "tokens" if counter else "characters", None, str)
    return 0


@app.command()
def prepare(
    source: Annotated[str, Argument(metavar="SOURCE", help="JSONL, JSON, Parquet or Arrow, or hub:ORG/NAME:CONFIG:SPLIT")],
    out: Annotated[Path, Argument(metavar="DIR", help="gets train, heldout, report.json, removed.jsonl")],
    column: p.Column,
    against: Annotated[list[str], p.repeated("SOURCE", "evaluation set whose prompts are removed")],
    mapping: p.Mapping = "",
    heldout: Annotated[int, Option(min=0, metavar="N", help="rows to hold out, chosen by hash")] = 0,
    form: Annotated[Literal["jsonl", "parquet", "arrow"], Option("--format", help="of the files")] = "jsonl",
) -> int:  # fmt: skip
    """Clean, split and decontaminate a source into the project's own rows."""
    from rich.console import Console

    from megarl.tasks.data.prepare import prepare

    console = Console()
    done = prepare(source, out, _reader(mapping, column), heldout, against, form, console)
    console.print(
        f"{out}: {done.train:,} to train on, {done.heldout:,} held out, of {done.rows:,} rows", soft_wrap=True
    )
    for reason, count in done.left_out.counts.most_common():
        number, what = done.left_out.first[reason][0]
        line = f"  {count:,} left out ({reason}), the first: {source}:{number}: {what[:120]}"
        console.print(line, markup=False, soft_wrap=True)
    return 0


@app.command()
def arithmetic(directory: Path, seed: Annotated[int, Option(min=0)] = 0) -> int:
    """The quickstart's task, tokenizer and untrained model."""
    from megarl.tasks.data.arithmetic import main

    return main(directory, seed)


def _reader(mapping: str, columns: Sequence[str]) -> "Reader":
    from megarl.core.recipe import ColumnName
    from megarl.tasks.data.mappings import MAPPINGS, mapping_of

    if mapping and mapping not in MAPPINGS:
        raise MegarlError(f"--mapping: {mapping!r} is none of {', '.join(MAPPINGS)}")
    given = dict(column.partition("=")[::2] for column in columns)
    for field, path in given.items():
        if field not in get_args(ColumnName) or not path:
            raise MegarlError(f"--column: write FIELD=COLUMN, with a field of {', '.join(get_args(ColumnName))}")
    return mapping_of(mapping, cast(dict[ColumnName, str], given))


def _inspect_recipe(recipe: "Recipe", tokenizer_of: Path | None, samples: int) -> None:
    """Each task as a run of the recipe would have it: its template around, its evaluation sets removed."""
    from rich.console import Console

    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.lab.inspection.data import look, show, show_left_out
    from megarl.tasks.data.contamination import overlap_with
    from megarl.tasks.data.mappings import mapping_of
    from megarl.tasks.data.prompts import renderer
    from megarl.tasks.data.sources import problem
    from megarl.tasks.data.survey import survey

    console, tokenizer = Console(), load_tokenizer(tokenizer_of or recipe.model.path)
    evaluation = overlap_with(recipe.data.decontaminate)
    for name, task in recipe.data.tasks.items():
        read, render = mapping_of(task.mapping, task.columns), renderer(task, tokenizer)
        split = task.heldout if isinstance(task.heldout, int) else 0
        found = survey(task.train, read, split, evaluation)
        show_left_out(found, console)
        train, heldout = look(found, render, tokenizer, samples)
        if isinstance(task.heldout, str):
            apart = survey(task.heldout, read)
            show_left_out(apart, console)
            heldout, _ = look(apart, render, tokenizer, samples)
        for part, seen in (("train", train), ("heldout", heldout)):
            show(f"{name}.{part}", seen, console, "tokens", recipe.length.prompt_tokens, render)
    if recipe.sft.data and problem(recipe.sft.data) is None:
        _inspect_traces(recipe.sft.data, tokenizer, samples, recipe.sft.max_length, recipe.data.decontaminate, console)


def _inspect_traces(
    source: str,
    tokenizer: "Tokenizer | None",
    samples: int,
    limit: int | None,
    decontaminate: Sequence[str],
    console: "Console",
) -> None:
    """As `megarl sft` would have them. limit: sft.max_length."""
    from megarl.lab.inspection.data import look_at_traces, show_left_out, show_traces
    from megarl.tasks.data.contamination import overlap_with
    from megarl.tasks.data.survey import survey
    from megarl.tasks.data.traces import spoken, trace_key

    found = survey(source, spoken, evaluation=overlap_with(decontaminate), several=trace_key)
    show_left_out(found, console)
    seen = look_at_traces(found, tokenizer, samples)
    show_traces(source, seen, console, "tokens" if tokenizer else "characters", limit)
