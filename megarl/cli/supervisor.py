"""Arguments of `megarl submit`, `megarl status` and `megarl logs`; what they do is imported when they run."""

import argparse
from pathlib import Path

from megarl.cli.commands import Commands, add_command, add_recipe_command, at_least


def add(commands: Commands) -> None:
    """The three."""
    submit = add_recipe_command(commands, "submit", _submit, "write a Slurm batch script for a recipe, and submit it")
    submit.add_argument("--nodes", type=at_least(1), required=True)
    submit.add_argument("--gpus-per-node", type=at_least(0), default=8, help="default 8; 0: nodes without GPUs")
    submit.add_argument(
        "--gpu", default="", help="a name of `megarl plan`: adds its figures, and its layout if need be"
    )
    submit.add_argument("--model-config", metavar="FILE", help="as of `megarl plan`; else that of model.path")
    submit.add_argument("--time", default="24:00:00", help="limit of the job, after which it goes on as a new one")
    submit.add_argument("--partition")
    submit.add_argument("--account")
    submit.add_argument("--container", choices=("none", "pyxis", "apptainer"), default="none")
    submit.add_argument("--image", default="", help="of the container")
    submit.add_argument("--mounts", default="", metavar="A,B", help="folders that the container sees")
    submit.add_argument("--out", type=Path, metavar="FILE", help="the script (default run.dir/run.name.sbatch)")
    submit.add_argument("--yes", action="store_true", help="submit it")

    status = add_command(commands, "status", _status, "how a run stands, from any terminal, also after its end")
    status.add_argument("run", type=Path, help="run directory")

    logs = add_command(commands, "logs", _logs, "what the processes of a run wrote")
    logs.add_argument("run", type=Path, help="run directory")
    logs.add_argument(
        "--role",
        default="learner-0",
        help="server, server-3, learner, learner-0 (its first rank: default), controller or supervisor",
    )
    logs.add_argument("-n", type=at_least(1), default=20, metavar="LINES", help="of each file (default 20)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")


def _submit(options: argparse.Namespace) -> int:
    from megarl.lab.submit import main as submit

    return submit(options)


def _status(options: argparse.Namespace) -> int:
    from megarl.run.status import main as status

    return status(options.run)


def _logs(options: argparse.Namespace) -> int:
    from megarl.run.logs import main as logs

    return logs(options.run, options.role, options.n, options.follow)
