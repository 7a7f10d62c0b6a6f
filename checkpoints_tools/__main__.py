"""The command line. Exit status: 0 success; 1 `verify` found a difference; 2 a message
on stderr.

Each command imports its part when it runs, so that --help answers at once, without
torch.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from checkpoints_tools import silence_libraries
from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import importing

INTERRUPTED = 130
CheckpointPath = Annotated[
    Path,
    Argument(
        help=(
            "RUN (its latest checkpoint), RUN@STEP, RUN@best (the highest held-out score), or a"
            " folder step-N"
        )
    ),
]
Destination = Annotated[Path, Argument(help="must not exist; a killed conversion is continued")]
TensorParallel = Annotated[int, Option("--tp", min=1, metavar="N", help="tensor parallelism")]
PipelineParallel = Annotated[int, Option("--pp", min=1, metavar="N", help="pipeline parallelism")]
ExpertParallel = Annotated[int, Option("--ep", min=1, metavar="N", help="expert parallelism")]

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
conversion = typer.Typer(
    name="convert", help="Convert a checkpoint into a Hugging Face directory, or back."
)
app.add_typer(conversion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. arguments: None for sys.argv's."""
    silence_libraries()
    try:
        status: int = (
            app(arguments, prog_name="python -m checkpoints_tools", standalone_mode=False) or 0
        )
        if status != INTERRUPTED:  # what typer returns after Ctrl-C
            return status
        message = "stopped; the same command continues from here"
    except MegarlError as error:
        message = str(error)
    except typer.TyperException as error:
        message = error.format_message()
    terminal.say(f"checkpoints_tools: {message}", file=sys.stderr)
    return 2


@conversion.command()
def megatron_to_hf(
    source: CheckpointPath,
    destination: Destination,
    base: Annotated[
        Path | None,
        Option(
            help=(
                "directory with the tensors that are not trained (a vision tower); default: its"
                " origin"
            )
        ),
    ] = None,
) -> None:
    """Convert a checkpoint into a Hugging Face directory."""
    with importing():
        from checkpoints_tools import convert

    convert.megatron_to_hf(source, destination, base)


@conversion.command()
def hf_to_megatron(
    source: Annotated[Path, Argument(help="Hugging Face directory")],
    destination: Destination,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    ep: ExpertParallel = 1,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, Option(help="default: that of the source")
    ] = None,
) -> None:
    """Convert a Hugging Face directory into a checkpoint of weights."""
    with importing():
        from checkpoints_tools import convert

    convert.hf_to_megatron(source, destination, convert.Parallelism(tp, pp, ep), dtype)


@app.command()
def dequantize(
    source: Annotated[
        Path, Argument(help="Hugging Face directory in FP8 with block scales, or in MXFP4")
    ],
    destination: Destination,
) -> None:
    """Write a quantised Hugging Face directory in bf16, for learner and servers."""
    with importing():
        from checkpoints_tools import quantized

    quantized.dequantize(source, destination)


@app.command()
def import_gguf(
    source: Annotated[Path, Argument(help="GGUF file, or a directory with one")],
    destination: Annotated[Path, Argument(help="must not exist")],
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Option(help="precision to write")] = "bf16",
) -> None:
    """Make a Hugging Face directory of a GGUF file."""
    with importing():
        from checkpoints_tools import gguf_import

    gguf_import.import_gguf(source, destination, dtype)


@app.command()
def reshard(
    source: CheckpointPath,
    destination: Destination,
    tp: TensorParallel = 1,
    pp: PipelineParallel = 1,
    ep: ExpertParallel = 1,
) -> None:
    """Write a checkpoint in the shards of another layout, optimiser included."""
    with importing():
        from checkpoints_tools import convert

    convert.reshard(source, destination, convert.Parallelism(tp, pp, ep))


@app.command()
def verify(
    a: Path,
    b: Path,
    logits: Annotated[
        int, Option(min=0, metavar="N", help="compare logits of N random prompts")
    ] = 0,
) -> int:
    """Compare two models, each in either form."""
    with importing():
        from checkpoints_tools.verify import verify

    return verify(a, b, logits)


@app.command()
def inspect(
    directory: Path,
    tensors: Annotated[
        bool, Option("--tensors", help="a line for every tensor instead of the tree")
    ] = False,
) -> None:
    """Show what a checkpoint or a Hugging Face directory holds."""
    with importing():
        from checkpoints_tools.inspect import inspect

    inspect(directory, tensors)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # … inspect RUN | head
    sys.exit(main())
