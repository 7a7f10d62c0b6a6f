"""`megarl status RUN`: the state of a run from its files alone, from any terminal that sees them, while it lives or afterwards.

RUN/summary.json exists ──► the closing summary         else ──► the live view of this moment

`megarl health RUN`: all alarms of the run so far.
"""

import time
from pathlib import Path
from typing import cast

from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.rundir import RunDir, latest_rows, latest_scores
from megarl.core.recipe import load
from megarl.run import summary
from megarl.run.health import Health, overoptimised
from megarl.run.observe import Observer
from megarl.run.restart import Role, RoleKind
from megarl.run.view import Frame, RoleView, clock, render

DEAD_S = 60.0
"""A live controller writes its status each second, and its restart takes less than this."""


def main(run: Path) -> int:
    rundir = RunDir.opened(run)
    console = Console()
    if rundir.summary.exists():
        values = read_json(rundir.summary)
        try:
            console.print(summary.render(values, rundir))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MegarlError(f"{rundir.summary}: not what a run writes at its end ({error!r}); remove it") from None
        return 0
    recipe, observer = load(str(rundir.recipe)), Observer(rundir)
    observer.look()
    roles, began = roles_of(rundir)
    now = time.time()
    last = observer.status.time if observer.status else began
    foot = f"at {time.strftime('%H:%M:%S', time.localtime(now))}"
    if now - last > DEAD_S:
        foot = f"nothing written for {clock(now - last)}: it seems dead; run.resume=auto goes on"
    console.print(render(Frame(recipe, observer, max(0.0, now - began), roles, foot=foot)))
    return 0


def health(run: Path) -> int:
    """Print every alarm with its steps, and over-optimisation; return 1 if anything lasts."""
    rundir = RunDir.opened(run)
    judged, scores = Health(latest_rows(rundir.metrics)), latest_scores(rundir.eval)
    for alarm in judged.history:
        until = "now" if alarm.until is None else f"{alarm.until - 1}"
        print(f"steps {alarm.since} to {until}, noticed at {alarm.raised}: {alarm.text}")
    exploited = overoptimised(scores[-1] if scores else {})
    print("".join(f"{message}\n" for message in exploited), end="")
    lasting = [alarm.name for alarm in judged.alarms] + ["over-optimisation"] * bool(exploited)
    print(f"{judged.step + 1} steps, {len(judged.history)} alarms; now: {', '.join(lasting) or 'healthy'}")
    return int(bool(lasting))


def roles_of(rundir: RunDir) -> tuple[dict[Role, RoleView], float]:
    """Return the run's roles as they are now, and when this life began, from the supervisor's log."""
    roles: dict[Role, RoleView] = {}
    restarts: dict[Role, int] = {}
    session, began = "", time.time()
    for event in rundir.events():
        if event.session != session:
            session, began = event.session, event.time
            roles, restarts = {}, {}
        if not event.role:
            continue
        kind, _, index = event.role.partition("-")
        role = Role(cast(RoleKind, kind), int(index))
        restarts[role] = restarts.get(role, 0) + (event.event == "restart")
        state = {"started": "running", "restart": "restarting"}.get(event.event, event.event)
        seconds = time.time() - event.time if state == "running" else 0.0
        nodes = event.nodes or (roles[role].nodes if role in roles else ())
        roles[role] = RoleView(state, seconds, restarts[role], nodes)
    return roles, began
