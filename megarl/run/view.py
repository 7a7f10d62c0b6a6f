"""The live view: renders the state from `Observer` and supervisor, as a rich renderable
or as one plain line for logs.

`render` and `line` are pure: they turn a `Frame` into text, and neither read nor
remember anything. `Screen` shows frames: as a live picture in a terminal, otherwise as
plain lines.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.rundir import Row, SupervisorEvent
from megarl.core.evaluation.forecast import words
from megarl.core.recipe import Recipe
from megarl.core.weights import parity
from megarl.run.observe import Observer, ServerStatus, Status
from megarl.run.restart import Role, RoleKind
from megarl.run.scores import best_of, newest_words, score_warnings
from megarl.run.summary import grid, mean, show

BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    "lost": "red",
    "dropped": "red",
    "restarting": "yellow",
    "starting": "yellow",
    "unknown": "yellow",
}


@dataclass(frozen=True)
class RoleView:
    """The state of a role to show. state: running, restarting, dropped or ended.
    seconds: since it started. nodes: where.
    """

    state: str
    seconds: float
    restarts: int = 0
    nodes: Sequence[str] = ()


def roles_after(events: Iterable[SupervisorEvent]) -> dict[Role, RoleView]:
    """Return the states of the roles after these events of one life of the supervisor."""
    roles: dict[Role, RoleView] = {}
    for event in events:
        if event.role:
            kind, _, index = event.role.partition("-")
            role = Role(cast(RoleKind, kind), int(index))
            before = roles.get(role, RoleView("", 0.0))
            state = {"started": "running", "restart": "restarting"}.get(event.event, event.event)
            seconds = time.time() - event.time if state == "running" else 0.0
            restarts = before.restarts + (event.event == "restart")
            roles[role] = RoleView(state, seconds, restarts, event.nodes or before.nodes)
    return roles


@dataclass(frozen=True)
class Frame:
    """Everything that one picture shows. stopping: progress of ending the run, if it is
    ending. problem: the last one.
    """

    recipe: Recipe
    observer: Observer
    elapsed_s: float
    roles: dict[Role, RoleView] = field(default_factory=dict)
    stopping: str = ""
    problem: str = ""
    foot: str = "Ctrl-C saves and stops; run.resume=auto resumes"


def render(frame: Frame) -> RenderableType:
    parts: list[RenderableType] = [Text(f"! {w}", style="yellow") for w in warnings(frame)]
    parts.append(_progress(frame))
    if frame.observer.rows or frame.observer.evaluations:
        parts += [Text(), grid(_numbers(frame))]
    parts += [Text(), _processes(frame)]
    if frame.problem:
        parts.append(
            Text(f"last problem: {frame.problem}", style="red", overflow="ellipsis", no_wrap=True)
        )
    foot = Text(frame.stopping or frame.foot, style="bold yellow" if frame.stopping else "dim")
    return Panel(
        Group(*parts),
        title=Text(f"megarl · {frame.recipe.run.path}"),
        subtitle=foot,
        width=100,
        padding=(0, 1),
    )


def line(frame: Frame) -> str:
    """Return the one-line form for non-interactive output."""
    row = frame.observer.latest
    observer = frame.observer
    parts = [f"[{clock(frame.elapsed_s)}]", frame.stopping or phase(frame)]
    if observer.rows:
        parts.append(f"step {row['step'] + 1}/{frame.recipe.run.steps}")
        parts.append(
            f"train {show(recent(observer, 'pass_rate_train'), ',.2f')} ({_averaged(observer)})"
        )
    if observer.evaluations:
        parts.append(f"held-out {_held_out(observer)}")
    if dropped := sum(view.state == "dropped" for view in frame.roles.values()):
        parts.append(f"{dropped} servers dropped")
    if joined := len(observer.joined(frame.recipe.resources.servers)):
        parts.append(f"{joined} servers joined")
    if observer.rows:
        parts.append(f"{show(recent(observer, 'tokens_per_second'))} tok/s")
        parts.append(f"lag {show(row.get('lag_mean'), ',.1f')}/{show(row.get('lag_max'))}")
        parts.append(f"parity {parity.kernels_text(observer.compared)}")
    return "  ".join(parts)


def phase(frame: Frame) -> str:
    """Return what the run is doing: starting (and what it waits for), replaying, or the
    learner's last command.
    """
    status = frame.observer.status
    restarting = [role.name for role, view in frame.roles.items() if view.state == "restarting"]
    if restarting:
        return f"restarting {', '.join(restarting)}"
    if status is None:
        return "starting the controller" if frame.observer.steps_made else "starting all roles"
    starting = [f"server-{s.id}" for s in status.servers if s.state == "starting"]
    if not frame.observer.steps_made and starting and len(starting) == len(status.servers):
        return f"starting {', '.join(starting)}"
    doing = {
        "starting": "starting the learner",
        "train": f"training step {status.step}",
        "replay": f"replaying step {status.step} from the journal",
        "publish": f"publishing version {status.step}",
        "score": f"comparing servers and learner at version {status.step}",
        "wait": f"the learner waits at step {status.step}",
        "stop": "the learner saves and exits",
    }
    evaluating = (
        f" · evaluating version {', '.join(map(str, status.evaluating))}"
        if status.evaluating
        else ""
    )
    return doing.get(status.phase, status.phase) + evaluating


def ending(status: Status | None) -> str:
    """Return what a run does that is asked to stop. status: the controller's, None
    before its first.
    """
    if status is None or status.phase == "starting":
        return "roles are still starting, and end once they have"
    return "the learner finishes its step and saves"


def warnings(frame: Frame) -> list[str]:
    """Return the warnings that the user should see."""
    observer = frame.observer
    messages = [alarm.text for alarm in observer.health.alarms]
    newest = [observer.rows[step] for step in sorted(observer.rows)]
    found = score_warnings(observer.scores, newest, frame.recipe.learner.optimizer.grad_clip)
    messages += [warning.text for warning in found]
    if observer.status is not None and observer.status.parity:
        messages.append(observer.status.parity)
    if observer.latest.get("groups_in_loss") == 0 and not frame.recipe.all_groups_teach:
        complete = ", of which one is complete" if frame.recipe.batch.truncated == "drop" else ""
        messages.append(
            f"no group of the last step had right and wrong answers{complete}: nothing was learnt"
            " from it"
        )
    return messages


def _averaged(observer: Observer) -> str:
    """Return over which steps `recent` averages, as text."""
    return newest_words(sum(not row.get("replay") for row in observer.rows.values()))


def _held_out(observer: Observer) -> str:
    """Return the last score and, if it was higher before, the best one, for a line."""
    last = observer.scored
    best = best_of(observer.scores)
    higher = (
        f" (best {best['pass_rate']:.2f} at {best['step']})" if best["step"] != last["step"] else ""
    )
    return f"{last['pass_rate']:.2f} at {last['step']}{higher}"


def recent(observer: Observer, name: str) -> float | None:
    """Return a metric's mean over the last `observe.RECENT` steps that have it, without
    those replayed after a crash.
    """
    return mean([row for row in observer.rows.values() if not row.get("replay")], name)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as at most `width` bars, averaging neighbours, on a scale from 0 to
    1.
    """
    count = min(width, len(values))
    bars = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        share = sum(part) / len(part)
        bars.append(BARS[max(0, min(len(BARS) - 1, int(share * len(BARS))))])
    return "".join(bars)


