"""The picture of `megarl plan --simulate`: lag, idle shares, throughput; and how the
split, k and long tails affect them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_atomically
from megarl.core.telemetry.pictures import BLUE, COLORS, GREEN, GREY, ORANGE, drawing, rendered
from megarl.predict.planning.layouts import Plan
from megarl.predict.planning.show import Simulated
from megarl.predict.planning.simulate import Simulation, Summary

PALE = "#b9c7da"
LIGHT = "#d9dce1"


def check_format(path: Path) -> None:
    """Raise MegarlError, before anything is simulated, if the name does not end in a
    known picture format.
    """
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise MegarlError(
            f"--out: {path}: no picture is drawn as {path.suffix}; end the name with .png or .svg"
        )


def draw(
    results: Mapping[str, Simulation], plans: Sequence[Plan], simulated: Simulated, path: Path
) -> None:
    """Draw the simulations `results`, all plans, and the swept plan with other k and
    other tails of lengths.
    """
    with drawing((13, 10), 3, 2) as (figure, axes):
        _lags(axes[0], results)
        _shares(axes[1], results)
        _steps(axes[2], results)
        _split(axes[3], plans, results)
        title = f"{simulated.swept}: effect of k"
        _sweep(axes[4], simulated.by_lag, title, "pipeline.k")
        title = f"{simulated.swept}: effect of long tails"
        _sweep(axes[5], simulated.by_spread, title, "standard deviation of log length")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, rendered(figure, path.suffix[1:] or "png", dpi=110))


def _lags(axes: Axes, results: Mapping[str, Simulation]) -> None:
    """Draw the distribution of the lag of trained tokens."""
    width = 0.8 / len(results)
    middle = (len(results) - 1) / 2
    for i, ((name, result), colour) in enumerate(zip(results.items(), COLORS, strict=False)):
        lags = result.summary.lags
        offset = (i - middle) * width
        places = [lag + offset for lag in lags]
        axes.bar(places, list(lags.values()), width, color=colour, label=name)
    limit = max(result.plan.recipe.pipeline.lag_limit for result in results.values())
    axes.axvline(limit + 0.5, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        "limit",
        (limit + 0.5, 1),
        (3, -10),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set(title="lag of trained tokens", xlabel="steps", ylabel="share of tokens")
    axes.set(xlim=(-0.6, limit + 1.3), xticks=range(limit + 1))
    axes.legend()


def _shares(axes: Axes, results: Mapping[str, Simulation]) -> None:
    """Draw what learner and servers do during a step."""
    summaries = [result.summary for result in results.values()]
    rows = np.arange(len(results))[::-1]
    offset = np.zeros(len(results))
    parts = {
        "training": ("training", BLUE),
        "publishing": ("publishing", ORANGE),
        "waiting": ("learner_idle", LIGHT),
    }
    for label, (name, colour) in parts.items():
        shares = np.array([getattr(summary, name) for summary in summaries])
        axes.barh(rows + 0.2, shares, 0.36, left=offset, color=colour, label=f"learner {label}")
        offset += shares
    busy = np.array([summary.server_busy for summary in summaries])
    axes.barh(rows - 0.2, busy, 0.36, color=GREEN, label="servers decoding")
    axes.barh(rows - 0.2, 1 - busy, 0.36, left=busy, color=LIGHT)
    axes.set_yticks(rows, list(results))
    axes.grid(axis="y", visible=False)
    axes.set(title="where the time goes", xlabel="share of a step", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def _steps(axes: Axes, results: Mapping[str, Simulation]) -> None:
    """Draw the seconds of each step; the steps that fill the window are shaded."""
    for (name, result), colour in zip(results.items(), COLORS, strict=False):
        ends = [0.0, *(step.ended for step in result.steps)]
        axes.plot(np.diff(ends), color=colour, label=name)
    warm_up = max(result.warm_up for result in results.values())
    axes.axvspan(0, warm_up, color=GREY, alpha=0.12, linewidth=0)
    # The first step waits for the first rollouts and would flatten the rest.
    usual = max(result.summary.step_seconds for result in results.values())
    axes.set_ylim(0, 2 * usual)
    axes.set(
        title="a step (shaded: the window fills, not counted)", xlabel="step", ylabel="seconds"
    )


def _split(axes: Axes, plans: Sequence[Plan], results: Mapping[str, Simulation]) -> None:
    """Draw the estimate for the best plan of each split, and simulated throughputs."""
    best: dict[int, float] = {}
    for plan in plans:  # best first
        best.setdefault(plan.recipe.resources.learner_ranks, plan.tokens_per_second)
    gpus = sorted(best)
    estimates = [best[n] for n in sorted(best)]
    axes.plot(gpus, estimates, "o-", color=PALE, markersize=4, label="estimate, best layout")
    for (name, result), colour in zip(results.items(), COLORS, strict=False):
        ranks = result.plan.recipe.resources.learner_ranks
        speed = result.summary.tokens_per_second
        point = (ranks, speed)
        axes.plot(ranks, speed, "D", color=colour, label=f"{name}, simulated")
        if plans and result.plan.gpus != plans[0].gpus:
            text = f"as written: {result.plan.gpus} GPUs"
            axes.annotate(
                text, point, xytext=(6, -3), textcoords="offset points", fontsize=8, color=colour
            )
    axes.set_ylim(bottom=0)
    axes.set(
        title="completion tokens a second, by the split",
        xlabel="GPUs of the learner; the others generate",
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend()


def _sweep(
    axes: Axes, summaries: Mapping[int, Summary] | Mapping[float, Summary], title: str, label: str
) -> None:
    """Draw throughput (bars) and lag (line) by a value that is varied."""
    rows = np.arange(len(summaries))
    throughputs = [summary.tokens_per_second for summary in summaries.values()]
    axes.bar(rows, throughputs, 0.5, color=PALE)
    axes.set_xticks(rows, [f"{value:g}" for value in summaries])
    axes.set(title=title, xlabel=label, ylabel="completion tokens a second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", visible=False)
    lag_axes = axes.twinx()
    lags = [summary.lag_mean for summary in summaries.values()]
    lag_axes.plot(rows, lags, "o-", color=ORANGE, markersize=4)
    lag_axes.set_ylim(bottom=0)
    lag_axes.set_ylabel("mean lag, steps", color=ORANGE)
    lag_axes.grid(visible=False)
