"""Draws the report's pictures from rows of metrics.jsonl and eval.jsonl. Each function
draws on the axes it is given.

Long runs are averaged into `MOST_POINTS` points, so the report's size does not grow
with the run.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row
from megarl.core.recipe import Recipe
from megarl.lab.pictures import BLUE, COLORS, GREEN, GREY, ORANGE, RED, drawing, rendered
from megarl.lab.scaling.extrapolate import predict
from megarl.lab.scaling.fit import fit
from megarl.lab.scaling.points import PointColumns, curve_of_run
from megarl.run.health import Alarm, Health

MOST_POINTS = 400
CURVE_POINTS = 60
TIME_POINTS = 120


def pass_rate_against(axes: Axes, rows: list[Row], evaluations: list[Row], x: str) -> None:
    """Draw training and held-out pass rates against `x` (step or compute_hours). Bars
    are 95 % intervals over prompts.
    """
    xs, ys = series(rows, "pass_rate_train", x)
    axes.plot(*binned(xs, ys, MOST_POINTS), color=BLUE, alpha=0.35, linewidth=1)
    if len(xs) > 4:
        axes.plot(
            *binned(xs, smooth(ys), MOST_POINTS),
            color=BLUE,
            label="training batches (running mean)",
        )
    if evaluations:
        ex, rates = series(evaluations, "pass_rate", x)
        lows, highs = (series(evaluations, f"pass_rate_{end}", x)[1] for end in ("low", "high"))
        known = (
            len(lows) == len(highs) == len(rates)
        )  # evaluations of earlier versions have no interval
        errors = np.array([rates - lows, highs - rates]) if known else None
        axes.errorbar(
            ex, rates, errors, color=ORANGE, fmt="o-", markersize=4, capsize=2.5, label="held out"
        )
        style: dict[str, Any] = {
            "ha": "center",
            "va": "top",
            "color": ORANGE,
            "fontsize": 9,
            "fontweight": "bold",
        }
        below = (ex[-1], lows[-1] if known else rates[-1])
        axes.annotate(f"{rates[-1]:.3f}", below, (0, -5), textcoords="offset points", **style)
    if x == "compute_hours":
        _predicted(axes, rows, evaluations)
    unit = next((r["compute_unit"] for r in [*rows, *evaluations]), "device")
    axes.set(xlabel="step" if x == "step" else f"compute, {unit} hours", ylim=(0, 1.04))
    if rows or evaluations:
        axes.legend(loc="lower right")


def _predicted(axes: Axes, rows: list[Row], evaluations: list[Row]) -> None:
    """Draw the fitted law, if there is one, with its 95 % interval, from its first
    point to the compute of the last step.
    """
    newest = evaluations[-1] if evaluations else {}
    if "predicted_hours" not in newest:
        return
    score = newest.get("predicted_score", "pass_rate")
    try:
        curve = curve_of_run("run", evaluations, rows, "the run", PointColumns(score=score))
        fitted = fit([curve])
    except MegarlError:  # the row has a fit, but these rows do not reproduce it
        return
    if score != "pass_rate":  # the points so far cover all tasks together
        axes.plot(curve.hours, curve.pass_rate, ".", color=GREY, label=score)
    band = predict(fitted, np.geomspace(fitted.window[0], newest["predicted_hours"], CURVE_POINTS))
    axes.fill_between(band.hours, band.low, band.high, color=GREY, alpha=0.2, linewidth=0)
    axes.plot(
        band.hours, band.pass_rate, color=GREY, linestyle="--", label="fitted, with 95 % interval"
    )
    axes.axhline(fitted.A, color=GREY, linewidth=0.8, linestyle=":")


def by_task(axes: Axes, rows: list[Row], evaluations: list[Row], tasks: Sequence[str]) -> bool:
    """Draw each task's pass rates by step, held out and in training (running mean);
    return whether there are any.
    """
    drawn = False
    for task, color in zip(tasks, itertools.cycle(COLORS)):
        xs, ys = series(rows, f"pass_rate_train/{task}", "step")
        if len(xs) > 4:
            axes.plot(*binned(xs, smooth(ys), MOST_POINTS), color=color, alpha=0.45, linewidth=1)
        xs, ys = series(evaluations, f"pass_rate/{task}", "step")
        axes.plot(xs, ys, "o-", markersize=4, color=color, label=task)
        drawn = drawn or bool(len(xs))
    axes.set(xlabel="step", ylim=(0, 1.04))
    if drawn:
        axes.legend(loc="lower right", title="held out; thin: training", title_fontsize=8)
    return drawn


def lines(axes: Axes, rows: list[Row], names: dict[str, str], *, log: bool = False) -> bool:
    """Draw metrics by step; return whether there was anything to draw. names: the
    metrics, each with its label.
    """
    drawn = False
    for (name, label), color in zip(names.items(), itertools.cycle(COLORS)):
        xs, ys = series(rows, name, "step")
        if len(xs):
            axes.plot(
                *binned(xs, ys, MOST_POINTS),
                color=color,
                label=label,
                marker="." if len(xs) == 1 else None,
            )
            drawn = True
    if log and drawn and any(np.asarray(line.get_ydata()).max() > 0 for line in axes.lines):
        axes.set_yscale("log")
    elif drawn:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlabel("step")
    if drawn and len(names) > 1:
        axes.legend(loc="best")
    return drawn


def where_time_goes(axes: Axes, rows: list[Row]) -> bool:
    """Draw the seconds of a step, stacked: training, waiting, publishing, checkpoints."""
    parts = {
        "train": "trains",
        "wait": "waits for a batch",
        "publish": "publishes",
        "checkpoint": "checkpoint",
    }
    colors = dict(zip(parts, (BLUE, ORANGE, GREEN, GREY), strict=True))
    measured = {name: series(rows, f"{name}_seconds", "step") for name in parts}
    full = {
        name: binned(xs, ys, TIME_POINTS)
        for name, (xs, ys) in measured.items()
        if len(xs) == len(rows) > 1
    }
    if not full:
        return False
    steps = next(iter(full.values()))[0]
    seconds = [ys for _, ys in full.values()]
    style: dict[str, Any] = {
        "labels": [parts[name] for name in full],
        "colors": [colors[name] for name in full],
    }
    axes.stackplot(steps, *seconds, **style, alpha=0.85, linewidth=0)
    axes.set(xlabel="step", ylim=(0, axes.get_ylim()[1] * 1.25))  # room for the legend
    axes.set_axisbelow(True)
    axes.margins(x=0)
    axes.legend(loc="upper right", ncols=2)
    return True


def series(rows: list[Row], name: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a metric's finite values and their positions on axis `x`: (positions,
    values), both [points] float64.
    """
    points = [
        (row[x], row[name])
        for row in rows
        if row.get(name) is not None and math.isfinite(row[name])
    ]
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def binned(xs: np.ndarray, ys: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points, each the mean of neighbours."""
    if len(xs) <= most:
        return xs, ys
    edges = np.linspace(0, len(xs), most + 1).astype(int)[:-1]
    counts = np.diff(np.append(edges, len(xs)))
    return np.add.reduceat(xs, edges) / counts, np.add.reduceat(ys, edges) / counts


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean over about a twentieth of the run. Windows are
    cut off at the ends of the run.
    """
    half = max(2, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def svg(draw: Callable[[Axes], bool | None], title: str) -> Markup:
    """Return one picture as an inline SVG element, or "" if there was nothing to draw."""
    with drawing((5.6, 2.9)) as (figure, (axes,)):
        axes.set_title(title)
        if draw(axes) is False:
            return Markup("")
        text = rendered(figure, "svg").decode()
    return Markup(text[text.index("<svg") :])  # matplotlib has escaped what it drew


def reward_png(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> bytes:
    """Return a PNG of the pass rate, against steps and against compute."""
    with drawing((11, 4.2), 1, 2, title=f"{recipe.run.name}: pass rate", sharey=True) as (
        figure,
        (left, right),
    ):
        pass_rate_against(left, rows, evaluations, "step")
        pass_rate_against(right, rows, evaluations, "compute_hours")
        left.set_ylabel("pass rate")
        return rendered(figure, "png")


CAUSES = {
    "kernels": "equal weights",
    "decode": "decode",
    "stale_kv": "stale KV",
    "staleness": "staleness",
    "total": "all together",
}
"""The report's names for the causes of differences between servers and learner."""


def parity(axes: Axes, rows: list[Row]) -> bool:
    """Draw the mean difference by cause; a cause whose difference is always 0 is only
    named.
    """
    drawable = [cause for cause in CAUSES if cause != "total"]
    measured = {
        c: [v for r in rows if (v := r.get(f"parity_mean/{c}")) is not None] for c in drawable
    }
    same = [CAUSES[c] for c, values in measured.items() if values and not any(values)]
    drawn = lines(
        axes, rows, {f"parity_mean/{c}": CAUSES[c] for c, v in measured.items() if any(v)}, log=True
    )
    if same:
        axes.annotate(
            f"same bits: {', '.join(same)}", (0.02, 0.02), xycoords="axes fraction", fontsize=9
        )
    return drawn or bool(same)


def alarms(axes: Axes, history: Sequence[Alarm], steps: int) -> bool:
    """Draw when each signal was off its course: a bar from its first step to its last,
    and a mark where it was raised.
    """
    if not history:
        return False
    names = list(dict.fromkeys(alarm.name for alarm in history))[::-1]
    for alarm in history:
        y = names.index(alarm.name)
        end = alarm.until or steps
        axes.barh(
            y, end - alarm.since, left=alarm.since, height=0.5, color=ORANGE if alarm.until else RED
        )
        axes.plot(alarm.raised, y, "|", color="black", markersize=10)
    axes.set(
        xlabel="step",
        xlim=(0, steps),
        yticks=range(len(names)),
        yticklabels=[n.replace("_", " ") for n in names],
    )
    axes.set_ylim(-0.6, max(len(names), 4) - 0.4)
    axes.set_axisbelow(True)
    return True


def pictures(
    recipe: Recipe, rows: list[Row], timed: list[Row], evaluations: list[Row]
) -> Sequence[Markup]:
    """Return all SVGs of the report, in reading order, without empty ones. timed: the
    rows whose times are meaningful.
    """
    history = Health(rows).history

    def lag(axes: Axes) -> bool:
        names = {"lag_max": "largest", "lag_mean": "mean", "window": "window, batches"}
        drawn = lines(axes, rows, names)
        limit = recipe.pipeline.lag_limit
        axes.set_ylim(0, max(axes.get_ylim()[1], limit * 1.12))
        axes.axhline(
            limit, color=RED, linestyle="--", linewidth=1
        )  # no trained token may be above it
        text = f"k = {limit}" if recipe.pipeline.kind == "pipeline-rl" else f"limit {limit}"
        at = ("axes fraction", "data")
        axes.annotate(text, (0.01, limit), xycoords=at, va="bottom", color=RED, fontsize=8)
        return drawn

    def plain(title: str, names: dict[str, str], *, log: bool = False) -> Markup:
        return svg(lambda axes: lines(axes, rows, names, log=log), title)

    tasks = list(recipe.data.tasks)
    by_tasks = [
        svg(lambda a: by_task(a, rows, evaluations, tasks), "Pass rate, by task"),
        plain(
            "By task: completion length, tokens",
            {f"completion_tokens_mean/{task}": task for task in tasks},
        ),
        plain(
            "By task: answers cut off, share", {f"truncation_rate/{task}": task for task in tasks}
        ),
    ]
    rates = {
        "truncation_rate": "truncated",
        "interruption_rate": "interrupted",
        "format_error_rate": "malformed",
    }
    ends = [f"/{task}" for task in tasks] if len(tasks) > 1 else [""]
    beside = {f"{n}_score{end}": f"{n}{end}" for end in ends for n in ("proxy", "trusted")}
    speed = {"tokens_per_second": "trained", "rollout_tokens_per_second": "sampled"}
    charts = [
        svg(lambda a: pass_rate_against(a, rows, evaluations, "step"), "Pass rate, by step"),
        svg(
            lambda a: pass_rate_against(a, rows, evaluations, "compute_hours"),
            "Pass rate, by compute",
        ),
        *(by_tasks if len(tasks) > 1 else ()),
        svg(lambda a: alarms(a, history, len(rows)), "Signals off their course (megarl health)"),
        svg(
            lambda a: lines(a, evaluations, beside), "Reward and trusted score of held-out prompts"
        ),
        plain("Turns of an episode", {"turns_mean": "mean"}),
        plain("Entropy of trained tokens, nats", {"entropy": "entropy"}),
        plain("Gradient norm before clipping", {"grad_norm": "grad norm"}),
        svg(lag, "Lag of trained tokens, steps"),
        svg(
            lambda a: parity(a, rows),
            "Servers against learner: mean |log-prob difference| by cause",
        ),
        plain("Choices of experts that differ: share", {"parity_routing": ""}),
        svg(lambda a: lines(a, timed, speed), "Tokens a second"),
        svg(lambda a: where_time_goes(a, timed), "Where the learner's step goes, seconds"),
        plain("Answers cut off, interrupted, malformed: share", rates),
        plain("Completion length, tokens", {"completion_tokens_mean": ""}),
        plain("Learner against behaviour log-probs", {"trained_logprob_diff": ""}, log=True),
        plain("Groups of a batch", {"groups_in_loss": "in the loss", "void_groups": "void"}),
    ]
    return [picture for picture in charts if picture]
