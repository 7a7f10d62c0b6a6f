"""The command line. Exit status: 0 well; 1 `verify` found a difference; 2 a message on stderr."""

import argparse
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError

CHECKPOINT = "RUN, RUN/checkpoints (the latest whole one) or RUN/checkpoints/step-N"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # megatron names each optional package that is not installed
    logging.basicConfig(level=logging.ERROR)
    # It says that there is no GPU, and where CUDA is that is not used.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        return _run(options)
    except MegarlError as error:
        print(f"checkpoints_tools: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("checkpoints_tools: stopped; the same command goes on from here", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m checkpoints_tools", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    convert = commands.add_parser("convert", help="a checkpoint into a Hugging Face directory, or back")
    directions = convert.add_subparsers(dest="direction", metavar="DIRECTION", required=True)
    export = directions.add_parser("megatron-to-hf", help="a checkpoint into a Hugging Face directory")
    export.add_argument("source", type=Path, help=CHECKPOINT)
    _destination(export)
    export.add_argument(
        "--base",
        type=Path,
        help="directory with the tensors that are not trained (a vision tower); default: its origin",
    )
    into = directions.add_parser("hf-to-megatron", help="a Hugging Face directory into a checkpoint of weights")
    into.add_argument("source", type=Path, help="Hugging Face directory")
    _destination(into)
    _layout(into)
    into.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="default: that of the source")

    reshard = commands.add_parser("reshard", help="a checkpoint into the shards of another layout, optimiser included")
    reshard.add_argument("source", type=Path, help=CHECKPOINT)
    _destination(reshard)
    _layout(reshard)

    verify = commands.add_parser("verify", help="whether two models, each in either form, are the same")
    verify.add_argument("a", type=Path)
    verify.add_argument("b", type=Path)
    verify.add_argument(
        "--logits", type=_at_least(0), default=0, metavar="N", help="also compare those of N random prompts"
    )

    inspect = commands.add_parser("inspect", help="what a checkpoint or a Hugging Face directory holds")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--tensors", action="store_true", help="a line for every tensor instead of a tree")
    return top


def _destination(command: argparse.ArgumentParser) -> None:
    command.add_argument("destination", type=Path, help="must not exist; a killed conversion is continued")


def _layout(command: argparse.ArgumentParser) -> None:
    for option, what in (("--tp", "tensor"), ("--pp", "pipeline"), ("--ep", "expert")):
        command.add_argument(option, type=_at_least(1), default=1, metavar="N", help=f"{what} parallelism; default 1")


def _at_least(least: int) -> "type[int]":
    def count(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    return count  # type: ignore[return-value]


def _run(options: argparse.Namespace) -> int:
    # Imported here: --help answers at once, without torch.
    if options.command == "inspect":
        from checkpoints_tools.inspect import inspect

        inspect(options.directory, options.tensors)
        return 0
    if options.command == "verify":
        from checkpoints_tools.verify import verify

        return verify(options.a, options.b, options.logits)
    from checkpoints_tools import convert
    from checkpoints_tools.layout import Layout

    if options.command == "convert" and options.direction == "megatron-to-hf":
        convert.megatron_to_hf(options.source, options.destination, options.base)
        return 0
    layout = Layout(options.tp, options.pp, options.ep)
    if options.command == "reshard":
        convert.reshard(options.source, options.destination, layout)
    else:
        convert.hf_to_megatron(options.source, options.destination, layout, options.dtype)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # … inspect RUN | head
    sys.exit(main())
