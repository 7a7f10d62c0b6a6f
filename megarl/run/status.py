"""`megarl status RUN`: the state of a run from its files alone, on any machine that
sees them, while it lives or afterwards.

RUN/summary.json exists ──► the closing summary         otherwise ──► the live view at this moment

`megarl health RUN`: all alarms of the run so far.
"""

import re
import time
from collections import deque
from pathlib import Path

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.retention import best_checkpoint, milestone_checkpoints
from megarl.core.base.rundir import Row, RunDir, latest_scores, parsed, rows_in_order
from megarl.core.recipe import load
from megarl.run import summary
from megarl.run.health import Health
from megarl.run.logs import sentence
from megarl.run.observe import Observer, Tail, last_lines
from megarl.run.restart import Role
from megarl.run.scores import NEWEST, score_warnings
from megarl.run.view import Frame, RoleView, clock, render, roles_after

DEAD_S = 60.0
"""A live controller writes its status each second, and its restart takes less than
this.
"""
WARNED = re.compile(r"(\S+ \S+),\d+ (.*?) (?:WARNING|ERROR|CRITICAL) megarl\.\S+: (.*)")
"""A line of a role's log: when, who, what."""


def main(run: Path) -> int:
    rundir = RunDir.opened(run)
    console = terminal.console()
    if rundir.summary.exists():
        values = read_json(rundir.summary)
        try:
            console.print(summary.render(values, rundir))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MegarlError(
                f"{rundir.summary}: not what a run writes at its end ({error!r}); remove it"
            ) from None
        _show_kept(rundir)
        return 0
    recipe = load(str(rundir.recipe))
    observer = Observer(rundir)
    observer.look()
    roles, began = roles_of(rundir)
    now = time.time()
    last = observer.status.time if observer.status else began
    foot = f"at {time.strftime('%H:%M:%S', time.localtime(now))}"
    if now - last > DEAD_S:
        foot = f"nothing written for {clock(now - last)}: it seems dead; run.resume=auto resumes it"
    console.print(
        render(
            Frame(
                recipe,
                observer,
                max(0.0, now - began),
                roles,
                problem=problem_of(rundir),
                foot=foot,
            )
        )
    )
    _show_kept(rundir)
    return 0


def _show_kept(rundir: RunDir) -> None:
    """Print which checkpoints are kept besides the newest."""
    settings = load(str(rundir.recipe)).checkpoint
    for milestone, path in milestone_checkpoints(rundir.checkpoints, settings.milestones).items():
        wanted = f"step {milestone}" if isinstance(milestone, int) else milestone
        terminal.say(f"kept for good, as of {wanted}: {path}")
    best = best_checkpoint(rundir.checkpoints)
    if settings.keep_best and best is not None:
        terminal.say(f"kept as the best by its held-out score ({rundir.path}@best): {best}")


def problem_of(rundir: RunDir) -> str:
    """Return the newest warning or failure that roles and supervisor have written down
    with its time; empty without any.
    """
    problems: list[str] = []
    for line in Tail(rundir.supervisor).lines():
        event = parsed(line) or {}
        if event.get("event") in ("hung", "dropped") or (
            event.get("event") == "ended" and event.get("status")
        ):
            problems.append(sentence(line))
    newest = max(reversed(problems), default="", key=_when)
    for written, log in sorted(
        ((log.stat().st_mtime, log) for log in rundir.logs.glob("*/*.log")), reverse=True
    ):
        if time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)) < _when(newest):
            # nor has any other log a newer one: of a run that was started often there
            # are thousands
            break
        lines = last_lines(log, count=1000)
        problems = [
            " ".join(warned.groups()) for line in lines if (warned := WARNED.fullmatch(line))
        ]
        newest = max([newest, *reversed(problems)], key=_when)
    return newest


def _when(problem: str) -> str:
    return problem[: len("2026-03-01 14:05:06")]


def health(run: Path) -> int:
    """Print every alarm with its steps, and what evaluations warn of. Return 1 if any
    of them lasts, else 0.
    """
    rundir = RunDir.opened(run)
    judged = Health()
    newest: deque[Row] = deque(maxlen=NEWEST)
    for row in rows_in_order(rundir.metrics):
        judged.add(row)
        newest.append(row)
    for alarm in judged.history:
        until = "now" if alarm.until is None else f"{alarm.until - 1}"
        terminal.say(f"steps {alarm.since} to {until}, noticed at {alarm.raised}: {alarm.text}")
    grad_clip = load(str(rundir.recipe)).learner.optimizer.grad_clip
    warnings = score_warnings(latest_scores(rundir.eval), list(newest), grad_clip)
    terminal.say("".join(f"{warning.text}\n" for warning in warnings), end="")
    lasting = [alarm.name for alarm in judged.alarms] + list(
        dict.fromkeys(warning.name for warning in warnings)
    )
    terminal.say(
        f"{judged.step + 1} steps, {len(judged.history)} alarms; now:"
        f" {', '.join(lasting) or 'healthy'}"
    )
    return int(bool(lasting))


def roles_of(rundir: RunDir) -> tuple[dict[Role, RoleView], float]:
    """Return the present states of the run's roles, and when this life began, from the
    supervisor's log.
    """
    events = list(rundir.events())
    life = [event for event in events if event.session == events[-1].session]
    return roles_after(life), life[0].time if life else time.time()
