"""Runs the tasks of a study: one after another, or the one that a job of a Slurm array is for.

    waiting or begun ─► `megarl train STUDY/recipes/NAME.yaml` ─► done | failed        (a begun run resumes from its checkpoint)

Ctrl-C and SIGTERM reach the run, which saves and exits; the same command resumes. A failed task does not stop the others.
The run dies with this process, however that ends.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megarl.core.base.process import SUPERVISOR
from megarl.core.base.rundir import latest_rows
from megarl.lab.study.plan import Study, Task
from megarl.run.process import StopRequest, outlive_screen, stop_requests
from megarl.run.view import sparkline

LOOK_S = 2.0
LINE_S = 60.0
"""Seconds between lines of non-interactive output."""
TRAIN = (sys.executable, "-m", "megarl", "train")


def run(study: Study, tasks: Sequence[Task], console: Console) -> int:
    """Bring each of `tasks` to its end. Return 0: all done; 1: some failed; 128 + signal: asked to stop."""
    outlive_screen()
    with stop_requests() as stop_request, Screen(study, console) as screen:
        for task in tasks:
            if task.state() != "done":
                _finish(task, stop_request, screen)
            if stop_request.count:
                console.print("stopped as asked; the same command goes on from here", highlight=False)
                return 128 + stop_request.signal
    failed = [task for task in tasks if task.state() != "done"]
    for task in failed:
        console.print(f"failed: {task.name}; see {task.log}", style="red", highlight=False)
    return 1 if failed else 0


def _finish(task: Task, stop_request: StopRequest, screen: "Screen") -> None:
    """Run `megarl train` to its end; requests to stop are passed on to it, once each."""
    task.rundir.summary.unlink(missing_ok=True)  # left by an earlier life that was stopped
    environment = os.environ | {SUPERVISOR: str(os.getpid())}
    heard = 0
    with task.log.open("ab") as log:
        process = subprocess.Popen(
            [*TRAIN, str(task.recipe)],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        while process.poll() is None:
            if stop_request.count > heard:
                heard = stop_request.count
                process.send_signal(signal.SIGINT)
            screen.show(task)
            time.sleep(LOOK_S)
    screen.show(task, ended=True)


class Screen:
    """Shows the table of all tasks in a terminal; elsewhere a line when a task ends, and one a minute."""

    def __init__(self, study: Study, console: Console) -> None:
        self._study, self._console = study, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._began = self._last = time.monotonic()

    def __enter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, now: Task, ended: bool = False) -> None:
        if self._live:
            self._live.update(table(self._study, now, time.monotonic() - self._began), refresh=True)
        elif ended or time.monotonic() - self._last > LINE_S:
            self._last = time.monotonic()
            done = sum(task.state() == "done" for task in self._study.tasks)
            print(f"{done}/{len(self._study.tasks)} done · {_line(now)}", flush=True)


def table(study: Study, now: Task, elapsed_s: float) -> Table:
    """Show the state of each task; `now` is the one that runs."""
    shown = Table(box=None, padding=(0, 2), pad_edge=False, caption=f"{elapsed_s / 60:.0f} min", caption_justify="left")
    for heading in ("run", "state", "step", "held-out pass rate", ""):
        shown.add_column(heading, no_wrap=True)
    for task in study.tasks:
        state = "running" if task.name == now.name and task.state() == "begun" else task.state()
        style = {"done": "green", "failed": "red", "running": "bold", "waiting": "dim"}.get(state, "")
        rates = task.pass_rates()
        shown.add_row(task.name, state, _step(task), _first_and_last(rates), sparkline(rates, 20), style=style)
    return shown


def _line(task: Task) -> str:
    return f"{task.name}: {task.state()}, step {_step(task)}, pass rate {_first_and_last(task.pass_rates())}"


def _step(task: Task) -> str:
    rows = latest_rows(task.rundir.metrics)
    return f"{rows[-1]['step'] + 1}" if rows else "-"


def _first_and_last(rates: Sequence[float]) -> str:
    return " → ".join(f"{rate:.3f}" for rate in (rates if len(rates) < 2 else (rates[0], rates[-1])))
