"""The live view: a run's state as a rich renderable, or as one plain line for logs.

`render` and `line` are pure: they turn a `ViewFrame` into text, and neither read nor
remember anything. `Screen` shows frames: as a live picture in a terminal, otherwise as
plain lines.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.rundir import Row
from megarl.core.evaluation import parity
from megarl.core.evaluation.forecast import forecast_text
from megarl.core.recipe import Recipe
from megarl.run.restart import Role
from megarl.run.scores import best_of, newest_words, score_warnings
from megarl.run.state import RoleState, RunState, ServerStatus, Status
from megarl.run.summary import grid, mean, show

BARS = "▁▂▃▄▅▆▇█"
STYLES = {
    "lost": "red",
    "dropped": "red",
    "restarting": "yellow",
    "starting": "yellow",
    "unknown": "yellow",
}
SHARES = (
    ("train_seconds", "trains"),
    ("wait_seconds", "waits"),
    ("publish_seconds", "publishes"),
)
"""The parts of the learner's step, and what it does in them."""
CAUSES = (("decode", "decode"), ("stale_kv", "stale KV"), ("staleness", "staleness"))
"""Causes of a difference in log-probs besides kernels, and their names in the view."""


@dataclass(frozen=True)
class ViewFrame:
    """Everything that one picture shows. elapsed_s: since this life began. stopping:
    progress of ending the run, if it is ending. foot: a line below the picture.
    """

    recipe: Recipe
    state: RunState
    elapsed_s: float
    stopping: str = ""
    foot: str = "Ctrl-C saves and stops; run.resume=auto resumes"


def render(frame: ViewFrame) -> RenderableType:
    """Return the picture of a run."""
    state = frame.state
    parts: list[RenderableType] = [
        Text(f"! {warning}", style="yellow") for warning in warnings(frame)
    ]
    parts.append(_progress(frame))
    if state.rows or state.evaluations:
        parts += [Text(), grid(_numbers(frame))]
    parts += [Text(), _processes(frame)]
    if state.problem:
        problem = f"last problem: {state.problem}"
        parts.append(Text(problem, style="red", overflow="ellipsis", no_wrap=True))
    foot = Text(frame.foot, style="dim")
    if frame.stopping:
        foot = Text(frame.stopping, style="bold yellow")
    title = Text(f"megarl · {frame.recipe.run.path}")
    return Panel(Group(*parts), title=title, subtitle=foot, width=100, padding=(0, 1))


def line(frame: ViewFrame) -> str:
    """Return the one-line form for non-interactive output."""
    state = frame.state
    row = state.latest
    parts = [f"[{clock(frame.elapsed_s)}]", frame.stopping or phase(frame)]
    if state.rows:
        rate = show(recent(state, "pass_rate_train"), ",.2f")
        parts.append(f"step {row['step'] + 1}/{frame.recipe.run.steps}")
        parts.append(f"train {rate} ({_averaged(state)})")
    if state.evaluations:
        parts.append(f"held-out {_held_out(state)}")
    dropped = [role for role, view in state.roles.items() if view.state == "dropped"]
    if dropped:
        parts.append(f"{len(dropped)} servers dropped")
    guests = state.guests(frame.recipe.resources.servers)
    if guests:
        parts.append(f"{len(guests)} servers joined")
    if state.rows:
        parts.append(f"{show(recent(state, 'tokens_per_second'))} tok/s")
        mean_lag = show(row.get("lag_mean"), ",.1f")
        largest_lag = show(row.get("lag_max"))
        parts.append(f"lag {mean_lag}/{largest_lag}")
        parts.append(f"parity {parity.kernels_text(state.compared)}")
    return "  ".join(parts)


