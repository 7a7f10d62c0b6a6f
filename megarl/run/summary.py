"""The results of a run: RUN/summary.json, and the closing summary in the terminal. Also
works for an unfinished run.

    History (state.py) ──► summarise() ──► dict ──► RUN/summary.json
                                            └─────► render()
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from shlex import quote

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.core.base.retention import best_checkpoint
from megarl.core.base.rundir import Row, RunDir, SupervisorEvent, complete
from megarl.core.evaluation.forecast import forecast_text
from megarl.core.recipe import Recipe
from megarl.run.health import MEMORY, Health
from megarl.run.scores import NEWEST, best_of, newest_words, score_warnings
from megarl.run.state import History, history

PUBLICATION = ("publish", "pause", "transfer", "resume")
"""The parts of a publication that are timed; the first is the whole of it."""
RATES = (
    ("truncated", "truncation_rate"),
    ("interrupted", "interruption_rate"),
    ("malformed", "format_error_rate"),
)
"""What may be wrong with answers, and its metric."""


def summarise(recipe: Recipe, rundir: RunDir, rows: list[Row] | None = None) -> Row:
    """Compute figures over all lives of the run; None for those not measured. rows: of
    metrics.jsonl, if they are known.
    """
    past = history(rundir, rows)
    rows = past.rows
    events = [event.event for event in past.events]
    return {
        "run": recipe.run.name,
        "steps": len(rows),
        "steps_planned": recipe.run.steps,
        "compute_hours": _largest([*rows, *past.evaluations], "compute_hours"),
        "compute_unit": rows[-1].get("compute_unit") if rows else None,
        **_score_figures(past.evaluations),
        "newest_steps": min(NEWEST, len(rows)),
        "pass_rate_train": mean(rows[-NEWEST:], "pass_rate_train"),
        "generated_tokens": _total(rows, "generated_tokens"),
        **_speed_figures(_steady(rows, past.events)),
        "lag_mean": mean(rows, "lag_mean"),
        "lag_max": _largest(rows, "lag_max"),
        "lag_limit": recipe.pipeline.lag_limit,
        "parity_mean": mean(rows, "parity_mean/kernels"),
        "parity_mean_max": _largest(rows, "parity_mean/kernels"),
        "parity_publications": sum("parity_mean/kernels" in row for row in rows),
        "versions_per_rollout": mean(rows, "versions_per_rollout"),
        **{name: mean(rows[-NEWEST:], name) for _, name in RATES},
        "void_groups": _total(rows, "void_groups"),
        "warnings": _warnings(recipe, past),
        "restarts": events.count("restart"),
        "tasks": _by_task(recipe, rows, past.evaluations),
    }


def _score_figures(evaluations: list[Row]) -> Row:
    """Return the first, the best and the last score, with their steps, and the last
    forecast as text.
    """
    first = evaluations[0] if evaluations else {}
    last = evaluations[-1] if evaluations else {}
    best = best_of(evaluations)
    return {
        "pass_rate_before": first.get("pass_rate"),
        "pass_rate_before_step": first.get("step"),
        "pass_rate_best": best.get("pass_rate"),
        "pass_rate_best_step": best.get("step"),
        "pass_rate_after": last.get("pass_rate"),
        "pass_rate_after_step": last.get("step"),
        "predicted": forecast_text(last),
    }


def _speed_figures(rows: list[Row]) -> Row:
    """Return speeds, idle shares and the times of publications over `steady` rows."""
    seconds = _total(rows, "step_seconds")
    # the servers' busy share: the mean over steps, weighted by their time
    with_busy = [row for row in rows if _finite([row], "server_busy_share")]
    busy_seconds = math.fsum(row["server_busy_share"] * row["step_seconds"] for row in with_busy)
    busy = _ratio(busy_seconds, _total(with_busy, "step_seconds"))
    publishing = [row for row in rows if "transfer_seconds" in row]
    figures = {
        "tokens_per_second": _ratio(_total(rows, "generated_tokens"), seconds),
        "step_seconds": _ratio(seconds, float(len(rows))),
        "learner_idle_share": _ratio(_total(rows, "wait_seconds"), seconds),
        # a measured busy share can be a hair above 1
        "server_idle_share": None if busy is None else max(0.0, 1.0 - busy),
        "publications": len(publishing),
    }
    for part in PUBLICATION:
        figures[f"{part}_seconds"] = mean(publishing, f"{part}_seconds")
    return figures


def _warnings(recipe: Recipe, past: History) -> list[str]:
    """Return the texts of alarms that last, and of warnings by scores."""
    grad_clip = recipe.learner.optimizer.grad_clip
    texts = [alarm.text for alarm in Health(past.rows[-MEMORY:]).alarms]
    for warning in score_warnings(past.evaluations, past.rows, grad_clip):
        texts.append(warning.text)
    return texts


def _by_task(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> dict[str, Row]:
    """Return figures by task, if there are several."""
    if len(recipe.data.tasks) == 1:
        return {}
    first = evaluations[0] if evaluations else {}
    last = evaluations[-1] if evaluations else {}
    newest = rows[-NEWEST:]
    figures = {}
    for task in recipe.data.tasks:
        score = f"pass_rate/{task}"
        figures[task] = {
            "pass_rate_before": first.get(score),
            "pass_rate_best": best_of(evaluations, score).get(score),
            "pass_rate_after": last.get(score),
            "pass_rate_train": mean(newest, f"pass_rate_train/{task}"),
            "truncation_rate": mean(newest, f"truncation_rate/{task}"),
            "completion_tokens": mean(newest, f"completion_tokens_mean/{task}"),
        }
    return figures


def steady(rows: list[Row], rundir: RunDir) -> list[Row]:
    """Return the rows of normally timed steps: neither replayed nor the first in a
    learner's life, which includes its start.
    """
    return _steady(rows, list(rundir.events()))


def _steady(rows: list[Row], events: list[SupervisorEvent]) -> list[Row]:
    """Return the rows neither replayed nor the first after a start of the learner.
    events: the run's, in which these starts are.
    """
    starts = [
        event.time for event in events if event.event == "started" and event.role == "learner-0"
    ]
    times = sorted(_finite(rows, "time"))
    first_times = set()
    for start in starts:
        next_row = bisect.bisect(times, start)
        if next_row < len(times):
            first_times.add(times[next_row])
    return [row for row in rows if not row.get("replay") and row.get("time") not in first_times]


def render(values: Row, rundir: RunDir) -> RenderableType:
    """Return the closing summary. values: of RUN/summary.json."""
    style = {"finished": "green", "failed": "red"}.get(values["outcome"], "yellow")
    outcome = Text(f"{values['outcome']}: {values['reason']}", style=f"bold {style}")
    figures = grid(lines(values))
    places = grid(_places(values, rundir))
    parts = Group(outcome, Text(), figures, Text(), places)
    return Panel(parts, title=Text(f"megarl · {rundir.path}"), padding=(0, 1), width=100)


def grid(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for pair in pairs:
        table.add_row(*pair)
    return table


def lines(values: Row) -> Iterable[tuple[str, str]]:
    """Yield names and texts of the figures, what needs attention first."""
    for warning in values.get("warnings", ()):  # a run of an older version has none
        yield "look at", warning
    yield "steps", _steps(values)
    if values["pass_rate_before"] is not None:
        yield "pass rate, held out", _scores(values)
    for task, figures in values["tasks"].items():
        yield f"  {task}", _task(figures)
    if values["predicted"]:
        yield "predicted", values["predicted"]
    if values["steps"]:
        yield from _step_lines(values)


def _steps(values: Row) -> str:
    """Return the steps made, and the hours they took, as text."""
    text = f"{values['steps']} of {values['steps_planned']}"
    hours = values["compute_hours"]
    unit = values["compute_unit"]
    if hours and unit:
        text += f" · {hours:.3f} {unit} hours"
    if "wall_seconds" in values:
        text += f" · {values['wall_seconds'] / 60:.1f} min this time"
    return text


def _task(figures: Row) -> str:
    """Return a task's scores, and how it trains."""
    first = figures["pass_rate_before"]
    last = figures["pass_rate_after"]
    best = figures.get("pass_rate_best")
    text = f"{show(first, '.3f')} → {show(last, '.3f')}"
    if best is not None and best != last:
        text += f" (best {best:.3f})"
    rate = show(figures["pass_rate_train"], ".3f")
    tokens = show(figures["completion_tokens"], ",.0f")
    truncated = show(figures["truncation_rate"], ".1%")
    return f"{text} · training {rate} · {tokens} tokens · truncated {truncated}"


