"""Runs the tasks of a study, one after another, and shows how it goes on."""

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
from megarl.core.base.rundir import latest_rows, latest_scores
from megarl.core.recipe import Recipe, differences, load
from megarl.predict.study import plan
from megarl.predict.study.plan import Study, StudyTask
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


CommandLines = Sequence[Sequence[str]]


class StudyHooks(NamedTuple):
    """What kinds of study do differently. prerequisites: returns the commands that a
    task needs before `megarl train`; ended: returns whether a task has nothing left to
    do; done: called after a task's run if that has reached its end.
    """

    prerequisites: Callable[[StudyTask], CommandLines] = lambda task: ()
    ended: Callable[[StudyTask], bool] = lambda task: task.state() == "done"
    done: Callable[[StudyTask], object] = lambda task: None


USUAL = StudyHooks()


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
    tasks = len(recipes) * len(seeds)
    if options.task is not None and not 0 <= options.task < tasks:
        raise MegarlError(f"--task: the study has tasks 0 to {tasks - 1}, not {options.task}")
    if options.dry_run:
        runs = f"{tasks} runs, seeds {options.seeds}"
        if rungs:
            runs = (
                f"{len(recipes)} arms x {len(seeds)} seeds, half of them dropped at each of steps"
                f" {', '.join(map(str, rungs))}"
            )
        terminal.console().print(planned(f"{path}: {runs}", recipes))
        return None
    return plan.prepare(path, recipes, seeds, rungs, branch)


def numbers(option: str, text: str) -> list[int]:
    """Parse a list of numbers such as 0,1,2. MegarlError if it is none, or has a
    negative one. option: its name, for the error.
    """
    try:
        listed = [int(number) for number in text.split(",")]
    except ValueError:
        listed = [-1]  # refused below
    if min(listed) < 0:
        raise MegarlError(f"{option}: {text!r} is not a list of numbers such as 0,1,2")
    return listed


def planned(title: str, recipes: Mapping[str, Recipe]) -> Table:
    """Make a table of what a study would run, for a dry run."""
    columns = (
        Column("variant", style="bold", no_wrap=True),
        Column("differs from the first in", overflow="fold"),
    )
    rows = Table(
        *columns, box=None, padding=(0, 2), pad_edge=False, title=title, title_justify="left"
    )
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        changes = []
        for key, _, value in differences(first, recipe):
            if key != "run.name":
                changes.append(f"{key}={value}")
        rows.add_row(name, " ".join(changes))
    return rows


def side_by_side(recipes: Sequence[str], overrides: Sequence[str]) -> dict[str, Recipe]:
    """Load recipes with the same overrides. MegarlError if two have the same name."""
    loaded: dict[str, Recipe] = {}
    names = [Path(recipe).stem for recipe in recipes]
    for name in names:
        if names.count(name) > 1:
            raise MegarlError(
                f"two recipes of the study are called {name!r}; give each another name"
            )
    for name, recipe in zip(names, recipes, strict=True):
        loaded[name] = load(recipe, overrides)
    return loaded


class ProgressDisplay:
    """Shows how a study goes on: a table of all tasks in a terminal; else a line when a
    task ends, and one per minute.
    """

    def __init__(self, study: Study, console: Console, ended: Callable[[StudyTask], bool]) -> None:
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._study = study
        self._ended = ended
        self._start = time.monotonic()
        self._last_line = self._start

    def show(self, running: StudyTask, has_ended: bool = False) -> None:
        """Show the tasks' states. running: the task that runs, or has just ended."""
        time_now = time.monotonic()
        if self.live:
            self.live.update(table(self._study, running, time_now - self._start), refresh=True)
        elif has_ended or time_now - self._last_line > LINE_S:
            self._last_line = time_now
            done = sum(self._ended(task) for task in self._study.tasks)
            step, pass_rates, _ = _progress(running)
            terminal.say(
                f"{done}/{len(self._study.tasks)} done · {running.name}: {running.state()}, step"
                f" {step}, pass rate {pass_rates}",
                flush=True,
            )


def run(
    study: Study, tasks: Sequence[StudyTask], console: Console, hooks: StudyHooks = USUAL
) -> int:
    """Run each of `tasks` to its end. Return 0 if all are done, 1 if some failed, 128 +
    signal if asked to stop, as SIGUSR1 asks if a run stops ahead of its job's end
    (run/deadline.py).
    """
    outlive_screen()
    display = ProgressDisplay(study, console, hooks.ended)
    with stop_requests() as stop_request, display.live or nullcontext():
        for task in tasks:
            if hooks.ended(task):
                continue
            status = 0
            if task.state() != "done":  # a done task may still lack `hooks.done`
                status = _run_task(task, hooks, stop_request, display)
            if task.state() == "done":
                hooks.done(task)
            if stop_request.count or status == 128 + signal.SIGUSR1:
                console.print(
                    "stopped as asked; the same command continues from here", highlight=False
                )
                return 128 + (stop_request.signal or signal.SIGUSR1)
    failed = [task for task in tasks if not hooks.ended(task)]
    for task in failed:
        console.print(f"failed: {task.name}; see {task.log}", style="red", highlight=False)
    return 1 if failed else 0


def _run_task(
    task: StudyTask, hooks: StudyHooks, stop_request: StopRequest, display: ProgressDisplay
) -> int:
    """Run a task's commands until one fails or the study is asked to stop. Return the
    last one's status.
    """
    # An earlier process of the run, which was stopped, has left it; with it, the task
    # would not count as begun.
    task.rundir.summary.unlink(missing_ok=True)
    status = 0
    for command in (*hooks.prerequisites(task), [*TRAIN, *task.arguments]):
        status = _finish(command, task, stop_request, display)
        if status or stop_request.count:
            break
    return status


def _finish(
    command: Sequence[str], task: StudyTask, stop_request: StopRequest, display: ProgressDisplay
) -> int:
    """Run a command to its end and return its status. Each request to stop is passed on
    to it once.
    """
    environment = os.environ | {SUPERVISOR: str(os.getpid())}  # it ends if this process does
    passed_on = 0  # requests
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
            if stop_request.count > passed_on:
                passed_on = stop_request.count
                process.send_signal(signal.SIGINT)
            display.show(task)
            time.sleep(LOOK_S)
    display.show(task, has_ended=True)
    return process.returncode


STYLES = {"done": "green", "failed": "red", "running": "bold", "waiting": "dim"}


def table(study: Study, running: StudyTask, elapsed_s: float) -> Table:
    """Make a table with the state of each task."""
    states = Table(
        box=None,
        padding=(0, 2),
        pad_edge=False,
        caption=f"{elapsed_s / 60:.0f} min",
        caption_justify="left",
    )
    for heading in ("run", "state", "step", "held-out pass rate", ""):
        states.add_column(heading, no_wrap=True)
    for task in study.tasks:
        state: str = task.state()
        if task == running and state == "begun":
            state = "running"
        states.add_row(task.name, state, *_progress(task), style=STYLES.get(state, ""))
    return states


def _progress(task: StudyTask) -> tuple[str, str, str]:
    """Return texts: the number of steps so far, the first and the last pass rate, and a
    sparkline of all.
    """
    rows = latest_rows(task.rundir.metrics)
    steps = f"{rows[-1]['step'] + 1}" if rows else "-"
    rates = [row["pass_rate"] for row in latest_scores(task.rundir.eval)]
    first_and_last = [*rates[:1], *rates[1:][-1:]]  # the only one once
    ends = " → ".join(f"{rate:.3f}" for rate in first_and_last)
    return steps, ends, sparkline(rates, 20)
