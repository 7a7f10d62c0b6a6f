"""Pictures of a study.

scaling: a panel a variant, its seeds and fit over those of the first variant, which all are compared with.
final:   each variant's last pass rate, seed by seed, and its fitted asymptote with interval.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from megarl.lab.report.pictures import BLUE, GREY, ORANGE, STYLE

if TYPE_CHECKING:
    from megarl.lab.study.results import Row

PANELS_A_LINE = 4
CURVE_POINTS = 200


def plot_scaling(rows: "Sequence[Row]", path: Path) -> None:
    """Writes `path`.png and `path`.svg."""
    with matplotlib.rc_context(STYLE):
        lines = -(-len(rows) // PANELS_A_LINE)
        columns = min(len(rows), PANELS_A_LINE)
        figure = Figure(figsize=(3.1 * columns, 2.6 * lines + 0.5), layout="constrained")
        panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
        for axes, row in zip(panels, rows, strict=False):
            if row is not rows[0]:
                _curve(axes, rows[0], GREY, rows[0].variant)
            _curve(axes, row, BLUE, "fit and points of the variant")
            axes.set_title(row.variant)
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        for axes in panels[len(rows) - columns : len(rows)]:  # the lowest of each column
            axes.tick_params(labelbottom=True)
        unit = rows[0].runs[0][0].compute_unit
        figure.supxlabel(f"compute, {unit}-hours", fontsize=9)
        figure.supylabel("held-out pass rate", fontsize=9)
        _save(figure, path)


def plot_final(rows: "Sequence[Row]", path: Path) -> None:
    """Writes `path`.png and `path`.svg; the first variant on top, a dotted line at its mean."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.42 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for y, row in enumerate(rows):
            labels = ("last pass rate of a seed", "asymptote A, 95 %") if y == 0 else (None, None)
            axes.plot(row.final, [y] * len(row.final), "o", color=BLUE, alpha=0.75, label=labels[0])
            if row.fit is not None:
                axes.plot(row.fit.A_interval, [y + 0.22] * 2, color=ORANGE, linewidth=2, label=labels[1])
                axes.plot([row.fit.A], [y + 0.22], "|", color=ORANGE, markersize=9)
        axes.axvline(rows[0].final.mean(), color=GREY, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [row.variant for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel("held-out pass rate")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncol=2)
        _save(figure, path)


def _curve(axes: Any, row: "Row", color: str, label: str) -> None:
    for run in row.runs:
        axes.plot(
            [p.compute_hours for p in run], [p.pass_rate for p in run], "o", color=color, markersize=3, alpha=0.5,
            markeredgewidth=0,
        )  # fmt: skip
    if row.fit is not None:
        hours = np.linspace(*row.fit.window, CURVE_POINTS)
        axes.plot(hours, row.fit(hours), color=color, label=label)


def _save(figure: Figure, path: Path) -> None:
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=140)