def _step_lines(values: Row) -> Iterable[tuple[str, str]]:
    """Yield the figures that a run has after its first step."""
    averaged = newest_words(values.get("newest_steps", NEWEST))
    rate = show(values["pass_rate_train"], ".3f")
    yield "pass rate, training", f"{rate} ({averaged})"
    speed = show(values["tokens_per_second"], ",.0f")
    seconds = show(values["step_seconds"], ".2f")
    yield "speed", f"{speed} tokens/s · {seconds} s a step"
    servers = show(values["server_idle_share"], ".0%")
    learner = show(values["learner_idle_share"], ".0%")
    yield "idle", f"servers {servers} · learner {learner}"
    yield "publication", _publication(values)
    largest = show(values["lag_max"], ".0f")
    lag = show(values["lag_mean"], ".2f")
    yield "lag", f"largest {largest} of {values['lag_limit']} · mean {lag}"
    yield "servers vs learner", _parity(values)
    rates = []
    for word, key in RATES:
        share = show(values[key], ".1%")
        rates.append(f"{word} {share}")
    yield "answers", f"{' · '.join(rates)} ({averaged})"
    if values["restarts"] or values["void_groups"]:
        void = show(values["void_groups"], ".0f")
        yield "mishaps", f"{values['restarts']} restarts of a role · {void} void groups"