def clock(seconds: float) -> str:
    """Format seconds as `4:05` or `2:13:07`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _progress(frame: Frame) -> RenderableType:
    total = frame.recipe.run.steps
    done = max(frame.observer.rows, default=-1) + 1
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    seconds = recent(frame.observer, "step_seconds")
    left = (
        f"{seconds:.1f} s a step · {clock(seconds * (total - done))} left · "
        if seconds and done < total
        else ""
    )
    bar.add_row(
        Text(f"step {done}/{total}", style="bold"),
        ProgressBar(total=total, completed=done),
        Text(f"{left}{clock(frame.elapsed_s)}"),
    )
    return Group(bar, Text(phase(frame), style="cyan", overflow="ellipsis", no_wrap=True))


def _numbers(frame: Frame) -> Iterator[tuple[str, str]]:
    row = frame.observer.latest
    observer = frame.observer
    rates = [rate for _, rate in sorted(observer.pass_rates.items())]
    trained = show(recent(observer, "pass_rate_train"), ",.3f")
    yield "pass rate, training", f"{trained} ({_averaged(observer)})  {sparkline(rates, 40)}"
    if observer.evaluations:
        yield "pass rate, held out", _scores(observer.scores)
        if outlook := words(observer.scored):
            yield "predicted", outlook
    tasks = list(frame.recipe.data.tasks)
    for task in tasks if len(tasks) > 1 else ():
        yield f"  {task}", _task(observer, task)
    if not observer.rows:
        return
    step = recent(observer, "step_seconds") or math.nan
    shares = [
        f"{word} {show(value / step, '.0%')}"
        for name, word in (
            ("train_seconds", "trains"),
            ("wait_seconds", "waits"),
            ("publish_seconds", "publishes"),
        )
        if (value := recent(observer, name)) is not None
    ]
    yield "tokens/s", show(recent(observer, "tokens_per_second"))
    lag = f"mean {show(row.get('lag_mean'), ',.2f')} · max {show(row.get('lag_max'))}"
    window = f"window {show(row.get('window'), ',.1f')}"
    yield "lag, steps", f"{lag} · limit {frame.recipe.pipeline.lag_limit} · {window}"
    yield "learner", " · ".join(shares) or "–"
    yield "publication", f"{show(row.get('publish_seconds'), ',.2f')} s"
    yield "server − learner", _parity(observer.compared)
    yield (
        "entropy · grad norm",
        f"{show(row.get('entropy'), ',.3f')} · {show(row.get('grad_norm'), ',.3f')}",
    )
    if observer.status is not None:
        t = observer.status.tickets
        text = f"{t.running} being generated · {t.window} of {t.window_limit} in the window"
        yield "tickets", text + (f" · {t.void} void" if t.void else "")
        yield "compute", f"{observer.status.compute_hours:.3f} {observer.status.compute_unit} hours"


def _scores(evaluations: Sequence[Row]) -> str:
    """Return the last score, the best and the first, and all as bars."""
    last = evaluations[-1]
    best = best_of(evaluations)
    first = evaluations[0]
    told = [f"{last['pass_rate']:.3f} at step {last['step']}"]
    if best["step"] != last["step"]:
        told.append(f"best {best['pass_rate']:.3f} at step {best['step']}")
    if first["step"] not in (last["step"], best["step"]):
        told.append(f"first {first['pass_rate']:.3f}")
    bars = sparkline([row["pass_rate"] for row in evaluations], 20)
    return f"{' · '.join(told)}  {bars}"


def _parity(row: Row) -> str:
    """Return the mean and 99th percentile of the log-prob difference at equal weights,
    then the means for other causes.
    """
    if row.get("parity_mean/kernels") is None:
        return "–"
    tail = (
        f" (99 %: {show(row.get('parity_p99/kernels'), '.1e')})"
        if row["parity_mean/kernels"]
        else ""
    )
    causes = ("decode", "stale_kv", "staleness")
    means = {
        cause: mean for cause in causes if (mean := row.get(f"parity_mean/{cause}")) is not None
    }
    others = [f"{cause.replace('_kv', ' KV')} {show(mean, '.1e')}" for cause, mean in means.items()]
    if row.get("parity_routing") is not None:
        others.append(f"experts {row['parity_routing']:.1%}")
    return " · ".join([f"{parity.kernels_text(row)}{tail}", *others])


def _task(observer: Observer, task: str) -> str:
    """Return the task's pass rates, in training and held out, as text."""
    trained = f"training {show(recent(observer, f'pass_rate_train/{task}'), ',.3f')}"
    scores = [row for _, row in sorted(observer.evaluations.items()) if f"pass_rate/{task}" in row]
    if not scores:
        return trained
    values = [row[f"pass_rate/{task}"] for row in scores]
    return f"{trained} · held out {values[-1]:.3f}  {sparkline(values, 30)}"