def phase(frame: ViewFrame) -> str:
    """Return what the run is doing: starting (and what it waits for), replaying, or the
    learner's last command.
    """
    state = frame.state
    status = state.status
    restarting = [role.name for role, view in state.roles.items() if view.state == "restarting"]
    if restarting:
        return f"restarting {', '.join(restarting)}"
    if status is None:
        return "starting the controller" if state.steps_made else "starting all roles"
    starting = [f"server-{server.id}" for server in status.servers if server.state == "starting"]
    if not state.steps_made and starting and len(starting) == len(status.servers):
        return f"starting {', '.join(starting)}"
    phases = {
        "starting": "starting the learner",
        "train": f"training step {status.step}",
        "replay": f"replaying step {status.step} from the journal",
        "publish": f"publishing version {status.step}",
        "score": f"comparing servers and learner at version {status.step}",
        "wait": f"the learner waits at step {status.step}",
        "stop": "the learner saves and exits",
    }
    text = phases.get(status.phase, status.phase)
    if status.evaluating:
        text += f" · evaluating version {', '.join(map(str, status.evaluating))}"
    return text


def ending(status: Status | None) -> str:
    """Return what a run does that is asked to stop. status: the controller's, None
    before its first.
    """
    if status is None or status.phase == "starting":
        return "roles are still starting, and end once they have"
    return "the learner finishes its step and saves"


def warnings(frame: ViewFrame) -> list[str]:
    """Return the warnings that the user should see."""
    state = frame.state
    recipe = frame.recipe
    grad_clip = recipe.learner.optimizer.grad_clip
    messages = [alarm.text for alarm in state.health.alarms]
    for warning in score_warnings(state.scores, state.newest_rows, grad_clip):
        messages.append(warning.text)
    if state.status is not None and state.status.parity:
        messages.append(state.status.parity)
    if state.latest.get("groups_in_loss") == 0 and not recipe.all_groups_teach:
        complete = ", of which one is complete" if recipe.batch.truncated == "drop" else ""
        messages.append(
            f"no group of the last step had right and wrong answers{complete}: nothing was learnt"
            " from it"
        )
    return messages


def _averaged(state: RunState) -> str:
    """Return over which steps `recent` averages, as text."""
    return newest_words(len(state.timed_rows))


def _held_out(state: RunState) -> str:
    """Return the last score and, if it was higher before, the best one, for a line."""
    last = state.latest_score
    best = best_of(state.scores)
    text = f"{last['pass_rate']:.2f} at {last['step']}"
    if best["step"] != last["step"]:
        text += f" (best {best['pass_rate']:.2f} at {best['step']})"
    return text


def recent(state: RunState, name: str) -> float | None:
    """Return a metric's mean over the last `state.RECENT` steps that have it, without
    those replayed after a crash.
    """
    return mean(state.timed_rows, name)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as at most `width` bars, averaging neighbours, on a scale from 0 to
    1.
    """
    count = min(width, len(values))
    bars = []
    for i in range(count):
        start = i * len(values) // count
        end = (i + 1) * len(values) // count
        part = values[start:end]
        share = sum(part) / len(part)
        level = int(share * len(BARS))
        bars.append(BARS[max(0, min(len(BARS) - 1, level))])
    return "".join(bars)


def clock(seconds: float) -> str:
    """Format seconds as `4:05` or `2:13:07`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _progress(frame: ViewFrame) -> RenderableType:
    """Return the bar of steps with times left and elapsed, and the phase below it."""
    total = frame.recipe.run.steps
    done = max(frame.state.rows, default=-1) + 1
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    seconds = recent(frame.state, "step_seconds")
    remaining = ""
    if seconds and done < total:
        remaining = f"{seconds:.1f} s a step · {clock(seconds * (total - done))} left · "
    bar.add_row(
        Text(f"step {done}/{total}", style="bold"),
        ProgressBar(total=total, completed=done),
        Text(f"{remaining}{clock(frame.elapsed_s)}"),
    )
    return Group(bar, Text(phase(frame), style="cyan", overflow="ellipsis", no_wrap=True))


