"""What the points cannot support: said with every fit, and shown wherever its numbers are."""

import math
from typing import TYPE_CHECKING

import numpy as np

from megarl.lab.scaling.points import amount

if TYPE_CHECKING:
    from megarl.lab.scaling.fit import Fit

FEW_POINTS = 8
WIDE_INTERVAL = 0.05
STREAKS = 2.6
"""Deviations of the residuals' autocorrelation that noise alone passes once in a hundred fits."""


def doubts(fit: "Fit") -> list[str]:
    """One sentence each."""
    low, high = fit.problem.a_bounds
    a_low, a_high = fit.A_interval
    found = []
    if fit.r0_from == "estimate":
        found.append(f"R_0 = {fit.R_0:.3f} is an estimate: no score before training is known (--r0 gives one)")
    if fit.form != "power" and fit.window[1] < fit.C_mid:
        found.append(
            f"the window ends at {amount(fit.window[1], fit.unit)}, before C_mid = {amount(fit.C_mid)}: "
            "the half of the curve that shows the ceiling has not been seen"
        )
    if fit.n < FEW_POINTS:
        found.append(f"only {fit.n} points; {FEW_POINTS} are few already")
    if low < high and min(fit.A - low, high - fit.A) < 1e-6:
        found.append(f"A = {fit.A:.3f} is at the edge of its range {low:g} … {high:g}: the points do not determine it")
    if (fall := _fall(fit.pass_rate)) > 0:
        found.append(
            f"scores are not monotone: the last ones are {fall:.3f} below earlier ones, and the law can only rise"
        )
    if low < high and a_high - a_low > WIDE_INTERVAL:
        found.append(f"A is only known to lie in {a_low:.3f} … {a_high:.3f}, wider than {WIDE_INTERVAL}")
    if _in_streaks(fit):
        found.append("residuals come in streaks: the form does not follow the points, and the intervals are too narrow")
    return found


def _fall(scores: np.ndarray) -> float:
    """By how much the mean of the last quarter is below the best quarter, if noise does not explain it (3 deviations); else 0.

    Noise is taken from differences of neighbours, whose variance is twice its own.
    """
    width = max(2, len(scores) // 4)
    means = np.convolve(scores, np.ones(width) / width, mode="valid")
    noise = math.sqrt(float((np.diff(scores) ** 2).mean()) / 2)
    fall = float(means.max() - means[-1])
    return fall if fall > 3 * noise * math.sqrt(2 / width) else 0.0


def _in_streaks(fit: "Fit") -> bool:
    """Whether neighbouring residuals agree more than independent ones would."""
    residual = fit.pass_rate - fit(fit.hours)
    if fit.n < FEW_POINTS or fit.sse < 1e-12:
        return False
    together = float((residual[1:] * residual[:-1]).sum()) / float((residual**2).sum())
    return together * math.sqrt(fit.n) > STREAKS
