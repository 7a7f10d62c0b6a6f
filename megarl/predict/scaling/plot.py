"""Draws pictures of fits: points, curve, extrapolation with its interval, C_mid and A;
and the efficiency plot.

The left panel is over the logarithm of compute, where ScaleRL's law is an S; the right
one over compute itself, which shows what an hour gains. The same is drawn as an
interactive page, one HTML file that opens offline (page.html).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from megarl.core.base.errors import MegarlError
from megarl.core.telemetry import pictures
from megarl.core.telemetry.pictures import COLORS, GREY, drawing, logarithmic
from megarl.predict.scaling.extrapolate import Prediction, predict
from megarl.predict.scaling.fit import Fit
from megarl.predict.scaling.points import Curve, amount, unit_name
from megarl.predict.scaling.published import Law
from megarl.predict.scaling.slices import KINDS, Slice

Series = Mapping[str, tuple[Sequence[Curve], Fit | None]]
TEMPLATE = Path(__file__).with_name("page.html")
BAND_POINTS = 48
BEYOND = 3.0  # by default curves are drawn up to this many times the compute of the last point
EXTRAPOLATED = (0, (4, 2))  # the dashes of a curve beyond its points
LAW_DASHES = [(2, 1), (6, 2), (6, 1, 1, 1)]


@dataclass(frozen=True)
class _Line:
    """What is drawn of one entry. fit, band: None if it could not be fitted."""

    name: str
    color: str
    curves: Sequence[Curve]
    fit: Fit | None
    band: Prediction | None


def plot_fits(
    series: Series,
    path_without_suffix: Path,
    *,
    until: float | None = None,
    laws: Sequence[Law] = (),
) -> list[Path]:
    """Write the picture as PNG, SVG and HTML; return the files. until: hours up to
    which curves are drawn; laws: published fits to draw too. MegarlError if there is
    no point, or if published fits and points have different units.
    """
    all_curves = [curve for curves, _ in series.values() for curve in curves]
    hours = np.concatenate([curve.hours for curve in all_curves])
    unit = all_curves[0].unit
    if not len(hours):
        raise MegarlError("nothing to draw: no run has a point after its training began")
    if laws and unit != "gpu":
        raise MegarlError(
            f"the published fits are in GPU-hours; a run in {unit_name(unit)} cannot be drawn with"
            " them"
        )
    start = float(hours.min()) / 2
    end = until or BEYOND * float(hours.max())
    lines = []
    for (name, (curves, fit)), color in zip(series.items(), cycle(COLORS), strict=False):
        lines.append(_Line(name, color, curves, fit, _band(fit, end)))
    law_hours = np.geomspace(start, end, 300)
    with drawing((12, 4.6), 1, 2, sharey=True) as (figure, (log, linear)):
        for axes, heading in ((log, "logarithm of compute"), (linear, "compute")):
            _draw_laws(axes, laws, law_hours)
            for line in lines:
                _draw(axes, line, end)
            axes.set(title=heading, xlabel=f"compute, {unit_name(unit)}")
        log.set_ylabel("pass rate")
        logarithmic(log)
        linear.set_xlim(0, end)
        linear.xaxis.set_major_formatter(lambda hours, _position: amount(hours))
        _add_legend(linear)
        written = pictures.save(figure, path_without_suffix)
    fewer_hours = np.geomspace(law_hours[0], end, 80)
    page_laws = []
    for law in laws:
        curve = _rows(fewer_hours, law(fewer_hours))
        page_laws.append({"name": _label(law), "curve": curve})
    data = {
        "unit": unit_name(unit),
        "end": end,
        "series": [_page_series(line) for line in lines],
        "laws": page_laws,
    }
    page = path_without_suffix.with_name(f"{path_without_suffix.name}.html")
    pictures.write_page(TEMPLATE, page, data=pictures.embedded(data))
    return [*written, page]


def _band(fit: Fit | None, end: float) -> Prediction | None:
    """Predict from a little before the first point up to `end`."""
    if fit is None:
        return None
    first, last = fit.window
    hours = np.geomspace(first / 2, max(end, last), BAND_POINTS)
    return predict(fit, hours)


def _draw_laws(axes: Axes, laws: Sequence[Law], hours: np.ndarray) -> None:
    """Draw published fits in grey, each with its own dashes. hours [points]: where."""
    for law, dashes in zip(laws, cycle(LAW_DASHES), strict=False):
        axes.plot(
            hours,
            law(hours),
            color=GREY,
            linestyle=(0, dashes),
            linewidth=1.2,
            label=_label(law),
        )


def _add_legend(axes: Axes) -> None:
    """Add the legend, with entries that explain the marks of all curves."""
    axes.plot([], [], "D", color="white", markeredgecolor=GREY, markersize=6, label="C_mid")
    axes.plot([], [], color=GREY, linewidth=0.8, linestyle=":", label="A, the ceiling")
    axes.plot(
        [], [], color=GREY, linestyle=EXTRAPOLATED, label="extrapolated; shaded: 95 % interval"
    )
    axes.plot([], [], "o", color=GREY, markersize=3.5, fillstyle="none", label="outside the window")
    axes.legend(loc="lower right")


def plot_efficiency(fits: Mapping[str, Fit], path_without_suffix: Path) -> list[Path]:
    """Plot log F against log C (compare.py, `efficiency`), with a line of slope B, on
    which the points lie if the law holds. Return the files written.
    """
    from megarl.predict.scaling.compare import efficiency

    with drawing((6, 4.6)) as (figure, (axes,)):
        for (name, fit), color in zip(fits.items(), cycle(COLORS), strict=False):
            x, y = efficiency(fit, fit.hours, fit.pass_rate)
            ends = np.log10(np.array(fit.window))
            label = f"{name}: slope B = {fit.B:.2f}, A = {fit.A:.3f}"
            axes.plot(x, y, "o", color=color, markersize=4, alpha=0.8)
            axes.plot(ends, fit.B * ends, color=color, label=label)
        first_fit = next(iter(fits.values()))
        axes.set(
            title="Efficiency",
            xlabel=f"log10 of compute, {unit_name(first_fit.unit)}",
            ylabel="log10 F(R) = B · log10 C",
        )
        axes.legend(loc="upper left")
        return pictures.save(figure, path_without_suffix)


def plot_slices(parts: Sequence[Slice], path_without_suffix: Path) -> list[Path]:
    """Plot the slices that have a curve, over the logarithm of compute: one row per
    task or suite, one panel per kind. Return the files written.
    """
    curves: dict[Slice, Curve] = {}
    for part in parts:
        if part.curve is not None and len(part.curve.hours):
            curves[part] = part.curve
    if not curves:
        raise MegarlError("nothing to draw: no slice has a score after training began")
    unit = unit_name(next(iter(curves.values())).unit)
    tasks = list(dict.fromkeys(part.task for part in curves))
    present = {part.kind for part in curves}
    kinds = [kind for kind in KINDS if kind in present]
    longest = max(curve.hours.max() for curve in curves.values())
    end = BEYOND * longest
    size = (4.6 * len(kinds), 3.8 * len(tasks))
    with drawing(size, len(tasks), len(kinds)) as (figure, panels):
        for axes, (task, kind) in zip(panels, product(tasks, kinds), strict=True):
            selected = [part for part in curves if part.task == task and part.kind == kind]
            for part, color in zip(selected, cycle(COLORS), strict=False):
                line = _slice_line(part, curves[part], color, end)
                _draw(axes, line, end)
            axes.set(title=f"{task}, by {kind}", ylim=(-0.02, 1.02), ylabel="score")
            axes.set_xlabel(f"compute, {unit}")
            logarithmic(axes)
            if selected:
                axes.legend(loc="best", fontsize=7)
            else:
                axes.set_visible(False)
        return pictures.save(figure, path_without_suffix)


def _slice_line(part: Slice, curve: Curve, color: str, end: float) -> _Line:
    """Return what is drawn of a slice; its band goes up to `end` hours. Its name says
    which values 0 and 1 stand for, if the objective has others.
    """
    name = part.name
    if part.unit != (0, 1):
        low, high = part.unit
        name += f" (0 is {low:g}, 1 is {high:g})"
    band = None
    if part.fit:
        start = float(curve.hours[0]) / 2
        band = predict(part.fit, np.geomspace(start, end, BAND_POINTS))
    return _Line(name, color, [curve], part.fit, band)


def _draw(axes: Axes, line: _Line, end: float) -> None:
    """Draw an entry's points and, if it was fitted, its curve up to `end` hours."""
    for curve in line.curves:
        inside = in_window(curve, line.fit)
        _draw_points(axes, line.color, curve, inside, fill="full")
        _draw_points(axes, line.color, curve, ~inside, fill="none")
    if line.fit is None or line.band is None:
        label = f"{line.name}: no fit"
        axes.plot([], [], "o", color=line.color, markersize=3.5, fillstyle="none", label=label)
        return
    _draw_curve(axes, line.name, line.color, line.fit, line.band, end)


