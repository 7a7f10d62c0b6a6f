"""The results of a run: RUN/summary.json, and the closing summary in the terminal. Also
works for an unfinished run.

metrics.jsonl, eval.jsonl, logs/supervisor.jsonl ──► summarise() ──► dict ──► render()
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
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores
from megarl.core.evaluation.forecast import words
from megarl.core.recipe import Recipe
from megarl.run.health import MEMORY, Health
from megarl.run.scores import NEWEST, best_of, newest_words, score_warnings


def summarise(recipe: Recipe, rundir: RunDir, rows: list[Row] | None = None) -> Row:
    """Compute figures over all lives of the run; None for those not measured. rows: of
    metrics.jsonl, if they are known.
    """
    rows = latest_rows(rundir.metrics) if rows is None else rows
    evaluations = latest_scores(rundir.eval)
    lived = steady(rows, rundir)
    events = [event.event for event in rundir.events()]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    best = best_of(evaluations)
    seconds = _total(lived, "step_seconds")
    known = [
        row for row in lived if _finite([row], "server_busy_share")
    ]  # a step counts by its time
    busy_seconds = math.fsum(row["server_busy_share"] * row["step_seconds"] for row in known)
    busy = _ratio(busy_seconds, _total(known, "step_seconds"))
    publishing = [row for row in lived if "transfer_seconds" in row]
    return {
        "run": recipe.run.name,
        "steps": len(rows),
        "steps_planned": recipe.run.steps,
        "compute_hours": _largest([*rows, *evaluations], "compute_hours"),
        "compute_unit": rows[-1].get("compute_unit") if rows else None,
        "pass_rate_before": first.get("pass_rate"),
        "pass_rate_before_step": first.get("step"),
        "pass_rate_best": best.get("pass_rate"),
        "pass_rate_best_step": best.get("step"),
        "pass_rate_after": last.get("pass_rate"),
        "pass_rate_after_step": last.get("step"),
        "predicted": words(last),
        "newest_steps": min(NEWEST, len(rows)),
        "pass_rate_train": mean(rows[-NEWEST:], "pass_rate_train"),
        "generated_tokens": _total(rows, "generated_tokens"),
        "tokens_per_second": _ratio(_total(lived, "generated_tokens"), seconds),
        "step_seconds": _ratio(seconds, float(len(lived))),
        "learner_idle_share": _ratio(_total(lived, "wait_seconds"), seconds),
        "server_idle_share": (
            None if busy is None else max(0.0, 1.0 - busy)
        ),  # a measured share can be a hair above one
        "publications": len(publishing),
        **{
            f"{part}_seconds": mean(publishing, f"{part}_seconds")
            for part in ("publish", "pause", "transfer", "resume")
        },
        "lag_mean": mean(rows, "lag_mean"),
        "lag_max": _largest(rows, "lag_max"),
        "lag_limit": recipe.pipeline.lag_limit,
        "parity_mean": mean(rows, "parity_mean/kernels"),
        "parity_mean_max": _largest(rows, "parity_mean/kernels"),
        "parity_publications": sum("parity_mean/kernels" in row for row in rows),
        "versions_per_rollout": mean(rows, "versions_per_rollout"),
        **{
            name: mean(rows[-NEWEST:], name)
            for name in ("truncation_rate", "interruption_rate", "format_error_rate")
        },
        "void_groups": _total(rows, "void_groups"),
        "warnings": [
            *(alarm.text for alarm in Health(rows[-MEMORY:]).alarms),
            *(
                warning.text
                for warning in score_warnings(evaluations, rows, recipe.learner.optimizer.grad_clip)
            ),
        ],
        "restarts": events.count("restart"),
        "tasks": _by_task(recipe, rows, evaluations),
    }


def _by_task(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> dict[str, Row]:
    """Return figures by task, if there are several."""
    if len(recipe.data.tasks) == 1:
        return {}
    first = evaluations[0] if evaluations else {}
    last = evaluations[-1] if evaluations else {}
    return {
        task: {
            "pass_rate_before": first.get(f"pass_rate/{task}"),
            "pass_rate_best": best_of(evaluations, f"pass_rate/{task}").get(f"pass_rate/{task}"),
            "pass_rate_after": last.get(f"pass_rate/{task}"),
            "pass_rate_train": mean(rows[-NEWEST:], f"pass_rate_train/{task}"),
            "truncation_rate": mean(rows[-NEWEST:], f"truncation_rate/{task}"),
            "completion_tokens": mean(rows[-NEWEST:], f"completion_tokens_mean/{task}"),
        }
        for task in recipe.data.tasks
    }


def steady(rows: list[Row], rundir: RunDir) -> list[Row]:
    """Return the rows of normally timed steps: neither replayed nor the first in a
    learner's life, which includes its start.
    """
    starts = [e.time for e in rundir.events() if e.event == "started" and e.role == "learner-0"]
    times = sorted(_finite(rows, "time"))
    first = {times[i] for start in starts if (i := bisect.bisect(times, start)) < len(times)}
    return [row for row in rows if not row.get("replay") and row.get("time") not in first]


def render(values: Row, rundir: RunDir) -> RenderableType:
    style = {"finished": "green", "failed": "red"}.get(values["outcome"], "yellow")
    outcome = Text(f"{values['outcome']}: {values['reason']}", style=f"bold {style}")
    parts = Group(outcome, Text(), grid(lines(values)), Text(), grid(_places(values, rundir)))
    return Panel(parts, title=Text(f"megarl · {rundir.path}"), padding=(0, 1), width=100)


def grid(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for pair in pairs:
        table.add_row(*pair)
    return table


def lines(v: Row) -> Iterable[tuple[str, str]]:
    """Yield names and texts of the figures, what needs attention first."""
    for warning in v.get("warnings", ()):  # a run of an older version has none
        yield "look at", warning
    hours = v["compute_hours"]
    unit = v["compute_unit"]
    compute = f" · {hours:.3f} {unit} hours" if hours and unit else ""
    wall = f" · {v['wall_seconds'] / 60:.1f} min this time" if "wall_seconds" in v else ""
    yield "steps", f"{v['steps']} of {v['steps_planned']}{compute}{wall}"
    if v["pass_rate_before"] is not None:
        yield "pass rate, held out", _scores(v)
    for task, t in v["tasks"].items():
        scores = [t["pass_rate_before"], t["pass_rate_after"]]
        heldout = " → ".join(show(score, ".3f") for score in scores)
        best = t.get("pass_rate_best")
        if best is not None and best != t["pass_rate_after"]:
            heldout += f" (best {best:.3f})"
        trained = (
            f"training {show(t['pass_rate_train'], '.3f')} · {show(t['completion_tokens'], ',.0f')}"
            " tokens"
        )
        yield f"  {task}", f"{heldout} · {trained} · truncated {show(t['truncation_rate'], '.1%')}"
    if v["predicted"]:
        yield "predicted", v["predicted"]
    if not v["steps"]:
        return
    averaged = newest_words(v.get("newest_steps", NEWEST))
    yield "pass rate, training", f"{show(v['pass_rate_train'], '.3f')} ({averaged})"
    yield (
        "speed",
        (
            f"{show(v['tokens_per_second'], ',.0f')} tokens/s · {show(v['step_seconds'], '.2f')} s"
            " a step"
        ),
    )
    yield (
        "idle",
        (
            f"servers {show(v['server_idle_share'], '.0%')} · learner"
            f" {show(v['learner_idle_share'], '.0%')}"
        ),
    )
    parts = " · ".join(
        f"{part} {show(v[f'{part}_seconds'], '.3f')}" for part in ("pause", "transfer", "resume")
    )
    yield (
        "publication",
        f"{show(v['publish_seconds'], '.3f')} s each of {v.get('publications', '–')} ({parts})",
    )
    yield (
        "lag",
        (
            f"largest {show(v['lag_max'], '.0f')} of {v['lag_limit']} · mean"
            f" {show(v['lag_mean'], '.2f')}"
        ),
    )
    yield "servers vs learner", _parity(v)
    rates = (
        ("truncated", "truncation_rate"),
        ("interrupted", "interruption_rate"),
        ("malformed", "format_error_rate"),
    )
    yield (
        "answers",
        " · ".join(f"{word} {show(v[key], '.1%')}" for word, key in rates) + f" ({averaged})",
    )
    if v["restarts"] or v["void_groups"]:
        yield (
            "mishaps",
            f"{v['restarts']} restarts of a role · {show(v['void_groups'], '.0f')} void groups",
        )


def _scores(v: Row) -> str:
    """Return the first score, the best if a later one is lower, and the last."""
    told = [f"{show(v['pass_rate_before'], '.3f')} (step {v['pass_rate_before_step']})"]
    if v["pass_rate_before_step"] == v["pass_rate_after_step"]:
        return f"{told[0]}, not scored since"
    if v.get("pass_rate_best_step") not in (
        None,
        v["pass_rate_before_step"],
        v["pass_rate_after_step"],
    ):
        told.append(f"best {v['pass_rate_best']:.3f} (step {v['pass_rate_best_step']})")
    told.append(f"{show(v['pass_rate_after'], '.3f')} (step {v['pass_rate_after_step']})")
    return " → ".join(told)


def _parity(v: Row) -> str:
    """Return the difference between servers and learner as text."""
    if not v["parity_publications"]:
        return "not compared"
    if v["parity_mean_max"] == 0:
        return f"same bits at {v['parity_publications']} publications"
    differ = f"log-probs differ by {show(v['parity_mean'], '.1e')} on average"
    return (
        f"{differ}, {show(v['parity_mean_max'], '.1e')} at the worst of {v['parity_publications']}"
        " publications"
    )


def _places(values: Row, rundir: RunDir) -> Iterable[tuple[str, str]]:
    """Yield where the run's files are, and the commands that export it and go on with
    it.
    """
    if rundir.report.exists():
        yield "report", f"{rundir.report}  (one file, opens offline; picture {rundir.picture.name})"
    run, tensorboard, export = (
        quote(str(path)) for path in (rundir.path, rundir.tensorboard, rundir.path / "hf")
    )
    yield "TensorBoard", f"tensorboard --logdir {tensorboard}"
    yield "metrics", f"{rundir.metrics}, {rundir.eval.name}, {rundir.summary.name}"
    yield "rollouts", f"megarl rollouts show {run}"
    newest = max(rundir.checkpoints.glob("step-*"), default=None)
    if newest is not None:
        yield "checkpoints", str(rundir.checkpoints)
        best = best_checkpoint(rundir.checkpoints)
        if best is not None and best != newest:
            yield "best", f"{best}  ({run}@best names it)"
        yield "export", f"megarl export {run} {export}"
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
    return [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]


def _total(rows: list[Row], name: str) -> float:
    return math.fsum(_finite(rows, name))


def mean(rows: Sequence[Row], name: str) -> float | None:
    values = _finite(rows, name)
    return math.fsum(values) / len(values) if values else None


def _largest(rows: list[Row], name: str) -> float | None:
    return max(_finite(rows, name), default=None)


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def show(value: float | None, form: str = ",.0f") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)
