"""The command line: every subcommand, thin. Each imports its part when it runs, so that `megarl --help` answers at once.

roles.py       the roles with the tasks and the forecast that they are given
commands.py    how subcommands are declared
data.py, evaluation.py, planning.py, scaling.py, supervisor.py   subcommands of each part
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import __version__
from megarl.cli import data, evaluation, planning, scaling, supervisor
from megarl.cli.commands import add_command, add_group, add_recipe_command, at_least
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import die_with_supervisor, have_streams

if TYPE_CHECKING:
    from megarl.core.recipe import Recipe
    from megarl.lab.study.main import Options as StudyOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 well; 1 failed; 2 a message for the user on stderr; 130 interrupted."""
    have_streams()
    die_with_supervisor()
    options = _parsed(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()
        return status
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `megarl recipes show x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """argparse ends a list of positionals at the first option: overrides behind `--dry-run` are put back to the others."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(word.startswith("-") for word in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def parser() -> argparse.ArgumentParser:
    """All subcommands; `command` of the parsed options runs the chosen one."""
    top = argparse.ArgumentParser(prog="megarl", description="Reinforcement learning with Megatron-Core and SGLang.")
    top.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    train = add_recipe_command(commands, "train", _train, "train a policy: start, watch and restart all roles")
    train.add_argument("--dry-run", action="store_true", help="print the resolved recipe and start nothing")
    train.add_argument(
        "--plan",
        metavar="GPU",
        help="divide this machine's GPUs as `megarl plan --gpu GPU` does best: servers, learner, layout",
    )
    sft = add_recipe_command(commands, "sft", _sft, "supervised warm start with the same learner")
    sft.add_argument("--dry-run", action="store_true", help="print the resolved recipe and start nothing")

    serve = add_recipe_command(commands, "serve", _serve, "role: one SGLang server")
    serve.add_argument("--index", type=at_least(0), required=True, help="which of the recipe's servers this is, from 0")
    serve.add_argument("--port", type=at_least(1, 65_535), required=True)
    add_recipe_command(commands, "rollout", _rollout, "role: the controller")
    add_recipe_command(commands, "learn", _learn, "role: the learner")

    recipes = add_command(commands, "recipes", _recipes, "the recipes that come with megarl")
    shown = recipes.add_subparsers(metavar="show NAME")
    show = add_command(shown, "show", _recipes_show, "a recipe, resolved, with what each key means")
    show.add_argument("recipe", help="name or file")
    show.add_argument("overrides", nargs="*", metavar="key=value")
    suggest = add_command(
        shown, "suggest", _recipes_suggest, "a recipe for a model of yours, with numbers for its size"
    )
    suggest.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory with weights")
    suggest.add_argument(
        "--preset", choices=("scalerl", "ppo"), default="scalerl", help="whose numbers (default: scalerl)"
    )

    about = "variants of a recipe, several seeds each, compared by their scaling curves"
    studies = add_group(commands, "study", about, "loo | compare | results")
    loo = add_command(
        studies, "loo", _study_loo, "leave-one-out: a recipe, and variants of it that revert one ScaleRL component each"
    )
    loo.add_argument("recipe", help="name of a recipe or a YAML file")
    loo.add_argument("--with", dest="beside", default="", metavar="A,B", help="more recipes to run beside the variants")
    compare = add_command(studies, "compare", _study_compare, "several recipes")
    compare.add_argument(
        "recipes", nargs="+", metavar="recipe", help="names or YAML files; then key=value for all of them"
    )
    compare.set_defaults(overrides=[])
    for one in (loo, compare):
        one.add_argument("--seeds", default="0,1,2", help="of run.seed (default 0,1,2)")
        one.add_argument("--dir", default="", help="the study's directory (default runs/studies/KIND-RECIPE)")
        one.add_argument(
            "--task", type=at_least(0), help="run this one alone, such as $SLURM_ARRAY_TASK_ID, and make no table"
        )
        one.add_argument("--dry-run", action="store_true", help="show the variants and start nothing")
    loo.add_argument("overrides", nargs="*", metavar="key=value", help="for all runs, such as run.steps=80")
    of_study = add_command(
        studies, "results", _study_results, "table, plots and CSVs of a study, also of an unfinished one"
    )
    of_study.add_argument("directory", type=Path)

    looked = add_group(commands, "rollouts", "the journal of a run", "show RUN")
    from_journal = add_command(looked, "show", _rollouts_show, "what the policy wrote, also while the run lives")
    from_journal.add_argument("run", type=Path, help="run directory")
    from_journal.add_argument("--ticket", type=at_least(0), help="all rollouts of this ticket, token by token")
    from_journal.add_argument("--step", type=at_least(0), help="the groups that this step trains")
    from_journal.add_argument("--limit", type=at_least(1), default=20, help="how many groups, or rollouts of a ticket")
    from_journal.add_argument("--json", action="store_true", help="one group a line")

    data.add(commands)
    evaluation.add(commands)
    scaling.add(commands)
    supervisor.add(commands)

    report = add_command(commands, "report", _report, "write report.html and reward.png of a run anew")
    report.add_argument("run", type=Path, help="run directory")
    traced = add_command(
        commands, "trace", _trace, "where the time of a run's last steps went, for Perfetto; also while it runs"
    )
    traced.add_argument("run", type=Path, help="run directory")
    traced.add_argument("--steps", type=at_least(1), default=20, metavar="N", help="the last N (default 20)")
    traced.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON, compressed if it ends in .gz (RUN/trace.json.gz)"
    )
    plan = add_recipe_command(commands, "plan", _plan, "what a recipe needs on N GPUs, and how fast it will be")
    planning.add_arguments(plan)
    add_command(commands, "doctor", _doctor, "what this machine can run, and what to do about what it cannot")
    return top


def _load(options: argparse.Namespace) -> "Recipe":
    from megarl.core.recipe import load

    return load(options.recipe, options.overrides)


def _dry_run(recipe: "Recipe", checked: Callable[["Recipe"], str]) -> int:
    """The resolved recipe on stdout; on stderr that it is ready, or what keeps it from starting, and then the status is 2."""
    from megarl.core.recipe import dump

    print(dump(recipe), end="")
    try:
        print(f"ready: {checked(recipe)}", file=sys.stderr)
    except MegarlError as error:
        print(f"megarl: before this can start: {error}", file=sys.stderr)
        return 2
    return 0


def _train(options: argparse.Namespace) -> int:
    from megarl.lab import preflight

    if options.plan is None:
        recipe = _load(options)
    else:
        from megarl.lab.planning.command import planned

        recipe = planned(options.recipe, options.overrides, options.plan)
    if options.dry_run:
        return _dry_run(recipe, preflight.check_all)
    from megarl.cli import roles

    return roles.train(recipe)


def _sft(options: argparse.Namespace) -> int:
    from megarl.lab import preflight

    recipe = _load(options)
    if options.dry_run:
        return _dry_run(recipe, preflight.check_sft)
    preflight.check_sft(recipe)
    from megarl.lab.sft import main as sft

    return sft(recipe)


def _serve(options: argparse.Namespace) -> int:
    from megarl.core.server.launch import main as serve

    recipe = _load(options)
    last = recipe.resources.servers - 1
    if options.index > last:
        raise MegarlError(f"--index: {options.index}, and the recipe's servers are numbered from 0 to {last}")
    serve(recipe, options.index, options.port)
    return 0


def _rollout(options: argparse.Namespace) -> int:
    from megarl.cli import roles

    return roles.rollout(_load(options))


def _learn(options: argparse.Namespace) -> int:
    from megarl.core.learner.main import main as learn

    return learn(_load(options))


def _recipes(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from megarl.core.recipe import load, shipped
    from megarl.run.devices import needed

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("GPUs", justify="right", no_wrap=True)
    table.add_column("what", ratio=1)
    for name in shipped():
        recipe = load(name)
        gpus = f"{needed(recipe)}" + (" or 0" if recipe.model.dtype == "fp32" else "")
        table.add_row(name, gpus, recipe.description)
    Console().print(table)
    return 0


def _recipes_show(options: argparse.Namespace) -> int:
    from megarl.core.recipe import describe

    print(describe(_load(options)), end="")
    return 0


def _recipes_suggest(options: argparse.Namespace) -> int:
    from megarl.lab.presets import suggest

    return suggest(options.model, options.preset)


def _study_options(options: argparse.Namespace, overrides: Sequence[str]) -> "StudyOptions":
    from megarl.lab.study.main import Options

    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise MegarlError(f"--seeds: {options.seeds!r} is not a list of numbers such as 0,1,2") from None
    return Options(seeds, options.dir, options.task, options.dry_run, overrides)


def _study_loo(options: argparse.Namespace) -> int:
    from megarl.lab.study.main import loo

    beside = [name for name in options.beside.split(",") if name]
    return loo(options.recipe, beside, _study_options(options, options.overrides))


def _study_compare(options: argparse.Namespace) -> int:
    from megarl.lab.study.main import compare

    words = [*options.recipes, *options.overrides]
    recipes, overrides = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    return compare(recipes, _study_options(options, overrides))


def _study_results(options: argparse.Namespace) -> int:
    from megarl.lab.study.main import table_and_plots

    return table_and_plots(options.directory)


def _rollouts_show(options: argparse.Namespace) -> int:
    from megarl.core.base.rundir import RunDir
    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.core.recipe import load
    from megarl.lab.inspection.rollouts import show

    tokenizer = load_tokenizer(load(str(RunDir.opened(options.run).recipe)).model.path)
    show(options.run, options.ticket, options.step, options.limit, tokenizer, options.json)
    return 0


def _report(options: argparse.Namespace) -> int:
    from megarl.lab.report.report import main as report

    return report(options.run)


def _trace(options: argparse.Namespace) -> int:
    from megarl.lab.report.trace import main as trace

    return trace(options.run, options.steps, options.output)


def _plan(options: argparse.Namespace) -> int:
    from megarl.lab.planning.command import main as plan

    return plan(options)


def _doctor(options: argparse.Namespace) -> int:
    from megarl.lab.doctor import main as doctor

    return doctor()