def _numbers(frame: ViewFrame) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the figures."""
    state = frame.state
    rates = [rate for _, rate in sorted(state.pass_rates.items())]
    trained = show(recent(state, "pass_rate_train"), ",.3f")
    yield "pass rate, training", f"{trained} ({_averaged(state)})  {sparkline(rates, 40)}"
    if state.evaluations:
        yield "pass rate, held out", _scores(state.scores)
        if outlook := forecast_text(state.latest_score):
            yield "predicted", outlook
    tasks = list(frame.recipe.data.tasks)
    if len(tasks) > 1:
        for task in tasks:
            yield f"  {task}", _task(state, task)
    if state.rows:
        yield from _step(frame)
    if state.rows and state.status is not None:
        yield from _counts(state.status)


def _step(frame: ViewFrame) -> Iterator[tuple[str, str]]:
    """Yield the figures of the newest steps."""
    state = frame.state
    row = state.latest
    yield "tokens/s", show(recent(state, "tokens_per_second"))
    lag = f"mean {show(row.get('lag_mean'), ',.2f')} · max {show(row.get('lag_max'))}"
    window = f"window {show(row.get('window'), ',.1f')}"
    yield "lag, steps", f"{lag} · limit {frame.recipe.pipeline.lag_limit} · {window}"
    yield "learner", " · ".join(_shares(state)) or "–"
    yield "publication", f"{show(row.get('publish_seconds'), ',.2f')} s"
    yield "server − learner", _parity(state.compared)
    entropy = show(row.get("entropy"), ",.3f")
    norm = show(row.get("grad_norm"), ",.3f")
    yield "entropy · grad norm", f"{entropy} · {norm}"


def _shares(state: RunState) -> list[str]:
    """Return which share of a step the learner spends on each of its parts."""
    step = recent(state, "step_seconds") or math.nan
    shares = []
    for name, verb in SHARES:
        seconds = recent(state, name)
        if seconds is not None:
            shares.append(f"{verb} {show(seconds / step, '.0%')}")
    return shares


def _counts(status: Status) -> Iterator[tuple[str, str]]:
    """Yield what the controller counts."""
    tickets = status.tickets
    text = f"{tickets.running} being generated · {tickets.window} of {tickets.window_limit}"
    text += " in the window"
    if tickets.void:
        text += f" · {tickets.void} void"
    yield "tickets", text
    yield "compute", f"{status.compute_hours:.3f} {status.compute_unit} hours"


def _scores(evaluations: Sequence[Row]) -> str:
    """Return the last score, the best and the first, and all as bars."""
    last = evaluations[-1]
    best = best_of(evaluations)
    first = evaluations[0]
    texts = [f"{last['pass_rate']:.3f} at step {last['step']}"]
    if best["step"] != last["step"]:
        texts.append(f"best {best['pass_rate']:.3f} at step {best['step']}")
    if first["step"] not in (last["step"], best["step"]):
        texts.append(f"first {first['pass_rate']:.3f}")
    bars = sparkline([row["pass_rate"] for row in evaluations], 20)
    return f"{' · '.join(texts)}  {bars}"


def _parity(row: Row) -> str:
    """Return the mean and 99th percentile of the log-prob difference at equal weights,
    then the means for other causes.
    """
    if row.get("parity_mean/kernels") is None:
        return "–"
    text = parity.kernels_text(row)
    if row["parity_mean/kernels"]:
        text += f" (99 %: {show(row.get('parity_p99/kernels'), '.1e')})"
    texts = [text]
    for cause, name in CAUSES:
        difference = row.get(f"parity_mean/{cause}")
        if difference is not None:
            texts.append(f"{name} {show(difference, '.1e')}")
    if row.get("parity_routing") is not None:
        texts.append(f"experts {row['parity_routing']:.1%}")
    return " · ".join(texts)


def _task(state: RunState, task: str) -> str:
    """Return the task's pass rates, in training and held out, as text."""
    name = f"pass_rate/{task}"
    trained = f"training {show(recent(state, f'pass_rate_train/{task}'), ',.3f')}"
    values = [row[name] for row in state.scores if name in row]
    if not values:
        return trained
    return f"{trained} · held out {values[-1]:.3f}  {sparkline(values, 30)}"


