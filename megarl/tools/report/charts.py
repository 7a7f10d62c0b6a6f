"""Draws the report's pictures from rows of metrics.jsonl and eval.jsonl. Each function
draws on the axes it is given.

Long runs are averaged into `MOST_POINTS` points, so the report's size does not grow
with the run.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row
from megarl.core.recipe import Recipe
from megarl.core.telemetry.pictures import BLUE, COLORS, GREEN, GREY, ORANGE, RED, drawing, rendered
from megarl.predict.scaling.extrapolate import predict
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.points import PointColumns, curve_of_run
from megarl.run.health import Alarm, Health

MOST_POINTS = 400
CURVE_POINTS = 60
TIME_POINTS = 120
FEWEST_SMOOTHED = 5  # values of which a running mean is drawn; one window has as many


def pass_rate_against(axes: Axes, rows: list[Row], evaluations: list[Row], x: str) -> None:
    """Draw training and held-out pass rates against the column `x` (step or
    compute_hours). Bars are 95 % intervals over prompts.
    """
    xs, ys = series(rows, "pass_rate_train", x)
    axes.plot(*binned(xs, ys, MOST_POINTS), color=BLUE, alpha=0.35, linewidth=1)
    if len(xs) >= FEWEST_SMOOTHED:
        axes.plot(
            *binned(xs, smooth(ys), MOST_POINTS),
            color=BLUE,
            label="training batches (running mean)",
        )
    if evaluations:
        _held_out(axes, evaluations, x)
    if x == "compute_hours":
        _predicted(axes, rows, evaluations)
    label = "step"
    if x != "step":
        unit = next((row["compute_unit"] for row in [*rows, *evaluations]), "device")
        label = f"compute, {unit} hours"
    axes.set(xlabel=label, ylim=(0, 1.04))
    if rows or evaluations:
        axes.legend(loc="lower right")


def _held_out(axes: Axes, evaluations: list[Row], x: str) -> None:
    """Draw held-out pass rates with their intervals, and print the last one."""
    xs, rates = series(evaluations, "pass_rate", x)
    _, lows = series(evaluations, "pass_rate_low", x)
    _, highs = series(evaluations, "pass_rate_high", x)
    lowest = rates[-1]
    errors = None
    if len(lows) == len(highs) == len(rates):  # those of earlier versions have no interval
        lowest = lows[-1]
        errors = np.array([rates - lows, highs - rates])
    axes.errorbar(
        xs, rates, errors, color=ORANGE, fmt="o-", markersize=4, capsize=2.5, label="held out"
    )
    axes.annotate(
        f"{rates[-1]:.3f}",
        (xs[-1], lowest),
        (0, -5),
        textcoords="offset points",
        ha="center",
        va="top",
        color=ORANGE,
        fontsize=9,
        fontweight="bold",
    )


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
    if score != "pass_rate":  # the points already drawn are of all tasks together
        axes.plot(curve.hours, curve.pass_rate, ".", color=GREY, label=score)
    band = predict(fitted, np.geomspace(fitted.window[0], newest["predicted_hours"], CURVE_POINTS))
    axes.fill_between(band.hours, band.low, band.high, color=GREY, alpha=0.2, linewidth=0)
    axes.plot(
        band.hours, band.pass_rate, color=GREY, linestyle="--", label="fitted, with 95 % interval"
    )
    axes.axhline(fitted.A, color=GREY, linewidth=0.8, linestyle=":")


def by_task(axes: Axes, rows: list[Row], evaluations: list[Row], tasks: Sequence[str]) -> bool:
    """Draw each task's pass rates by step, held out and in training (running mean);
    return whether there was anything to draw.
    """
    drawn = False
    for task, color in zip(tasks, itertools.cycle(COLORS)):
        trained_steps, trained_rates = series(rows, f"pass_rate_train/{task}", "step")
        if len(trained_steps) >= FEWEST_SMOOTHED:
            means = binned(trained_steps, smooth(trained_rates), MOST_POINTS)
            axes.plot(*means, color=color, alpha=0.45, linewidth=1)
            drawn = True
        evaluated_steps, rates = series(evaluations, f"pass_rate/{task}", "step")
        # Plotted even without points: the legend then names the task and its colour.
        axes.plot(evaluated_steps, rates, "o-", markersize=4, color=color, label=task)
        if len(evaluated_steps):
            drawn = True
    axes.set(xlabel="step", ylim=(0, 1.04))
    if drawn:
        axes.legend(loc="lower right", title="held out; thin: training", title_fontsize=8)
    return drawn


def lines(axes: Axes, rows: list[Row], names: dict[str, str], *, log: bool = False) -> bool:
    """Draw metrics by step; return whether there was anything to draw. names: the
    metrics, each with its label; log: a logarithmic axis, if any value is above 0.
    """
    drawn = False
    for (name, label), color in zip(names.items(), itertools.cycle(COLORS)):
        xs, ys = series(rows, name, "step")
        if len(xs):
            marker = "." if len(xs) == 1 else None
            axes.plot(*binned(xs, ys, MOST_POINTS), color=color, label=label, marker=marker)
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
    """Draw the seconds of a step, stacked: training, waiting, publishing, checkpoints;
    return whether there was anything to draw.
    """
    parts = {
        "train": ("trains", BLUE),
        "wait": ("waits for a batch", ORANGE),
        "publish": ("publishes", GREEN),
        "checkpoint": ("checkpoint", GREY),
    }
    steps = np.zeros(0)
    seconds = []
    labels = []
    colors = []
    for name, (label, color) in parts.items():
        xs, ys = series(rows, f"{name}_seconds", "step")
        if len(xs) == len(rows) > 1:  # measured in all steps
            steps, averaged = binned(xs, ys, TIME_POINTS)
            seconds.append(averaged)
            labels.append(label)
            colors.append(color)
    if not seconds:
        return False
    axes.stackplot(steps, *seconds, labels=labels, colors=colors, alpha=0.85, linewidth=0)
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


def binned(xs: np.ndarray, ys: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `limit` points, each the mean of neighbours."""
    if len(xs) <= limit:
        return xs, ys
    starts = np.linspace(0, len(xs), limit + 1).astype(int)[:-1]  # of groups of neighbours
    counts = np.diff(np.append(starts, len(xs)))
    mean_x = np.add.reduceat(xs, starts) / counts
    mean_y = np.add.reduceat(ys, starts) / counts
    return mean_x, mean_y


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean over about a twentieth of the run. Windows are
    cut off at the ends of the run.
    """
    half = max(2, len(values) // 40)
    cumulative = np.concatenate([[0.0], np.cumsum(values)])
    positions = np.arange(len(values))
    low = np.maximum(positions - half, 0)
    high = np.minimum(positions + half + 1, len(values))
    return (cumulative[high] - cumulative[low]) / (high - low)


def svg(draw: Callable[[Axes], bool | None], title: str) -> Markup:
    """Return one picture as an inline SVG element; "" if `draw` returns False, because
    there is nothing to draw.
    """
    with drawing((5.6, 2.9)) as (figure, (axes,)):
        axes.set_title(title)
        if draw(axes) is False:
            return Markup("")
        text = rendered(figure, "svg").decode()
    return Markup(text[text.index("<svg") :])  # matplotlib has escaped what it drew


def reward_png(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> bytes:
    """Return a PNG of the pass rate, against steps and against compute."""
    title = f"{recipe.run.name}: pass rate"
    with drawing((11, 4.2), 1, 2, title=title, sharey=True) as (figure, panels):
        by_step, by_compute = panels
        pass_rate_against(by_step, rows, evaluations, "step")
        pass_rate_against(by_compute, rows, evaluations, "compute_hours")
        by_step.set_ylabel("pass rate")
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
    named. Return whether there was anything to draw or name.
    """
    different = {}
    same = []
    for cause, label in CAUSES.items():
        if cause == "total":
            continue
        name = f"parity_mean/{cause}"
        values = [row[name] for row in rows if row.get(name) is not None]
        if any(values):
            different[name] = label
        elif values:
            same.append(label)
    drawn = lines(axes, rows, different, log=True)
    if same:
        axes.annotate(
            f"same bits: {', '.join(same)}", (0.02, 0.02), xycoords="axes fraction", fontsize=9
        )
    return drawn or bool(same)