def _draw_points(axes: Axes, color: str, curve: Curve, chosen: np.ndarray, *, fill: str) -> None:
    """Draw the chosen points, [points] bool. fill: matplotlib's `full` or `none`."""
    hours = curve.hours[chosen]
    rates = curve.pass_rate[chosen]
    axes.plot(hours, rates, "o", color=color, markersize=3.5, fillstyle=fill, zorder=3)


def _draw_curve(axes: Axes, name: str, color: str, fit: Fit, band: Prediction, end: float) -> None:
    """Draw a fit with its band, asymptote and midpoint, up to `end` hours or its last
    point, whichever is later; what lies beyond its window is in the style of
    extrapolation.
    """
    first, last = fit.window
    window_hours = np.linspace(first, last, 300)
    later_hours = np.geomspace(last, max(end, last), 300)
    label = f"{name}: A {fit.A:.3f}, B {fit.B:.2f}, C_mid {amount(fit.C_mid)}"
    axes.fill_between(band.hours, band.low, band.high, color=color, alpha=0.15, linewidth=0)
    axes.plot(window_hours, fit(window_hours), color=color, label=label)
    axes.plot(later_hours, fit(later_hours), color=color, linestyle=EXTRAPOLATED)
    axes.axhline(fit.A, color=color, linewidth=0.8, linestyle=":")
    if band.hours[0] <= fit.C_mid <= end:
        middle = np.array([fit.C_mid])
        axes.plot(
            middle, fit(middle), "D", color="white", markeredgecolor=color, markersize=6, zorder=4
        )
        axes.axvline(fit.C_mid, color=color, linewidth=0.8, linestyle=":")


