"""The command line. Exit status: 0 well; 1 `verify` found a difference; 2 a message on stderr."""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import MegarlError


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # megatron names each optional package that is not installed
    logging.basicConfig(level=logging.ERROR)
    try:
        return _run(options)
    except MegarlError as error:
        print(f"checkpoints_tools: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m checkpoints_tools", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    convert = commands.add_parser("convert", help="a learner's checkpoint into a Hugging Face directory, or back")
    convert.add_argument("direction", choices=["megatron-to-hf", "hf-to-megatron"])
    convert.add_argument(
        "source", type=Path, help="RUN, RUN/checkpoints, RUN/checkpoints/step-N; or a Hugging Face directory"
    )
    convert.add_argument("destination", type=Path, help="must not exist")

    verify = commands.add_parser("verify", help="whether two models, each in either form, have the same weights")
    verify.add_argument("a", type=Path)
    verify.add_argument("b", type=Path)

    inspect = commands.add_parser("inspect", help="what a checkpoint or a Hugging Face directory holds")
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    return top


def _run(options: argparse.Namespace) -> int:
    # Imported here: --help answers at once, without torch.
    if options.command == "convert":
        from checkpoints_tools.convert import hf_to_megatron, megatron_to_hf

        convert = megatron_to_hf if options.direction == "megatron-to-hf" else hf_to_megatron
        convert(options.source, options.destination)
        return 0
    if options.command == "verify":
        from checkpoints_tools.verify import verify

        return verify(options.a, options.b)
    from checkpoints_tools.inspect import inspect

    inspect(options.directory, options.tensors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