def _processes(frame: ViewFrame) -> RenderableType:
    """Return a table of the roles."""
    state = frame.state
    nodes = {node for view in state.roles.values() for node in view.nodes}
    with_nodes = len(nodes) > 1
    table = Table(
        box=None, padding=(0, 1), collapse_padding=with_nodes, header_style="dim", pad_edge=False
    )
    left_columns = ["role", "node", "state"] if with_nodes else ["role", "state"]
    for name in left_columns:
        table.add_column(name, no_wrap=True)
    for name in ("weights", "requests", "tok/s", "busy", "up", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    roles = state.roles | _guest_roles(frame)
    for role, view in sorted(roles.items()):
        is_guest = role not in state.roles
        table.add_row(*_cells(role, view, state, is_guest, with_nodes))
    return table


def _guest_roles(frame: ViewFrame) -> dict[Role, RoleState]:
    """Return the servers that have joined, which the supervisor has not started."""
    run_servers = frame.recipe.resources.servers
    roles = [Role("server", i) for i in frame.state.servers if i >= run_servers]
    return {role: RoleState("running", 0.0) for role in roles if role not in frame.state.roles}


def _cells(
    role: Role, view: RoleState, state: RunState, is_guest: bool, with_nodes: bool
) -> list[Text | str]:
    """Return a role's row of the table. is_guest: a server that has joined. with_nodes:
    whether the table has a column for nodes.
    """
    state_text = view.state
    figures = [""] * 4
    if view.state == "running" and role.kind == "server":
        server = state.servers.get(role.index, ServerStatus(id=role.index))
        state_text = server.state
        figures = _server_figures(server)
    elif view.state == "running":
        state_text = "up" if _is_up(role, state.status) else "starting"
    cells: list[Text | str] = [f"{role.name} (joined)" if is_guest else role.name]
    if with_nodes:
        first_and_last = (*view.nodes[:1], *view.nodes[-1:])
        cells.append(" … ".join(dict.fromkeys(first_and_last)))  # one name if they are the same
    state_name = state_text.split("(")[0]  # without the version in "clean(7)"
    cells.append(Text(state_text, style=STYLES.get(state_name, "")))
    cells += figures
    cells.append("" if is_guest else clock(view.seconds))
    cells.append(str(view.restarts) if view.restarts else "")
    return cells


def _server_figures(server: ServerStatus) -> list[str]:
    """Return a server's version, requests, speed and busy share; nothing while it
    starts.
    """
    if server.state.startswith("starting"):
        return [""] * 4
    version = str(server.version) if server.version >= 0 else "–"
    speed = show(server.tokens_per_second)
    return [version, str(server.running), speed, show(server.busy_share, ".0%")]


def _is_up(role: Role, status: Status | None) -> bool:
    """Return whether a role that runs, no server, has started: the controller with its
    first status, the others once the learner has asked for something.
    """
    if status is None:
        return False
    return role.kind == "controller" or status.phase != "starting"


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
        self._last = -self._every  # the first frame is due at once
        self._was_stopping = False
        self._warned: set[str] = set()

    def show(self, frame: ViewFrame) -> None:
        """Show a frame, or print its line when the next one is due."""
        if self.live:
            self.live.update(render(frame), refresh=True)
            return
        is_stopping = bool(frame.stopping)
        is_due = frame.elapsed_s - self._last >= self._every
        if is_due or is_stopping != self._was_stopping:
            self._last = frame.elapsed_s
            self._was_stopping = is_stopping
            terminal.say(line(frame), flush=True)
            self._warn(frame)

    def _warn(self, frame: ViewFrame) -> None:
        """Print the warnings that were not printed before. The number with which one
        begins may differ.
        """
        for warning in warnings(frame):
            kind = warning.lstrip("0123456789.%")
            if kind not in self._warned:
                self._warned.add(kind)
                terminal.say(f"! {warning}", flush=True)

    def say(self, text: str) -> None:
        """Print one line above the picture, where it stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