def in_window(curve: Curve, fit: Fit | None) -> np.ndarray:
    """Return [points] bool: whether a point is in the fit's window. Without a fit none
    is.
    """
    if fit is None:
        return np.zeros(len(curve.hours), dtype=bool)
    first, last = fit.window
    return (curve.hours >= first) & (curve.hours <= last)


def _page_series(line: _Line) -> dict[str, object]:
    """Return the page's data on an entry. Each of its `points` is [hours, rate, whether
    it is in the window, name], and each of `curve` [hours, rate, low, high].
    """
    points: list[list[object]] = []
    for curve in line.curves:
        fitted = in_window(curve, line.fit)
        for hours, rate, inside in zip(curve.hours, curve.pass_rate, fitted, strict=True):
            points.append([float(hours), float(rate), bool(inside), curve.name])
    band: list[list[float]] = []
    if line.band is not None:
        band = _rows(line.band.hours, line.band.pass_rate, line.band.low, line.band.high)
    return {
        "name": line.name,
        "color": line.color,
        "fit": None if line.fit is None else line.fit.record(),
        "curve": band,
        "points": points,
    }


def _rows(*columns: np.ndarray) -> list[list[float]]:
    """Return [points][columns] of columns [points]."""
    rows: list[list[float]] = np.stack(columns, axis=1).tolist()
    return rows


def _label(law: Law) -> str:
    return f"{law.name} (published; R_0 = {law.r0:g}, read off figure 1)"
