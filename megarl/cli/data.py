"""The commands of `megarl data`. Everything that is slow to import is imported when a
command runs.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from megarl.cli import parameters as p
from megarl.core.base import terminal

app = typer.Typer(name="data", help="Look at prompt sets, prepare them, make the quickstart's.")


@app.command()
def inspect(
    source: Annotated[
        str,
        Argument(
            help="prompts or traces (a file, hub:…) or a recipe", autocompletion=p.recipe_names
        ),
    ],
    overrides: p.Overrides,
    column: p.Column,
    mapping: p.Mapping = "",
    tokenizer: Annotated[
        Path | None, Option(help="count tokens with the tokenizer of this model")
    ] = None,
    samples: Annotated[int, Option(min=0, help="rows shown of each set")] = 3,
) -> int:
    """Show lengths, difficulties, answer types and samples."""
    from megarl.tools.inspection.data import inspect

    return inspect(source, overrides, column, mapping, tokenizer, samples)


@app.command()
def prepare(
    source: Annotated[
        str,
        Argument(metavar="SOURCE", help="a file, pattern, folder, or hub:ORG/NAME:CONFIG:SPLIT"),
    ],
    output: Annotated[
        Path, Argument(metavar="DIR", help="folder for train, heldout, report.json, removed.jsonl")
    ],
    column: p.Column,
    against: Annotated[list[str], p.repeated("SOURCE", "evaluation set whose prompts are removed")],
    mapping: p.Mapping = "",
    heldout: Annotated[
        int, Option(min=0, metavar="N", help="rows to hold out, chosen by hash")
    ] = 0,
    form: Annotated[
        Literal["jsonl", "parquet", "arrow"], Option("--format", help="format of the files")
    ] = "jsonl",
) -> int:
    """Clean, split and decontaminate a source into the project's own rows."""

    from megarl.tasks.data.prepare import prepare
    from megarl.tools.inspection.data import reader

    console = terminal.console()
    done = prepare(source, output, reader(mapping, column), heldout, against, form, console)
    text = f"{output}: {done.train:,} to train on, {done.heldout:,} held out, of {done.rows:,} rows"
    console.print(text, soft_wrap=True)
    for reason, count in done.left_out.counts.most_common():
        number, problem = done.left_out.first[reason][0]
        line = f"  {count:,} left out ({reason}), the first: {source}:{number}: {problem[:120]}"
        console.print(line, markup=False, soft_wrap=True)
    return 0


@app.command()
def arithmetic(directory: Path, seed: Annotated[int, Option(min=0)] = 0) -> int:
    """Make the quickstart's task, tokenizer and untrained model."""
    from megarl.tasks.data.arithmetic import main

    return main(directory, seed)
