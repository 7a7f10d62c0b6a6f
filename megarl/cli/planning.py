"""Arguments of `megarl plan`; what it does is in command.py, so that `megarl --help` imports none of it."""

import argparse
from pathlib import Path

from megarl.cli.commands import at_least


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Of `megarl plan`, behind the recipe and its overrides."""
    command.add_argument(
        "--gpus", type=at_least(1), required=True, help="how many there are, generators and trainers together"
    )
    command.add_argument("--gpu", required=True, help="which: a name in megarl/planning/hardware.yaml, such as h100")
    command.add_argument(
        "--model-config", metavar="FILE", help="config.json, or a name such as llama-3.1-8b; else that of model.path"
    )
    command.add_argument("--mean-tokens", type=float, help="mean length of a completion; else half of the longest")
    command.add_argument("--spread", type=float, default=0.5, help="deviation of the lengths' logarithm (default 0.5)")
    command.add_argument("--lengths", type=Path, metavar="RUN", help="lengths of this run's journal instead")
    command.add_argument(
        "--trained-share", type=float, default=1.0, help="of the groups, those with variance (default 1)"
    )
    command.add_argument("--simulate", action="store_true", help="run the pipeline in virtual time, and draw it")
    command.add_argument("--steps", type=at_least(1), default=20, help="of --simulate (default 20)")
    command.add_argument("--out", type=Path, default=Path("plan.png"), help="picture of --simulate (default plan.png)")
    command.add_argument("--json", action="store_true", help="all of it as JSON")