def alarms(axes: Axes, history: Sequence[Alarm], steps: int) -> bool:
    """Draw when each signal was off its course: a bar from its first step to its last,
    red if it has not ended, and a mark where it was raised. Return whether there was
    any. steps: of the run so far.
    """
    if not history:
        return False
    names = list(dict.fromkeys(alarm.name for alarm in history))[::-1]  # the first on top
    for alarm in history:
        y = names.index(alarm.name)
        end = alarm.until or steps
        color = ORANGE if alarm.until else RED
        axes.barh(y, end - alarm.since, left=alarm.since, height=0.5, color=color)
        axes.plot(alarm.raised, y, "|", color="black", markersize=10)
    labels = [name.replace("_", " ") for name in names]
    axes.set(xlabel="step", xlim=(0, steps), yticks=range(len(names)), yticklabels=labels)
    axes.set_ylim(-0.6, max(len(names), 4) - 0.4)
    axes.set_axisbelow(True)
    return True


def lag(axes: Axes, rows: list[Row], recipe: Recipe) -> bool:
    """Draw the lag of trained tokens, and its limit, above which none may be; return
    whether there was any.
    """
    names = {"lag_max": "largest", "lag_mean": "mean", "window": "window, batches"}
    drawn = lines(axes, rows, names)
    limit = recipe.pipeline.lag_limit
    axes.set_ylim(0, max(axes.get_ylim()[1], limit * 1.12))
    axes.axhline(limit, color=RED, linestyle="--", linewidth=1)
    text = f"k = {limit}" if recipe.pipeline.kind == "pipeline-rl" else f"limit {limit}"
    at = ("axes fraction", "data")
    axes.annotate(text, (0.01, limit), xycoords=at, va="bottom", color=RED, fontsize=8)
    return drawn