def _publication(values: Row) -> str:
    """Return a publication's mean seconds, as a whole and by parts, as text."""
    texts = []
    for part in PUBLICATION[1:]:
        seconds = show(values[f"{part}_seconds"], ".3f")
        texts.append(f"{part} {seconds}")
    parts = " · ".join(texts)
    seconds = show(values["publish_seconds"], ".3f")
    count = values.get("publications", "–")
    return f"{seconds} s each of {count} ({parts})"


def _scores(values: Row) -> str:
    """Return the first score, the best if a later one is lower, and the last."""
    first = values["pass_rate_before_step"]
    last = values["pass_rate_after_step"]
    best = values.get("pass_rate_best_step")
    score_before = show(values["pass_rate_before"], ".3f")
    texts = [f"{score_before} (step {first})"]
    if first == last:
        return f"{texts[0]}, not scored since"
    if best not in (None, first, last):
        texts.append(f"best {values['pass_rate_best']:.3f} (step {best})")
    score_after = show(values["pass_rate_after"], ".3f")
    texts.append(f"{score_after} (step {last})")
    return " → ".join(texts)


def _parity(values: Row) -> str:
    """Return the difference between servers and learner as text."""
    publications = values["parity_publications"]
    largest = values["parity_mean_max"]
    if not publications:
        return "not compared"
    if largest == 0:
        return f"same bits at {publications} publications"
    mean = show(values["parity_mean"], ".1e")
    return (
        f"log-probs differ by {mean} on average,"
        f" {show(largest, '.1e')} at the worst of {publications} publications"
    )


def _places(values: Row, rundir: RunDir) -> Iterable[tuple[str, str]]:
    """Yield where the run's files are, and the commands that export it and go on with
    it.
    """
    if rundir.report.exists():
        yield "report", f"{rundir.report}  (one file, opens offline; picture {rundir.picture.name})"
    run = quote(str(rundir.path))
    yield "TensorBoard", f"tensorboard --logdir {quote(str(rundir.tensorboard))}"
    yield "metrics", f"{rundir.metrics}, {rundir.eval.name}, {rundir.summary.name}"
    yield "rollouts", f"megarl rollouts show {run}"
    checkpoints = complete(rundir.checkpoints)
    if checkpoints:
        yield "checkpoints", str(rundir.checkpoints)
        best = best_checkpoint(rundir.checkpoints)
        if best is not None and best != checkpoints[-1]:
            yield "best", f"{best}  ({run}@best names it)"
        yield "export", f"megarl export {run} {quote(str(rundir.path / 'hf'))}"
    yield "continue", _continuing(values, rundir)


def _continuing(values: Row, rundir: RunDir) -> str:
    """Return the command that goes on with the run; of a finished one, for as many
    steps again.
    """
    command = f"megarl train {quote(str(rundir.recipe))} run.resume=auto"
    if values["outcome"] != "finished":
        return command
    return f"{command} run.steps={2 * values['steps_planned']}"


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    """Return a metric's finite values in these rows."""
    values = [row.get(name) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def _total(rows: list[Row], name: str) -> float:
    return math.fsum(_finite(rows, name))


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Return a metric's mean over the rows that have it; None if none has."""
    values = _finite(rows, name)
    return math.fsum(values) / len(values) if values else None


def _largest(rows: list[Row], name: str) -> float | None:
    return max(_finite(rows, name), default=None)


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def show(value: float | None, form: str = ",.0f") -> str:
    """Format a figure; a dash for one that was not measured."""
    if value is None or not math.isfinite(value):
        return "–"
    return format(value, form)
