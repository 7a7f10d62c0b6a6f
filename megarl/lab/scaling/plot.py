"""Draws pictures of fits: points, curve, extrapolation with its interval, C_mid and A;
and the efficiency plot.

The left panel is over the logarithm of compute, where ScaleRL's law is an S; the right
one over compute itself, which shows what an hour gains. The same is drawn as an
interactive page, one HTML file that opens offline (page.html).
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from megarl.core.base.errors import MegarlError
from megarl.lab import pictures
from megarl.lab.pictures import COLORS, GREY, drawing, logarithmic
from megarl.lab.scaling.extrapolate import Prediction, predict
from megarl.lab.scaling.fit import Fit
from megarl.lab.scaling.points import Curve, amount, unit_name
from megarl.lab.scaling.published import Law
from megarl.lab.scaling.slices import KINDS, Slice

Series = Mapping[str, tuple[Sequence[Curve], Fit | None]]
TEMPLATE = Path(__file__).with_name("page.html")
BAND_POINTS = 48
BEYOND = 3.0  # by default curves are drawn up to this many times the compute of the last point


def plot_fits(
    series: Series,
    path_without_suffix: Path,
    *,
    title: str = "",
    until: float | None = None,
    laws: Sequence[Law] = (),
) -> list[Path]:
    """Write the picture as PNG, SVG and HTML. until: hours up to which curves are
    drawn; laws: published fits to draw too.
    """
    every = [curve for curves, _ in series.values() for curve in curves]
    hours = np.concatenate([curve.hours for curve in every])
    unit = every[0].unit
    if not len(hours):
        raise MegarlError("nothing to draw: no run has a point after its training began")
    if laws and unit != "gpu":
        raise MegarlError(
            f"the published fits are in GPU-hours; a run in {unit_name(unit)} cannot be drawn with"
            " them"
        )
    end = until or BEYOND * float(hours.max())
    bands = {  # from a little before the first point
        name: predict(fit, np.geomspace(fit.window[0] / 2, max(end, fit.window[1]), BAND_POINTS))
        for name, (_, fit) in series.items()
        if fit is not None
    }
    colors = dict(zip(series, cycle(COLORS), strict=False))
    beneath = np.geomspace(float(hours.min()) / 2, end, 300)
    with drawing((12, 4.6), 1, 2, title=title, sharey=True) as (figure, (log, linear)):
        for axes, heading in ((log, "logarithm of compute"), (linear, "compute")):
            for law, dashes in zip(laws, cycle([(2, 1), (6, 2), (6, 1, 1, 1)]), strict=False):
                axes.plot(
                    beneath,
                    law(beneath),
                    color=GREY,
                    linestyle=(0, dashes),
                    linewidth=1.2,
                    label=_label(law),
                )
            for name, (curves, fit) in series.items():
                _draw(axes, name, colors[name], curves, fit, bands.get(name), end)
            axes.set(title=heading, xlabel=f"compute, {unit_name(unit)}")
        log.set_ylabel("pass rate")
        logarithmic(log)
        linear.set_xlim(0, end)
        linear.xaxis.set_major_formatter(lambda hours, _position: amount(hours))
        linear.plot([], [], "D", color="white", markeredgecolor=GREY, markersize=6, label="C_mid")
        linear.plot([], [], color=GREY, linewidth=0.8, linestyle=":", label="A, the ceiling")
        linear.plot(
            [], [], color=GREY, linestyle=(0, (4, 2)), label="extrapolated; shaded: 95 % interval"
        )
        linear.plot(
            [], [], "o", color=GREY, markersize=3.5, fillstyle="none", label="outside the window"
        )
        linear.legend(loc="lower right")
        written = pictures.save(figure, path_without_suffix)
    fewer = np.geomspace(beneath[0], end, 80)
    data = {
        "title": title or "Pass rate against compute",
        "unit": unit_name(unit),
        "end": end,
        "series": [
            _series(name, colors[name], curves, fit, bands.get(name))
            for name, (curves, fit) in series.items()
        ],
        "laws": [{"name": _label(law), "curve": _rows(fewer, law(fewer))} for law in laws],
    }
    page = path_without_suffix.with_name(f"{path_without_suffix.name}.html")
    pictures.write_page(TEMPLATE, page, data=pictures.embedded(data))
    return [*written, page]


def plot_efficiency(fits: Mapping[str, Fit], path_without_suffix: Path) -> list[Path]:
    """Plot log F against log C. If the law holds, the points lie on a line of slope B."""
    from megarl.lab.scaling.compare import efficiency

    with drawing((6, 4.6)) as (figure, (axes,)):
        for (name, fit), color in zip(fits.items(), cycle(COLORS), strict=False):
            x, y = efficiency(fit, fit.hours, fit.pass_rate)
            ends = np.log10(np.array(fit.window))
            axes.plot(x, y, "o", color=color, markersize=4, alpha=0.8)
            axes.plot(
                ends,
                fit.B * ends,
                color=color,
                label=f"{name}: slope B = {fit.B:.2f}, A = {fit.A:.3f}",
            )
        unit = next(iter(fits.values())).unit
        axes.set(
            title="Efficiency",
            xlabel=f"log10 of compute, {unit_name(unit)}",
            ylabel="log10 F(R) = B · log10 C",
        )
        axes.legend(loc="upper left")
        return pictures.save(figure, path_without_suffix)


def plot_slices(parts: Sequence[Slice], path_without_suffix: Path) -> list[Path]:
    """Plot the slices that have a curve, over the logarithm of compute: one row per
    task or suite, one panel per kind.
    """
    curves = {
        part: part.curve for part in parts if part.curve is not None and len(part.curve.hours)
    }
    if not curves:
        raise MegarlError("nothing to draw: no slice has a score after training began")
    tasks = list(dict.fromkeys(part.task for part in curves))
    end = BEYOND * max(c.hours.max() for c in curves.values())
    kinds = [kind for kind in KINDS if any(part.kind == kind for part in curves)]
    with drawing((4.6 * len(kinds), 3.8 * len(tasks)), len(tasks), len(kinds)) as (figure, panels):
        for axes, panel in zip(panels, product(tasks, kinds), strict=True):
            here = [part for part in curves if (part.task, part.kind) == panel]
            for part, color in zip(here, cycle(COLORS), strict=False):
                name = part.name + (
                    "" if part.unit == (0, 1) else " (0 is {:g}, 1 is {:g})".format(*part.unit)
                )
                hours = np.geomspace(float(curves[part].hours[0]) / 2, end, BAND_POINTS)
                _draw(
                    axes,
                    name,
                    color,
                    [curves[part]],
                    part.fit,
                    predict(part.fit, hours) if part.fit else None,
                    end,
                )
            axes.set(title=", by ".join(panel), ylim=(-0.02, 1.02), ylabel="score")
            axes.set_xlabel(f"compute, {unit_name(next(iter(curves.values())).unit)}")
            logarithmic(axes)
            axes.legend(loc="best", fontsize=7) if here else axes.set_visible(False)
        return pictures.save(figure, path_without_suffix)


def _draw(
    axes: Axes,
    name: str,
    color: str,
    curves: Sequence[Curve],
    fit: Fit | None,
    shown: Prediction | None,
    end: float,
) -> None:
    for curve in curves:
        inside = used(curve, fit)
        for chosen, fill in ((inside, "full"), (~inside, "none")):
            hours = curve.hours[chosen]
            rates = curve.pass_rate[chosen]
            axes.plot(hours, rates, "o", color=color, markersize=3.5, fillstyle=fill, zorder=3)
    if fit is None or shown is None:
        axes.plot(
            [], [], "o", color=color, markersize=3.5, fillstyle="none", label=f"{name}: no fit"
        )
        return
    seen = np.linspace(*fit.window, 300)
    beyond = np.geomspace(fit.window[1], max(end, fit.window[1]), 300)
    axes.fill_between(shown.hours, shown.low, shown.high, color=color, alpha=0.15, linewidth=0)
    axes.plot(
        seen,
        fit(seen),
        color=color,
        label=f"{name}: A {fit.A:.3f}, B {fit.B:.2f}, C_mid {amount(fit.C_mid)}",
    )
    axes.plot(beyond, fit(beyond), color=color, linestyle=(0, (4, 2)))
    axes.axhline(fit.A, color=color, linewidth=0.8, linestyle=":")
    if shown.hours[0] <= fit.C_mid <= end:
        middle = np.array([fit.C_mid])
        axes.plot(
            middle, fit(middle), "D", color="white", markeredgecolor=color, markersize=6, zorder=4
        )
        axes.axvline(fit.C_mid, color=color, linewidth=0.8, linestyle=":")


def used(curve: Curve, fit: Fit | None) -> np.ndarray:
    """Return [points] bool: whether a point is in the fit's window."""
    if fit is None:
        return np.zeros(len(curve.hours), dtype=bool)
    return (curve.hours >= fit.window[0]) & (curve.hours <= fit.window[1])


def _series(
    name: str, color: str, curves: Sequence[Curve], fit: Fit | None, line: Prediction | None
) -> dict[str, object]:
    """Return the page's data on a series. points: hours, rate, in the window?, name;
    curve: hours, rate, low, high.
    """
    points = [
        [float(hours), float(rate), bool(inside), curve.name]
        for curve in curves
        for hours, rate, inside in zip(curve.hours, curve.pass_rate, used(curve, fit), strict=True)
    ]
    return {
        "name": name,
        "color": color,
        "fit": None if fit is None else fit.record(),
        "curve": [] if line is None else _rows(line.hours, line.pass_rate, line.low, line.high),
        "points": points,
    }


def _rows(*columns: np.ndarray) -> list[list[float]]:
    rows: list[list[float]] = np.stack(columns, axis=1).tolist()
    return rows


def _label(law: Law) -> str:
    return f"{law.name} (published; R_0 = {law.r0:g}, read off figure 1)"
