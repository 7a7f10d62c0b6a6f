"""Predictions of a fit beyond its points: the score at some compute, the compute for a
score, each with its 95 % interval.

Both describe how the fitted curves (for several seeds, their mean) continue. The
intervals cover the error of the law and how far the curves have strayed from it, but
not the noise that a single evaluation adds.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row
from megarl.core.evaluation.forecast import FURTHER_HOURS, PASS_RATE
from megarl.predict.scaling.fit import EARLY_HOURS, Fit
from megarl.predict.scaling.fit import fit as fit_curves
from megarl.predict.scaling.forms import FORMS
from megarl.predict.scaling.points import Curve, PointColumns, curve_of_run
from megarl.predict.scaling.posterior import INTERVAL

# how many times less compute than that of the first point is the earliest at which a
# score is looked for
BEFORE = 10.0
# points at which the band is computed, with effort in their cube; in between it is
# interpolated
MOST_LATER = 200


class Prediction(NamedTuple):
    """Pass rates at `hours`, with the ends of their intervals; all are [points]."""

    hours: np.ndarray
    pass_rate: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Reached(NamedTuple):
    """Hours at which the curve passes a score; infinite if never, as is the interval's
    end if the asymptote may be below it.
    """

    hours: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class LaterErrors:
    """How well the fit predicted the `n` points after its window, up to `until` hours.
    Errors are measured − predicted.
    """

    n: int
    until: float
    mean_error: float
    largest_error: float
    inside: int  # points inside the 95 % interval, which is widened by the fit's residual noise


def predict(fit: Fit, hours: np.ndarray) -> Prediction:
    """Predict scores, with intervals, at `hours` above 0."""
    x = FORMS[fit.form].x(np.asarray(hours, float), fit.scale)
    middle, low, high = np.quantile(fit.posterior.scores(x), INTERVAL, axis=0)
    return Prediction(hours, middle, low, high)


def hours_to(fit: Fit, score: float) -> Reached:
    """Return the compute at which the curve passes `score`, looked for up to a thousand
    times the compute of the last point.
    """
    grid = np.geomspace(fit.hours[0] / BEFORE, fit.window[1] * 1000, 240)
    band = predict(fit, grid)
    hours = _hours_of_first(grid, band.pass_rate, score)
    earliest = _hours_of_first(grid, band.high, score)
    latest = _hours_of_first(grid, band.low, score)
    return Reached(hours, (earliest, latest))


TESTED = 4.0
FAR = 10.0
"""Multiples of the last point's compute: up to which intervals were tested on real runs
(benchmarks/forecasts.md), and from which a prediction says so.
"""


def doubts(fit: Fit, hours: float | None) -> Iterator[str]:
    """Yield one sentence if a prediction at `hours` is far beyond the points. None:
    nothing is predicted at given hours.
    """
    if hours is None:
        return
    multiple = hours / fit.window[1]
    if multiple > FAR:
        yield (
            f"that is {multiple:,.0f} times the compute of the last point; intervals were tested up"
            f" to {TESTED:g} times"
        )


def errors_of_later_points(fit: Fit, curves: Sequence[Curve]) -> LaterErrors | None:
    """Compare the fit with points at more compute than its window; None if there are
    none.
    """
    all_hours = np.concatenate([curve.hours for curve in curves])
    all_rates = np.concatenate([curve.pass_rate for curve in curves])
    is_later = all_hours > fit.window[1]
    if not is_later.any():
        return None
    hours = all_hours[is_later]
    band = _interpolated_band(fit, hours)
    errors = all_rates[is_later] - band.pass_rate
    freedom = max(1, fit.n - len(fit.theta))
    noise = 1.96 * math.sqrt(fit.sse / freedom)  # 95 % of a score's deviations from the fit
    below = np.hypot(band.pass_rate - band.low, noise)
    above = np.hypot(band.high - band.pass_rate, noise)
    return LaterErrors(
        n=len(hours),
        until=float(hours.max()),
        mean_error=float(errors.mean()),
        largest_error=float(errors[np.abs(errors).argmax()]),
        inside=int(((errors >= -below) & (errors <= above)).sum()),
    )


def _interpolated_band(fit: Fit, hours: np.ndarray) -> Prediction:
    """Return the prediction at `hours`, computed at no more than MOST_LATER of them."""
    grid = np.unique(hours)
    if len(grid) > MOST_LATER:
        grid = np.geomspace(grid[0], grid[-1], MOST_LATER)
    band = predict(fit, grid)
    return Prediction(
        hours,
        np.interp(hours, grid, band.pass_rate),
        np.interp(hours, grid, band.low),
        np.interp(hours, grid, band.high),
    )


def forecast(
    evaluations: Sequence[Row], metrics: Iterable[Row], steps: int, score: str = PASS_RATE
) -> Row:
    """Forecast the rest of a live run of `steps` steps after the last of these
    evaluations; return columns of eval.jsonl.

    The budget, i.e. compute at the last step, is the present compute times steps /
    step. `predicted_gain`: the median gain from FURTHER_HOURS more.
    `predicted_rest_high`: the gain from the rest of the budget, at the upper end of
    its 95 % interval. `predicted_least`, `predicted_most`: the lower and the higher
    of the curve's values now and at the end, each with the outer end of its interval;
    all later scores should lie between them (core/evaluation/departure.py). Empty if
    there are too few scores, or no curve fits. metrics: rows of metrics.jsonl, for the
    end of the first epoch. score: the column to forecast, `pass_rate` or that of a task
    or suite, such as `pass_rate/math`.
    """
    last = evaluations[-1]
    if not last["step"]:  # only the score before training is known
        return {}
    if last.get("compute_unit") == "gpu":
        # Later epochs do not matter, and of a long run there are gigabytes.
        metrics = takewhile(lambda row: row.get("compute_hours", 0.0) <= EARLY_HOURS, metrics)
    columns = PointColumns(score=score)
    try:
        fit = fit_curves([curve_of_run("run", evaluations, metrics, "the run", columns)])
    except MegarlError:
        return {}
    hours = last["compute_hours"]
    budget = hours * max(1.0, steps / last["step"])
    three_hours = np.array([hours, hours + FURTHER_HOURS[fit.unit], budget])
    x = FORMS[fit.form].x(three_hours, fit.scale)
    draws = fit.posterior.scores(x)  # [draws, 3]
    present, further, final = draws.T
    middle, low, high = np.quantile(final, INTERVAL)
    lower = np.minimum(present, final)
    higher = np.maximum(present, final)
    return {
        "predicted_score": score,
        "predicted_hours": budget,
        "predicted_asymptote": fit.A,
        "predicted_final": float(middle),
        "predicted_final_low": float(low),
        "predicted_final_high": float(high),
        "predicted_gain": float(np.median(further - present)),
        "predicted_rest_high": float(max(0.0, np.quantile(final - present, INTERVAL[2]))),
        "predicted_least": float(np.median(lower)),
        "predicted_least_low": float(np.quantile(lower, INTERVAL[1])),
        "predicted_most": float(np.median(higher)),
        "predicted_most_high": float(np.quantile(higher, INTERVAL[2])),
    }


def inverse(fit: Fit, score: float) -> float:
    """Return the compute at which the fitted curve passes `score`: 0 if it begins
    above, infinite if it ends below or is constant.
    """
    if fit.A == fit.R_0:
        return math.inf
    share = (score - fit.R_0) / (fit.A - fit.R_0)
    if share >= 1:
        return math.inf
    if share <= 0:
        return 0.0
    _, u, w, _ = fit.theta
    form = FORMS[fit.form]
    x = float(u + form.inverse(share) / math.exp(w))
    return max(0.0, form.hours(x, fit.scale))


def _hours_of_first(hours: np.ndarray, scores: np.ndarray, score: float) -> float:
    """Return the compute at which `scores`, [points] at ascending `hours`, first reach
    this score, interpolated in its logarithm; 0 if the first point has reached it,
    infinite if none has.
    """
    above = np.flatnonzero(scores >= score)
    if not len(above):
        return math.inf
    n = int(above[0])
    if n == 0:
        return 0.0
    step = scores[n] - scores[n - 1]
    share = (score - scores[n - 1]) / step
    ratio = hours[n] / hours[n - 1]
    return float(hours[n - 1] * ratio**share)
