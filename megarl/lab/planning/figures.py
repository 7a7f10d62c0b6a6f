"""The picture of `megarl plan --simulate`: lag, idle shares, throughput; and how the split, k and long tails affect them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl.lab.planning.layouts import Plan
from megarl.lab.planning.scenario import Result
from megarl.lab.planning.simulate import Summary
from megarl.lab.report.charts import BLUE, GREEN, GREY, ORANGE, RED, STYLE

COLOURS = (BLUE, ORANGE, GREEN, RED)


def draw(
    results: Mapping[str, Result],
    plans: Sequence[Plan],
    swept: str,
    by_lag: Mapping[int, Summary],
    by_spread: Mapping[float, Summary],
    path: Path,
) -> None:
    """Draw these simulations by name, all plans, and the one called `swept` with other k and other tails, as PNG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 10), layout="constrained")
        axes = figure.subplots(3, 2)
        _lags(axes[0][0], results)
        _shares(axes[0][1], results)
        _steps(axes[1][0], results)
        _split(axes[1][1], plans, results)
        _sweep(axes[2][0], by_lag, f"{swept}: what k does", "pipeline.k")
        _sweep(axes[2][1], by_spread, f"{swept}: what long tails do", "deviation of the lengths' logarithm")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def _lags(axes: Axes, results: Mapping[str, Result]) -> None:
    width = 0.8 / len(results)
    for i, ((name, result), colour) in enumerate(zip(results.items(), COLOURS, strict=False)):
        lags = result.summary.lags
        axes.bar(
            [lag + (i - (len(results) - 1) / 2) * width for lag in lags],
            list(lags.values()),
            width,
            color=colour,
            label=name,
        )
    limit = max(r.plan.recipe.pipeline.lag_limit for r in results.values())
    axes.axvline(limit + 0.5, color=GREY, linestyle=":", linewidth=1)
    axes.annotate(
        "limit",
        (limit + 0.5, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -10),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set_xlim(-0.6, limit + 1.3)
    axes.set_xticks(range(limit + 1))
    axes.set_title("lag of trained tokens")
    axes.set_xlabel("steps")
    axes.set_ylabel("share of tokens")
    axes.legend()


def _shares(axes: Axes, results: Mapping[str, Result]) -> None:
    names = list(results)
    left = np.zeros(len(names))
    parts = (
        ("training", BLUE, [r.summary.training for r in results.values()]),
        ("publishing", ORANGE, [r.summary.publishing for r in results.values()]),
        ("waiting", "#d9dce1", [r.summary.learner_idle for r in results.values()]),
    )
    rows = np.arange(len(names))[::-1]
    for label, colour, shares in parts:
        axes.barh(rows + 0.2, shares, 0.36, left=left, color=colour, label=f"learner {label}")
        left += np.array(shares)
    busy = np.array([r.summary.server_busy for r in results.values()])
    axes.barh(rows - 0.2, busy, 0.36, color=GREEN, label="servers decoding")
    axes.barh(rows - 0.2, 1 - busy, 0.36, left=busy, color="#d9dce1")
    axes.set_yticks(rows, names)
    axes.set_xlim(0, 1)
    axes.grid(axis="y", visible=False)
    axes.set_title("where the time goes")
    axes.set_xlabel("share of a step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def _steps(axes: Axes, results: Mapping[str, Result]) -> None:
    """Draw the seconds of each step, with those that fill the window shaded."""
    for (name, result), colour in zip(results.items(), COLOURS, strict=False):
        ended = np.array([0.0, *(s.ended for s in result.steps)])
        axes.plot(np.diff(ended), color=colour, label=name)
    axes.axvspan(0, max(r.warm_up for r in results.values()), color=GREY, alpha=0.12, linewidth=0)
    usual = max(r.summary.step_seconds for r in results.values())
    axes.set_ylim(0, 2 * usual)  # the first step waits for the first rollouts and would flatten the rest
    axes.set_title("a step (shaded: the window fills, not counted)")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")


def _split(axes: Axes, plans: Sequence[Plan], results: Mapping[str, Result]) -> None:
    """Draw the estimate for the best plan of each split, and what was simulated."""
    best: dict[int, float] = {}
    for plan in plans:  # best first
        best.setdefault(plan.recipe.resources.learner_ranks, plan.tokens_per_second)
    axes.plot(
        *zip(*sorted(best.items()), strict=True), "o-", color="#b9c7da", markersize=4, label="estimate, best layout"
    )
    for (name, result), colour in zip(results.items(), COLOURS, strict=False):
        point = (result.plan.recipe.resources.learner_ranks, result.summary.tokens_per_second)
        axes.plot(*point, "D", color=colour, label=f"{name}, simulated")
        if plans and result.plan.gpus != plans[0].gpus:
            text = f"as written: {result.plan.gpus} GPUs"
            axes.annotate(text, point, xytext=(6, -3), textcoords="offset points", fontsize=8, color=colour)
    axes.set_ylim(bottom=0)
    axes.set_title("completion tokens a second, by the split")
    axes.set_xlabel("GPUs of the learner; the others generate")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend()


def _sweep(axes: Axes, found: Mapping[Any, Summary], title: str, label: str) -> None:
    rows = np.arange(len(found))
    axes.bar(rows, [s.tokens_per_second for s in found.values()], 0.5, color="#b9c7da")
    axes.set_xticks(rows, [f"{value:g}" for value in found])
    axes.set_xlabel(label)
    axes.set_ylabel("completion tokens a second")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="x", visible=False)
    other = axes.twinx()
    other.plot(rows, [s.lag_mean for s in found.values()], "o-", color=ORANGE, markersize=4)
    other.set_ylim(bottom=0)
    other.set_ylabel("mean lag, steps", color=ORANGE)
    other.grid(visible=False)
    axes.set_title(title)
