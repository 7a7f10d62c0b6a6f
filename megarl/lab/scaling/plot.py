"""Pictures of fits: points, curve, extrapolation, its interval, C_mid and A; and the efficiency plot.

Left over the logarithm of compute, where ScaleRL's law is an S; right over compute itself, which shows what an hour gains.

The interactive picture is one HTML file containing its data and script, which opens offline (page.html).
"""

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_atomically
from megarl.lab.report import pictures
from megarl.lab.report.pictures import COLORS, GREY, STYLE
from megarl.lab.scaling.extrapolate import Prediction, predict
from megarl.lab.scaling.fit import Fit
from megarl.lab.scaling.points import HOURS, Curve, amount
from megarl.lab.scaling.published import Law

Series = Mapping[str, tuple[Sequence[Curve], Fit | None]]
BAND_POINTS = 48
BEYOND = 3.0
"""How far curves are drawn by default: this many times the compute of the last point."""


def plot_fits(
    series: Series,
    path_without_suffix: Path,
    *,
    title: str = "",
    until: float | None = None,
    laws: Sequence[Law] = (),
) -> list[Path]:
    """Write the picture as PNG and SVG. until: hours to which curves are drawn; laws: published fits drawn beneath."""
    if not any(len(curve.hours) for curves, _ in series.values() for curve in curves):
        raise MegarlError("nothing to draw: no run has a point after its training began")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 4.6), layout="constrained")
        log, linear = figure.subplots(1, 2, sharey=True)
        if title:
            figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        first, end = first_point(series), drawn_to(series, until)
        bands = {name: band(fit, end) for name, (_, fit) in series.items() if fit is not None}
        for axes in (log, linear):
            _draw_laws(axes, laws, first, end)
            _draw(axes, series, bands, end)
        unit = next(c.unit for curves, _ in series.values() for c in curves)
        if laws and unit == "core":
            raise MegarlError("the published fits are in GPU-hours; a run on CPU cores cannot be laid over them")
        log.set_xscale("log")
        log.set_ylabel("pass rate")
        linear.set_xlim(0, end)
        linear.xaxis.set_major_formatter(lambda hours, _position: amount(hours))
        for axes in (log, linear):
            axes.set_xlabel(f"compute, {HOURS[unit]}")
        log.set_title("logarithm of compute")
        linear.set_title("compute")
        _explain(linear)
        return _save(figure, path_without_suffix)


def plot_efficiency(fits: Mapping[str, Fit], path_without_suffix: Path) -> list[Path]:
    """Plot log F against log C: points on a line of slope B, if the law holds."""
    from megarl.lab.scaling.compare import efficiency

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6, 4.6), layout="constrained")
        axes = figure.subplots()
        for (name, fit), color in zip(fits.items(), _colors(len(fits)), strict=True):
            x, y = efficiency(fit, fit.hours, fit.pass_rate)
            ends = np.log10(np.array(fit.window))
            axes.plot(x, y, "o", color=color, markersize=4, alpha=0.8)
            axes.plot(ends, fit.B * ends, color=color, label=f"{name}: slope B = {fit.B:.2f}, A = {fit.A:.3f}")
        unit = next(iter(fits.values())).unit
        axes.set_xlabel(f"log10 of compute, {HOURS[unit]}")
        axes.set_ylabel("log10 F(R) = B · log10 C")
        axes.set_title("Efficiency")
        axes.legend(loc="upper left")
        return _save(figure, path_without_suffix)


def first_point(series: Series) -> float:
    return float(_hours(series).min())


def drawn_to(series: Series, until: float | None) -> float:
    """Return the hours to which curves are drawn."""
    return until or BEYOND * float(_hours(series).max())


def _hours(series: Series) -> np.ndarray:
    return np.concatenate([curve.hours for curves, _ in series.values() for curve in curves])


def band(fit: Fit, end: float) -> Prediction:
    """Return the curve and its interval, from a little before the first point to `end`."""
    return predict(fit, np.geomspace(fit.window[0] / 2, max(end, fit.window[1]), BAND_POINTS))


def _draw_laws(axes: Axes, laws: Sequence[Law], first: float, end: float) -> None:
    for law, dashes in zip(laws, cycle([(2, 1), (6, 2), (6, 1, 1, 1)]), strict=False):
        hours = np.geomspace(first / 2, end, 300)
        label = f"{law.name} (published; R_0 = {law.r0:g}, read off figure 1)"
        axes.plot(hours, law(hours), color=GREY, linestyle=(0, dashes), linewidth=1.2, label=label)


