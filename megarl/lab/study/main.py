"""`megarl study loo | run | compare | results`: runs a study's tasks in turn, or in a Slurm array one per job.

    waiting or begun ─► `megarl train STUDY/recipes/NAME.yaml` ─► done | failed        (a begun run resumes from its checkpoint)

Ctrl-C and SIGTERM are passed on to the run, which saves and exits; the same command
resumes it. A failed task does not stop the others. The run dies with this process,
however that ends.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import SUPERVISOR
from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import Recipe, differences, load
from megarl.lab.study import plan
from megarl.lab.study.files import variants_of
from megarl.lab.study.plan import Study, StudyTask
from megarl.run.process import StopRequest, outlive_screen, stop_requests
from megarl.run.view import sparkline

LOOK_S = 2.0
LINE_S = 60.0  # seconds between progress lines when the output is not a terminal
TRAIN = (sys.executable, "-m", "megarl", "train")


class StudyOptions(NamedTuple):
    """Options of a study. directory: "" for runs/studies/KIND-RECIPE; task: the number
    of the only task to run; None: all.
    """

    seeds: str
    directory: str
    task: int | None
    dry_run: bool
    overrides: Sequence[str]


def run_variants(study: str, recipe: str, beside: Sequence[str], options: StudyOptions) -> int:
    """Study the variants of `recipe` that a study file names, and the recipes `beside`
    with them.
    """
    recipes = variants_of(study, recipe, options.overrides)
    others = side_by_side(beside, options.overrides)
    if twice := recipes.keys() & others.keys():
        raise MegarlError(f"--with: {', '.join(sorted(twice))} is in the study already")
    return run_study(f"{Path(study).stem}-{Path(recipe).stem}", recipes | others, options)


def compare(names: Sequence[str], options: StudyOptions) -> int:
    recipes = side_by_side(names, options.overrides)
    return run_study("-".join(["compare", *recipes]), recipes, options)


def table_and_plots(path: Path) -> int:
    """Write the results of a study, also of an unfinished one; return the exit status."""
    from megarl.lab.study import (
        results,
        search,
    )  # `results` imports matplotlib, so only when needed

    study = plan.opened(path)
    console = terminal.console()
    if study.rungs:
        write_atomically(path / "search.md", search.report(study).encode())
        console.print((path / "search.md").read_text(), highlight=False)
        if not any(task.state() == "done" for task in study.tasks):
            return 0  # not even the first rung
    return results.write(study, console)


CommandLines = Sequence[Sequence[str]]


class StudyHooks(NamedTuple):
    """The steps in which kinds of study differ. before: returns the commands that a
    task needs before `megarl train`; ended: returns whether a task has nothing left to
    do; done: called after a task's run; end: called after all tasks, returns the exit
    status.
    """

    before: Callable[[StudyTask], CommandLines] = lambda task: ()
    ended: Callable[[StudyTask], bool] = lambda task: task.state() == "done"
    done: Callable[[StudyTask], object] = lambda task: None
    end: Callable[[Path], int] = table_and_plots


USUAL = StudyHooks()


def run_study(
    kind: str, recipes: Mapping[str, Recipe], options: StudyOptions, hooks: StudyHooks = USUAL
) -> int:
    """Run a study's tasks, or the one that the options name; return the exit status."""
    if (study := prepared(kind, recipes, options)) is None:
        return 0
    if options.task is None:
        return run(study, study.tasks, terminal.console(), hooks) or hooks.end(study.path)
    return run(study, [study.tasks[options.task]], terminal.console(), hooks)


def prepared(
    kind: str,
    recipes: Mapping[str, Recipe],
    options: StudyOptions,
    rungs: Sequence[int] = (),
    branch: int = 0,
) -> Study | None:
    """Return the study that the options describe, new or found in its directory; for a
    dry run, show it and return None.
    """
    path = Path(options.directory or f"runs/studies/{kind}")
    seeds = numbers("--seeds", options.seeds)
    if len(set(seeds)) < len(seeds):
        raise MegarlError(
            f"--seeds: {options.seeds} has a seed twice, whose runs would be the same"
        )
    if options.task is not None and not 0 <= options.task < len(recipes) * len(seeds):
        raise MegarlError(
            f"--task: the study has tasks 0 to {len(recipes) * len(seeds) - 1}, not {options.task}"
        )
    if options.dry_run:
        runs = f"{len(recipes) * len(seeds)} runs, seeds {options.seeds}"
        if rungs:
            arms = f"{len(recipes)} arms x {len(seeds)} seeds"
            runs = f"{arms}, half of them dropped at each of steps {', '.join(map(str, rungs))}"
        terminal.console().print(planned(f"{path}: {runs}", recipes))
        return None
    return plan.prepare(path, recipes, seeds, rungs, branch)


