"""`megarl status RUN`: the state of a run from its files alone, on any machine that
sees them, while it lives or afterwards.

    RUN/summary.json exists ──► the closing summary
    otherwise               ──► the live view at this moment

`megarl health RUN`: all alarms of the run so far.
"""

import time
from pathlib import Path

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.retention import best_checkpoint, milestone_checkpoints
from megarl.core.base.rundir import RunDir
from megarl.core.recipe import load
from megarl.run import state, summary
from megarl.run.scores import score_warnings
from megarl.run.state import RunState
from megarl.run.view import ViewFrame, clock, render

DEAD_S = 60.0
"""A live controller writes its status each second, and its restart takes less than
this.
"""


def main(run: Path) -> int:
    """Show the state of a run. Return 0."""
    rundir = RunDir.opened(run)
    if rundir.summary.exists():
        _show_summary(rundir)
    else:
        present = state.read(rundir)
        elapsed_s = max(0.0, time.time() - present.began)
        frame = ViewFrame(load(str(rundir.recipe)), present, elapsed_s, foot=_foot(present))
        terminal.console().print(render(frame))
    _show_kept(rundir)
    return 0


def _show_summary(rundir: RunDir) -> None:
    """Print the closing summary. MegarlError if its file was not written by a run."""
    values = read_json(rundir.summary)
    try:
        terminal.console().print(summary.render(values, rundir))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MegarlError(
            f"{rundir.summary}: not what a run writes at its end ({error!r}); remove it"
        ) from None


def _foot(present: RunState) -> str:
    """Return a line on the time of this view, or that the run seems dead."""
    clock_time = time.time()
    last = present.status.time if present.status else present.began
    if clock_time - last > DEAD_S:
        silence = clock(clock_time - last)
        return f"nothing written for {silence}: it seems dead; run.resume=auto resumes it"
    return f"at {time.strftime('%H:%M:%S', time.localtime(clock_time))}"


def _show_kept(rundir: RunDir) -> None:
    """Print which checkpoints are kept besides the newest."""
    settings = load(str(rundir.recipe)).checkpoint
    for milestone, path in milestone_checkpoints(rundir.checkpoints, settings.milestones).items():
        name = f"step {milestone}" if isinstance(milestone, int) else milestone
        terminal.say(f"kept for good, as of {name}: {path}")
    best = best_checkpoint(rundir.checkpoints)
    if settings.keep_best and best is not None:
        terminal.say(f"kept as the best by its held-out score ({rundir.path}@best): {best}")


def health(run: Path) -> int:
    """Print every alarm with its steps, and what evaluations warn of. Return 1 if any
    of them lasts, else 0.
    """
    rundir = RunDir.opened(run)
    judged = state.judged(rundir)
    for alarm in judged.health.history:
        # `until` is the first step that was normal again
        until = "now" if alarm.until is None else f"{alarm.until - 1}"
        terminal.say(f"steps {alarm.since} to {until}, noticed at {alarm.raised}: {alarm.text}")
    grad_clip = load(str(rundir.recipe)).learner.optimizer.grad_clip
    warnings = score_warnings(judged.evaluations, judged.newest, grad_clip)
    for warning in warnings:
        terminal.say(warning.text)
    lasting = [alarm.name for alarm in judged.health.alarms]
    lasting += dict.fromkeys(warning.name for warning in warnings)  # each name once
    terminal.say(
        f"{judged.health.step + 1} steps, {len(judged.health.history)} alarms; now:"
        f" {', '.join(lasting) or 'healthy'}"
    )
    return 1 if lasting else 0
