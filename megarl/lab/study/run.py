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
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megarl.core.base.process import SUPERVISOR
from megarl.core.base.rundir import latest_rows, latest_scores
from megarl.lab.study.plan import Study, StudyTask
from megarl.run.process import StopRequest, outlive_screen, stop_requests
from megarl.run.view import sparkline

LOOK_S = 2.0
LINE_S = 60.0  # seconds between lines of non-interactive output
TRAIN = (sys.executable, "-m", "megarl", "train")


def run(study: Study, tasks: Sequence[StudyTask], console: Console) -> int:
    """Bring each of `tasks` to its end. Return 0: all done; 1: some failed; 128 + signal: asked to stop.

    A terminal shows a table of all tasks; other output gets a line when a task ends, and one a minute.
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
            done = sum(task.state() == "done" for task in study.tasks)
            at = "step {}, pass rate {}".format(*_progress(now))
            print(f"{done}/{len(study.tasks)} done · {now.name}: {now.state()}, {at}", flush=True)

    with stop_requests() as stop_request, live or nullcontext():
        for task in tasks:
            if task.state() != "done":
                _finish(task, stop_request, show)
            if stop_request.count:
                console.print("stopped as asked; the same command goes on from here", highlight=False)
                return 128 + stop_request.signal
    failed = [task for task in tasks if task.state() != "done"]
    for task in failed:
        console.print(f"failed: {task.name}; see {task.log}", style="red", highlight=False)
    return 1 if failed else 0


def _finish(task: StudyTask, stop_request: StopRequest, show: Callable[..., None]) -> None:
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
            show(task)
            time.sleep(LOOK_S)
    show(task, ended=True)


def table(study: Study, now: StudyTask, elapsed_s: float) -> Table:
    """Show the state of each task; `now` is the one that runs."""
    shown = Table(box=None, padding=(0, 2), pad_edge=False, caption=f"{elapsed_s / 60:.0f} min", caption_justify="left")
    for heading in ("run", "state", "step", "held-out pass rate", ""):
        shown.add_column(heading, no_wrap=True)
    for task in study.tasks:
        state = "running" if task == now and task.state() == "begun" else task.state()
        style = {"done": "green", "failed": "red", "running": "bold", "waiting": "dim"}.get(state, "")
        shown.add_row(task.name, state, *_progress(task), style=style)
    return shown


def _progress(task: StudyTask) -> tuple[str, str, str]:
    """Return the number of steps so far, the first and the last pass rate, and a curve of all."""
    rows, rates = latest_rows(task.rundir.metrics), [row["pass_rate"] for row in latest_scores(task.rundir.eval)]
    ends = " → ".join(f"{rate:.3f}" for rate in rates[:: max(1, len(rates) - 1)])
    return f"{rows[-1]['step'] + 1}" if rows else "-", ends, sparkline(rates, 20)