def numbers(option: str, text: str) -> list[int]:
    """Parse a list of numbers such as 0,1,2. MegarlError if it is none."""
    try:
        listed = [int(number) for number in text.split(",")]
    except ValueError:
        listed = [-1]
    if min(listed) < 0:
        raise MegarlError(f"{option}: {text!r} is not a list of numbers such as 0,1,2")
    return listed


def planned(title: str, recipes: Mapping[str, Recipe]) -> Table:
    """Make a table of what a study would run, for a dry run."""
    columns = (
        Column("variant", style="bold", no_wrap=True),
        Column("differs from the first in", overflow="fold"),
    )
    shown = Table(
        *columns, box=None, padding=(0, 2), pad_edge=False, title=title, title_justify="left"
    )
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        changed = [
            f"{key}={new}" for key, _, new in differences(first, recipe) if key != "run.name"
        ]
        shown.add_row(name, " ".join(changed))
    return shown


def side_by_side(recipes: Sequence[str], overrides: Sequence[str]) -> dict[str, Recipe]:
    """Load recipes with the same overrides. MegarlError if two have the same name."""
    names = [Path(recipe).stem for recipe in recipes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise MegarlError(f"two recipes of the study are called {twice!r}; give each another name")
    return {name: load(recipe, overrides) for name, recipe in zip(names, recipes, strict=True)}


def run(
    study: Study, tasks: Sequence[StudyTask], console: Console, hooks: StudyHooks = USUAL
) -> int:
    """Run each of `tasks` to its end. Return 0 if all are done, 1 if some failed, 128 +
    signal if asked to stop. A terminal shows a table of all tasks; other output gets a
    line when a task ends, and one per minute.
    """
    outlive_screen()
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    began = last = time.monotonic()

    def show(now: StudyTask, ended: bool = False) -> None:
        nonlocal last
        if live:
            live.update(table(study, now, time.monotonic() - began), refresh=True)
        elif ended or time.monotonic() - last > LINE_S:
            last = time.monotonic()
            done = sum(hooks.ended(task) for task in study.tasks)
            at = "step {}, pass rate {}".format(*_progress(now))
            terminal.say(
                f"{done}/{len(study.tasks)} done · {now.name}: {now.state()}, {at}", flush=True
            )

    with stop_requests() as stop_request, live or nullcontext():
        for task in tasks:
            if hooks.ended(task):
                continue
            if task.state() != "done":
                task.rundir.summary.unlink(
                    missing_ok=True
                )  # an earlier life that was stopped has left it
                for command in (*hooks.before(task), [*TRAIN, *task.arguments]):
                    if _finish(command, task, stop_request, show) or stop_request.count:
                        break
            if task.state() == "done":
                hooks.done(task)
            if stop_request.count:
                console.print(
                    "stopped as asked; the same command continues from here", highlight=False
                )
                return 128 + stop_request.signal
    failed = [task for task in tasks if not hooks.ended(task)]
    for task in failed:
        console.print(f"failed: {task.name}; see {task.log}", style="red", highlight=False)
    return 1 if failed else 0


def _finish(
    command: Sequence[str], task: StudyTask, stop_request: StopRequest, show: Callable[..., None]
) -> int:
    """Run a command to its end and return its status. Each request to stop is passed on
    to it once.
    """
    environment = os.environ | {SUPERVISOR: str(os.getpid())}
    heard = 0
    with task.log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        while process.poll() is None:
            if stop_request.count > heard:
                heard = stop_request.count
                process.send_signal(signal.SIGINT)
            show(task)
            time.sleep(LOOK_S)
    show(task, ended=True)
    return process.returncode


def table(study: Study, now: StudyTask, elapsed_s: float) -> Table:
    """Make a table with the state of each task. now: the task that is running."""
    shown = Table(
        box=None,
        padding=(0, 2),
        pad_edge=False,
        caption=f"{elapsed_s / 60:.0f} min",
        caption_justify="left",
    )
    for heading in ("run", "state", "step", "held-out pass rate", ""):
        shown.add_column(heading, no_wrap=True)
    for task in study.tasks:
        state = "running" if task == now and task.state() == "begun" else task.state()
        style = {"done": "green", "failed": "red", "running": "bold", "waiting": "dim"}.get(
            state, ""
        )
        shown.add_row(task.name, state, *_progress(task), style=style)
    return shown


def _progress(task: StudyTask) -> tuple[str, str, str]:
    """Return texts: the number of steps so far, the first and the last pass rate, and a
    sparkline of all.
    """
    rows = latest_rows(task.rundir.metrics)
    rates = [row["pass_rate"] for row in latest_scores(task.rundir.eval)]
    ends = " → ".join(f"{rate:.3f}" for rate in rates[:: max(1, len(rates) - 1)])
    return f"{rows[-1]['step'] + 1}" if rows else "-", ends, sparkline(rates, 20)