def _processes(frame: Frame) -> RenderableType:
    several = len({node for view in frame.roles.values() for node in view.nodes}) > 1
    table = Table(
        box=None, padding=(0, 1), collapse_padding=several, header_style="dim", pad_edge=False
    )
    where = ("node",) if several else ()
    for name in ("role", *where, "state", "weights", "requests", "tok/s", "busy", "up", "restarts"):
        table.add_column(
            name, justify="left" if name in ("role", "node", "state") else "right", no_wrap=True
        )
    status = frame.observer.status
    servers = {s.id: s for s in status.servers} if status else {}
    others = (Role("server", i) for i in servers if i >= frame.recipe.resources.servers)
    joined = {role: RoleView("running", 0.0) for role in others if role not in frame.roles}
    for role, view in sorted((joined | frame.roles).items()):
        state = view.state
        cells = [""] * 4
        if view.state == "running" and role.kind == "server":
            server = servers.get(role.index, ServerStatus(id=role.index))
            state = server.state
            if not state.startswith("starting"):
                version = str(server.version) if server.version >= 0 else "–"
                cells = [
                    version,
                    str(server.running),
                    show(server.tokens_per_second),
                    show(server.busy_share, ".0%"),
                ]
        elif view.state == "running":
            state = (
                "up"
                if status and (role.kind == "controller" or status.phase != "starting")
                else "starting"
            )
        style = STYLES.get(state.split("(")[0], "")
        table.add_row(
            f"{role.name} (joined)" if role in joined else role.name,
            *([" … ".join(dict.fromkeys((*view.nodes[:1], *view.nodes[-1:])))] if several else []),
            Text(state, style=style),
            *cells,
            "" if role in joined else clock(view.seconds),
            str(view.restarts) if view.restarts else "",
        )
    return table


LINE_S = 10.0
JOB_LINE_S = 60.0
"""Seconds between lines of non-interactive output, and of a Slurm job's output, which
grows for weeks.
"""


class Screen:
    """Shows a picture in a terminal, within the context `live`; otherwise prints a line
    at intervals, and each warning once.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._every = JOB_LINE_S if "SLURM_JOB_ID" in os.environ else LINE_S
        self._last = -self._every
        self._stopping = ""
        self._warned: set[str] = set()

    def show(self, frame: Frame) -> None:
        if self.live:
            self.live.update(render(frame), refresh=True)
        elif frame.elapsed_s - self._last >= self._every or bool(frame.stopping) != bool(
            self._stopping
        ):
            self._last = frame.elapsed_s
            self._stopping = frame.stopping
            terminal.say(line(frame), flush=True)
            for warning in warnings(frame):
                kind = warning.lstrip("0123456789.%")
                if kind not in self._warned:
                    self._warned.add(kind)
                    terminal.say(f"! {warning}", flush=True)

    def say(self, text: str) -> None:
        """Print one line above the picture, where it stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