def _draw(axes: Axes, series: Series, bands: Mapping[str, Prediction], end: float) -> None:
    for (name, (curves, fit)), color in zip(series.items(), _colors(len(series)), strict=True):
        for curve in curves:
            inside = used(curve, fit)
            axes.plot(curve.hours[inside], curve.pass_rate[inside], "o", color=color, markersize=3.5, zorder=3)
            axes.plot(
                curve.hours[~inside],
                curve.pass_rate[~inside],
                "o",
                color=color,
                markersize=3.5,
                fillstyle="none",
                zorder=3,
            )
        if fit is None:
            axes.plot([], [], "o", color=color, markersize=3.5, fillstyle="none", label=f"{name}: no fit")
            continue
        shown = bands[name]
        seen = np.linspace(fit.window[0], fit.window[1], 300)
        beyond = np.geomspace(fit.window[1], max(end, fit.window[1]), 300)
        axes.fill_between(shown.hours, shown.low, shown.high, color=color, alpha=0.15, linewidth=0)
        label = f"{name}: A {fit.A:.3f}, B {fit.B:.2f}, C_mid {amount(fit.C_mid)}"
        axes.plot(seen, fit(seen), color=color, label=label)
        axes.plot(beyond, fit(beyond), color=color, linestyle=(0, (4, 2)))
        axes.axhline(fit.A, color=color, linewidth=0.8, linestyle=":")
        if shown.hours[0] <= fit.C_mid <= end:
            axes.plot(
                [fit.C_mid],
                fit(np.array([fit.C_mid])),
                "D",
                color="white",
                markeredgecolor=color,
                markersize=6,
                zorder=4,
            )
            axes.axvline(fit.C_mid, color=color, linewidth=0.8, linestyle=":")


def _explain(axes: Axes) -> None:
    """Draw the legend, which explains the marks."""
    axes.plot([], [], "D", color="white", markeredgecolor=GREY, markersize=6, label="C_mid")
    axes.plot([], [], color=GREY, linewidth=0.8, linestyle=":", label="A, the ceiling")
    axes.plot([], [], color=GREY, linestyle=(0, (4, 2)), label="extrapolated; shaded: 95 % interval")
    axes.plot([], [], "o", color=GREY, markersize=3.5, fillstyle="none", label="outside the window")
    axes.legend(loc="lower right")


def used(curve: Curve, fit: Fit | None) -> np.ndarray:
    """Return which points [points] bool are in the fit's window."""
    if fit is None:
        return np.zeros(len(curve.hours), dtype=bool)
    return (curve.hours >= fit.window[0]) & (curve.hours <= fit.window[1])


def _colors(count: int) -> list[str]:
    return [COLORS[n % len(COLORS)] for n in range(count)]


def _save(figure: Figure, path: Path) -> list[Path]:
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, not again for each format
    written = []
    for kind in ("png", "svg"):
        data = io.BytesIO()
        figure.savefig(data, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
        target = path.with_name(f"{path.name}.{kind}")
        write_atomically(target, data.getvalue())
        written.append(target)
    return written


TEMPLATE = Path(__file__).with_name("page.html")


def write_page(
    series: Series, path_without_suffix: Path, *, title: str = "", until: float | None = None, laws: Sequence[Law] = ()
) -> Path:
    """Write BASE.html; arguments as in plot_fits."""
    end = drawn_to(series, until)
    unit = next(curve.unit for curves, _ in series.values() for curve in curves)
    data = {
        "title": title or "Pass rate against compute",
        "unit": HOURS[unit],
        "end": end,
        "series": [_series(n, name, curves, fit, end) for n, (name, (curves, fit)) in enumerate(series.items())],
        "laws": [_law(law, first_point(series) / 2, end) for law in laws],
    }
    target = path_without_suffix.with_name(f"{path_without_suffix.name}.html")
    pictures.write_page(TEMPLATE, target, data=pictures.embedded(data))
    return target


def _series(n: int, name: str, curves: Sequence[Curve], fit: Fit | None, end: float) -> dict[str, Any]:
    """Return a series' data. points: hours, pass rate, whether in the window, name. curve: hours, pass rate, low, high."""
    result: dict[str, Any] = {"name": name, "color": COLORS[n % len(COLORS)], "fit": None, "curve": []}
    result["points"] = [
        [float(hours), float(rate), bool(inside), curve.name]
        for curve in curves
        for hours, rate, inside in zip(curve.hours, curve.pass_rate, used(curve, fit), strict=True)
    ]
    if fit is not None:
        line = band(fit, end)
        result["fit"] = fit.record()
        result["curve"] = [
            [float(x) for x in row] for row in zip(line.hours, line.pass_rate, line.low, line.high, strict=True)
        ]
    return result


def _law(law: Law, first: float, end: float) -> dict[str, Any]:
    hours = np.geomspace(first, end, 80)
    curve = [[float(h), float(r)] for h, r in zip(hours, law(hours), strict=True)]
    return {"name": f"{law.name} (published; R_0 = {law.r0:g}, read off figure 1)", "curve": curve}
