"""The interactive picture: one HTML file with its data and script inside, which opens without a network (page.html)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.lab.report import pages
from megarl.lab.report.pictures import COLORS
from megarl.lab.scaling.fit import Fit
from megarl.lab.scaling.plot import Series, band, drawn_to, first_point, used
from megarl.lab.scaling.points import HOURS, Curve
from megarl.lab.scaling.published import Law

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(
    series: Series, path_without_suffix: Path, *, title: str = "", until: float | None = None, laws: Sequence[Law] = ()
) -> Path:
    """BASE.html; arguments as of plot.plot_fits."""
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
    pages.write_page(TEMPLATE, target, data=pages.embedded(data))
    return target


def _series(n: int, name: str, curves: Sequence[Curve], fit: Fit | None, end: float) -> dict[str, Any]:
    """points: hours, pass rate, whether in the window, name. curve: hours, pass rate, low, high."""
    found: dict[str, Any] = {"name": name, "color": COLORS[n % len(COLORS)], "fit": None, "curve": []}
    found["points"] = [
        [float(hours), float(rate), bool(inside), curve.name]
        for curve in curves
        for hours, rate, inside in zip(curve.hours, curve.pass_rate, used(curve, fit), strict=True)
    ]
    if fit is not None:
        line = band(fit, end)
        found["fit"] = fit.record()
        found["curve"] = [
            [float(x) for x in row] for row in zip(line.hours, line.pass_rate, line.low, line.high, strict=True)
        ]
    return found


def _law(law: Law, first: float, end: float) -> dict[str, Any]:
    hours = np.geomspace(first, end, 80)
    curve = [[float(h), float(r)] for h, r in zip(hours, law(hours), strict=True)]
    return {"name": f"{law.name} (published; R_0 = {law.r0:g}, read off figure 1)", "curve": curve}