def pictures(
    recipe: Recipe, rows: list[Row], timed: list[Row], evaluations: list[Row]
) -> Sequence[Markup]:
    """Return all SVGs of the report, in reading order, without empty ones. timed: the
    rows whose times are meaningful (run/summary.py, `steady`).
    """
    charts = [
        *_pass_rates(recipe, rows, evaluations),
        *_signals(recipe, rows, evaluations),
        *_differences(recipe, rows),
        *_speeds(timed),
        *_completions(rows),
    ]
    return [picture for picture in charts if picture]


def _plain(rows: list[Row], title: str, names: dict[str, str], *, log: bool = False) -> Markup:
    """Return a picture of metrics by step, as `lines` draws them."""
    return svg(lambda axes: lines(axes, rows, names, log=log), title)


def _pass_rates(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> Iterator[Markup]:
    """Yield pictures of the pass rate and, if there are several tasks, of each."""
    for x, title in (("step", "Pass rate, by step"), ("compute_hours", "Pass rate, by compute")):
        yield svg(partial(pass_rate_against, rows=rows, evaluations=evaluations, x=x), title)
    tasks = list(recipe.data.tasks)
    if len(tasks) > 1:
        yield svg(lambda axes: by_task(axes, rows, evaluations, tasks), "Pass rate, by task")
        lengths = {f"completion_tokens_mean/{task}": task for task in tasks}
        yield _plain(rows, "By task: completion length, tokens", lengths)
        truncated = {f"truncation_rate/{task}": task for task in tasks}
        yield _plain(rows, "By task: answers cut off, share", truncated)


def _signals(recipe: Recipe, rows: list[Row], evaluations: list[Row]) -> Iterator[Markup]:
    """Yield pictures of alarms over the steps, and of some metrics they judge."""
    history = Health(rows).history
    title = "Signals off their course (megarl health)"
    yield svg(lambda axes: alarms(axes, history, len(rows)), title)
    tasks = list(recipe.data.tasks)
    suffixes = [f"/{task}" for task in tasks] if len(tasks) > 1 else [""]
    scores = {}
    for suffix in suffixes:
        scores[f"proxy_score{suffix}"] = f"proxy{suffix}"
        scores[f"trusted_score{suffix}"] = f"trusted{suffix}"
    yield _plain(evaluations, "Reward and trusted score of held-out prompts", scores)
    yield _plain(rows, "Turns of an episode", {"turns_mean": "mean"})
    yield _plain(rows, "Entropy of trained tokens, nats", {"entropy": "entropy"})
    yield _plain(rows, "Gradient norm before clipping", {"grad_norm": "grad norm"})


def _differences(recipe: Recipe, rows: list[Row]) -> Iterator[Markup]:
    """Yield pictures of how far servers and learner are apart: in steps, in log-probs,
    in choices of experts.
    """
    yield svg(lambda axes: lag(axes, rows, recipe), "Lag of trained tokens, steps")
    title = "Servers against learner: mean |log-prob difference| by cause"
    yield svg(lambda axes: parity(axes, rows), title)
    yield _plain(rows, "Choices of experts that differ: share", {"parity_routing": ""})


def _speeds(timed: list[Row]) -> Iterator[Markup]:
    """Yield pictures of speeds and of where the time goes. timed: as in `pictures`."""
    names = {"tokens_per_second": "trained", "rollout_tokens_per_second": "sampled"}
    yield _plain(timed, "Tokens a second", names)
    title = "Where the learner's step goes, seconds"
    yield svg(lambda axes: where_time_goes(axes, timed), title)


def _completions(rows: list[Row]) -> Iterator[Markup]:
    """Yield pictures of completions and groups, and of their log-probs' difference."""
    rates = {
        "truncation_rate": "truncated",
        "interruption_rate": "interrupted",
        "format_error_rate": "malformed",
    }
    yield _plain(rows, "Answers cut off, interrupted, malformed: share", rates)
    yield _plain(rows, "Completion length, tokens", {"completion_tokens_mean": ""})
    differences = {"trained_logprob_diff": ""}
    yield _plain(rows, "Learner against behaviour log-probs", differences, log=True)
    groups = {"groups_in_loss": "in the loss", "void_groups": "void"}
    yield _plain(rows, "Groups of a batch", groups)
