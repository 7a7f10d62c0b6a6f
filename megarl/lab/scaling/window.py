"""Which points are fitted. The law does not hold at first: ScaleRL leaves out the first 1,500 GPU-hours, about an epoch.

A run whose first epoch is shorter, or on CPU cores, has the epoch left out instead: hours of another size of run mean little.
"""

import math
from collections.abc import Sequence

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.lab.scaling.points import Curve

EARLY_HOURS = 1500.0
"""GPU-hours that the paper leaves out."""
ENOUGH = 8
"""Points that must remain for the default window to leave any out."""


def windowed(
    curves: Sequence[Curve], start: float | None, end: float | None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Hours and scores of all curves inside the window, [points] by rising hours, and what is to be said about it."""
    if len({curve.unit for curve in curves}) > 1:
        raise MegarlError("core-hours and GPU-hours cannot be fitted together")
    if start is not None and end is not None and start >= end:
        raise MegarlError(f"the window is empty: from {start:g} until {end:g} hours")
    remarks: list[str] = []
    kept = []
    for curve in curves:
        low = start if start is not None else _default(curve, end, remarks)
        inside = (curve.hours >= low) & (curve.hours <= (math.inf if end is None else end))
        kept.append((curve.hours[inside], curve.pass_rate[inside]))
    hours, scores = (np.concatenate(part) for part in zip(*kept, strict=True))
    order = np.argsort(hours, kind="stable")
    return hours[order], scores[order], list(dict.fromkeys(remarks))


def _default(curve: Curve, end: float | None, remarks: list[str]) -> float:
    """Hours before which points are left out."""
    epoch = math.inf if curve.first_epoch is None else curve.first_epoch
    early = min(epoch, EARLY_HOURS) if curve.unit == "gpu" else 0.0 if curve.first_epoch is None else epoch
    rest = curve.hours[curve.hours <= (math.inf if end is None else end)]
    if (rest >= early).sum() >= ENOUGH or not (rest < early).any():
        return early if math.isfinite(early) else 0.0
    what = "the first epoch" if early == epoch else f"the first {EARLY_HOURS:,.0f} GPU-hours"
    remarks.append(
        f"{what} could not be left out ({(rest >= early).sum()} of {len(rest)} points are later): early points, where the law "
        "does not hold yet, are in the fit"
    )
    return 0.0
