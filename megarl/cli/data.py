"""`megarl data`: arguments in, files and views out. Everything heavy is imported when a command runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cli.commands import Commands, add_command, add_group, at_least
from megarl.core.base.errors import MegarlError

if TYPE_CHECKING:
    from rich.console import Console

    from megarl.core.base.tokenizer import Tokenizer
    from megarl.core.recipe import Recipe
    from megarl.tasks.data.survey import Reader

MAPPING_HELP = (
    "published set whose columns it has: polaris, deepscaler, dapo-math-17k, deepcoder, gsm8k, math, livecodebench, "
    "humaneval, mbpp"
)


def add(commands: Commands) -> None:
    """The subcommand `data` and its own."""
    inner = add_group(commands, "data", "look at prompt sets, prepare them, make the quickstart's")

    look = add_command(inner, "inspect", _inspect, "lengths, difficulties, answer types and samples")
    look.add_argument(
        "what", metavar="SOURCE_OR_RECIPE", help="a file of prompts or traces, hub:…, or a recipe: all it has"
    )
    look.add_argument("overrides", nargs="*", metavar="key=value", help="of a recipe")
    _columns(look)
    look.add_argument("--tokenizer", type=Path, metavar="DIR", help="count tokens with that of this model directory")
    look.add_argument("--samples", type=at_least(0), default=3, help="rows shown of each set (default 3)")

    make = add_command(
        inner, "prepare", _prepare, "clean, split and decontaminate a source into the project's own rows"
    )
    make.add_argument("source", metavar="SOURCE", help="JSONL, JSON, Parquet or Arrow, or hub:ORG/NAME:CONFIG:SPLIT")
    make.add_argument("out", type=Path, metavar="DIR", help="gets train, heldout, report.json, removed.jsonl")
    _columns(make)
    make.add_argument("--heldout", type=int, default=0, metavar="N", help="rows to hold out, chosen by hash")
    make.add_argument(
        "--against", action="append", default=[], metavar="SOURCE",
        help="evaluation set whose prompts are removed; may be given several times",
    )  # fmt: skip
    make.add_argument("--format", choices=("jsonl", "parquet", "arrow"), default="jsonl")

    sums = add_command(inner, "arithmetic", _arithmetic, "the quickstart's task, tokenizer and untrained model")
    sums.add_argument("directory", type=Path)
    sums.add_argument("--seed", type=at_least(0), default=0)


def _columns(command: argparse.ArgumentParser) -> None:
    command.add_argument("--mapping", default="", metavar="SET", help=MAPPING_HELP)
    command.add_argument(
        "--column", action="append", default=[], metavar="FIELD=COLUMN",
        help="column of prompt, answer, difficulty or id, such as prompt=problem; may be given several times",
    )  # fmt: skip


def _reader(mapping: str, columns: Sequence[str]) -> "Reader":
    from megarl.core.recipe import Columns
    from megarl.tasks.data.mappings import MAPPINGS, mapping_of

    if mapping and mapping not in MAPPINGS:
        raise MegarlError(f"--mapping: {mapping!r} is none of {', '.join(MAPPINGS)}")
    given = dict(column.partition("=")[::2] for column in columns)
    for field, path in given.items():
        if field not in Columns.model_fields or not path:
            raise MegarlError(f"--column: write FIELD=COLUMN, with a field of {', '.join(Columns.model_fields)}")
    return mapping_of(mapping, given)


def _prepare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megarl.tasks.data.prepare import prepare

    if options.heldout < 0:
        raise MegarlError(f"--heldout: {options.heldout} rows cannot be held out")
    console = Console()
    read = _reader(options.mapping, options.column)
    done = prepare(options.source, options.out, read, options.heldout, options.against, options.format, console)
    console.print(
        f"{options.out}: {done.train:,} to train on, {done.heldout:,} held out, of {done.rows:,} rows", soft_wrap=True
    )
    for reason, count in done.left_out.counts.most_common():
        number, what = done.left_out.first[reason][0]
        line = f"  {count:,} left out ({reason}), the first: {options.source}:{number}: {what[:120]}"
        console.print(line, markup=False, soft_wrap=True)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from megarl.core.recipe import load
    from megarl.tasks.data.sources import is_source

    if is_source(options.what):
        return _inspect_source(options)
    if options.mapping or options.column:
        raise MegarlError("--mapping, --column: of a recipe its tasks say them (data.tasks.NAME.mapping, .columns)")
    return _inspect_recipe(load(options.what, options.overrides), options)


def _inspect_source(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.lab.inspection.data import look, show, show_left_out
    from megarl.tasks.data.survey import survey
    from megarl.tasks.data.traces import are_traces

    console, tokenizer = Console(), load_tokenizer(options.tokenizer) if options.tokenizer else None
    if not options.mapping and not options.column and are_traces(options.what):
        _inspect_traces(options.what, tokenizer, options.samples, None, [], console)
        return 0
    found = survey(options.what, _reader(options.mapping, options.column))
    show_left_out(found, console)
    seen, _ = look(found, str, tokenizer, options.samples)
    show(options.what, seen, console, "tokens" if tokenizer else "characters", None, str)
    return 0


def _inspect_recipe(recipe: "Recipe", options: argparse.Namespace) -> int:
    """Each task as a run of the recipe would have it: its template around, its evaluation sets removed."""
    from rich.console import Console

    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.lab.inspection.data import look, show, show_left_out
    from megarl.tasks.data.contamination import overlap_with
    from megarl.tasks.data.mappings import mapping_of
    from megarl.tasks.data.prompts import renderer
    from megarl.tasks.data.sources import problem
    from megarl.tasks.data.survey import survey

    console, tokenizer = Console(), load_tokenizer(options.tokenizer or recipe.model.path)
    evaluation = overlap_with(recipe.data.decontaminate)
    for name, task in recipe.data.tasks.items():
        read, render = mapping_of(task.mapping, task.columns.model_dump()), renderer(task, tokenizer)
        split = task.heldout if isinstance(task.heldout, int) else 0
        found = survey(task.train, read, split, evaluation)
        show_left_out(found, console)
        train, heldout = look(found, render, tokenizer, options.samples)
        if isinstance(task.heldout, str):
            apart = survey(task.heldout, read)
            show_left_out(apart, console)
            heldout, _ = look(apart, render, tokenizer, options.samples)
        for part, seen in (("train", train), ("heldout", heldout)):
            show(f"{name}.{part}", seen, console, "tokens", recipe.length.prompt_tokens, render)
    if recipe.sft.data and problem(recipe.sft.data) is None:
        _inspect_traces(
            recipe.sft.data, tokenizer, options.samples, recipe.sft.max_length, recipe.data.decontaminate, console
        )
    return 0


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


def _arithmetic(options: argparse.Namespace) -> int:
    from megarl.tasks.data.arithmetic import main as arithmetic

    return arithmetic(options.directory, options.seed)
