"""What a fit says beyond its points: the score at some compute, the compute for a score, each with its 95 % interval.

The curve's interval at C comes from the profile likelihood: for scores around the fitted one, the smallest error of all curves
through (C, score), up to the error that the fit allows. It applies to the curve; a single evaluation adds its own noise.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.evaluation.forecast import FURTHER_HOURS, PASS_RATE, Row
from megarl.lab.scaling.fit import FEW_POINTS, WIDE_INTERVAL, Fit, curve_at, widened
from megarl.lab.scaling.fit import fit as fit_curves
from megarl.lab.scaling.least_squares import descend, jacobian, predicted
from megarl.lab.scaling.points import Curve, PointColumns, curve_of_run

STEPS = np.array([0.4, 0.7, 0.9, 1.0, 1.15, 1.4, 2.0, 4.0, 12.0])
"""Scores tried on each side, in half widths of the linear approximation of the interval."""
BETWEEN = np.linspace(0, 1, 7)[1:-1]  # then between the last score inside and the first one outside


class Prediction(NamedTuple):
    """Pass rates [points] at hours [points], and the ends of their intervals."""

    hours: np.ndarray
    pass_rate: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Reached(NamedTuple):
    """Hours at which the curve passes a score; infinite: never. The interval is open above if the asymptote may be lower."""

    hours: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Later:
    """How the fit did on points after its window: errors are measured − predicted."""

    n: int
    until: float
    mean_error: float
    largest_error: float
    inside: int  # points inside the interval widened by the fit's residual noise


def predict(fit: Fit, hours: np.ndarray) -> Prediction:
    """Predict scores and intervals at compute above 0."""
    values = fit(hours)
    low, high = _edge(fit, hours, values, -1), _edge(fit, hours, values, 1)
    if_r0 = np.stack([curve_at(fit.problem.form, theta, hours, fit.scale) for theta in fit.if_r0])  # [2, points]
    ends = [widened((a, b), v, r) for a, b, v, r in zip(low, high, values, if_r0.T, strict=True)]
    # No curve in the region is above its A.
    most = max(fit.A_interval[1], fit.R_0)
    return Prediction(hours, values, np.array([a for a, _ in ends]), np.array([b for _, b in ends]).clip(max=most))


def hours_to(fit: Fit, score: float) -> Reached:
    """Return when the curve passes `score`."""
    grid = np.geomspace(fit.hours[0] / 10, fit.window[1] * 1000, 120)
    band = predict(fit, grid)
    return Reached(inverse(fit, score), (_first(grid, band.high, score), _first(grid, band.low, score)))


def later_points(fit: Fit, curves: Sequence[Curve]) -> Later | None:
    """Compare with points of more compute than the fit's window; None if there are none."""
    hours = np.concatenate([c.hours for c in curves])
    rates = np.concatenate([c.pass_rate for c in curves])
    behind = hours > fit.window[1]
    if not behind.any():
        return None
    hours, rates = hours[behind], rates[behind]
    band = predict(fit, hours)
    errors = rates - band.pass_rate
    noise = 1.96 * math.sqrt(fit.sse / (fit.n - fit.problem.free.sum()))
    low, high = np.hypot(band.pass_rate - band.low, noise), np.hypot(band.high - band.pass_rate, noise)
    inside = int(((errors >= -low) & (errors <= high)).sum())
    worst = float(errors[np.abs(errors).argmax()])
    return Later(len(hours), float(hours.max()), float(errors.mean()), worst, inside)


NEXT = 0.1  # part of the budget that is weighed against the noise


def forecast(evaluations: Sequence[Row], metrics: Iterable[Row], steps: int, score: str = PASS_RATE) -> Row:
    """Forecast the rest of a live run of `steps` steps after the last of these evaluations: columns of eval.jsonl.

    Compute at the last step is the present one times steps / step. The next tenth of that budget is worth its price while it is
    predicted to gain more than an evaluation's noise, sqrt(p (1 − p) / answers): a smaller gain would be indistinguishable from
    none. Empty if there are too few, or no curve fits. score: `pass_rate`, or that of a task or a suite, `pass_rate/math`.
    """
    last = evaluations[-1]
    if not last["step"]:
        return {}
    try:
        fitted = fit_curves([curve_of_run("run", evaluations, metrics, "the run", PointColumns(score=score))])
    except MegarlError:
        return {}
    now = last["compute_hours"]
    budget = now * max(1.0, steps / last["step"])
    final = predict(fitted, np.array([budget]))
    here, after, soon = fitted(np.array([now, now + FURTHER_HOURS[fitted.unit], now + NEXT * budget])).tolist()
    suffix = score.removeprefix(PASS_RATE)
    answers = last[f"n_prompts{suffix}"] * last.get(f"samples{suffix}", last["samples"])
    rate = min(max(last[score], 1 / answers), 1 - 1 / answers)  # a perfect score is not without noise
    noise = math.sqrt(rate * (1 - rate) / answers)
    # Training is never judged to be enough before there are enough points, some beyond the midpoint, and a known ceiling.
    settled = fitted.n >= FEW_POINTS and fitted.window[1] > fitted.C_mid and np.ptp(fitted.A_interval) <= WIDE_INTERVAL
    return {
        "predicted_score": score,
        "predicted_hours": budget,
        "predicted_asymptote": fitted.A,
        "predicted_final": float(final.pass_rate[0]),
        "predicted_final_low": float(final.low[0]),
        "predicted_final_high": float(final.high[0]),
        "predicted_gain": after - here,
        "predicted_next_gain": soon - here,
        "evaluation_noise": noise,
        "enough": float(settled and soon - here < noise),
    }


def _edge(fit: Fit, hours: np.ndarray, values: np.ndarray, side: int) -> np.ndarray:
    """Return one end of the interval [points]: try scores further and further away, then more around where the error passes."""
    targets = values[:, None] + side * _linear_half_width(fit, hours)[:, None] * STEPS  # [points, tried]
    scores, distance = _through(fit, hours, targets)
    # Between the last score inside the interval and the first one outside.
    outward, rows = np.column_stack([values, scores]), np.arange(len(values))
    first = np.where((distance >= 1).any(1), (distance >= 1).argmax(1) + 1, scores.shape[1])
    inner, outer = outward[rows, first - 1], outward[rows, first]
    more = inner[:, None] + (outer - inner)[:, None] * BETWEEN
    refined, refined_distance = _through(fit, hours, more)
    scores, distance = np.hstack([scores, refined]), np.hstack([distance, refined_distance])
    order = np.argsort(side * scores, axis=1, kind="stable")
    scores, distance = np.take_along_axis(scores, order, 1), np.take_along_axis(distance, order, 1)
    return np.array([_crossing(*row) for row in zip(values, scores, distance, strict=True)])


def _through(fit: Fit, hours: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of the best curves through `targets` [points, tried], and distances from the best of all: 1 at the end."""
    at = fit.problem.form.x(hours, fit.scale)
    x, asked = np.repeat(at, targets.shape[1]), np.clip(targets, 0, 1)
    rows, row_errors = fit.region
    missed = asked[:, :, None] - predicted(fit.problem.form, rows, at).T[:, None, :]  # [points, tried, rows]
    starts = rows[(row_errors + (100 * missed) ** 2).argmin(-1).ravel()]
    found, errors = descend(fit.problem, starts, target=(x, asked.ravel()))
    a, u, w, r0 = found.T
    scores = r0 + (a - r0) * fit.problem.form.share(np.exp(w) * (x - u))
    distance = np.sqrt(np.maximum(errors - fit.sse, 0) / (fit.allowed_sse - fit.sse))
    return scores.reshape(targets.shape), distance.reshape(targets.shape)


def _linear_half_width(fit: Fit, hours: np.ndarray) -> np.ndarray:
    """Return the interval's half width [points] as if the curve were linear in its parameters; at least 1e-4."""
    form, free = fit.problem.form, fit.problem.free
    at_points = jacobian(form, fit.theta[None], fit.problem.x[None])[0][:, free]
    here = jacobian(form, fit.theta[None], form.x(hours, fit.scale)[None])[0][:, free]
    covariance = np.linalg.pinv(at_points.T @ at_points, rcond=1e-10)
    variance = np.einsum("pi,ij,pj->p", here, covariance, here)
    return np.clip(np.sqrt(np.maximum(variance, 0) * (fit.allowed_sse - fit.sse)), 1e-4, 0.3)


def _crossing(value: float, through: np.ndarray, away: np.ndarray) -> float:
    """Return the score at which the profile passes 1, going outward from `value`; the last one if bounds stop it earlier."""
    scores, distance = np.concatenate([[value], through]), np.maximum.accumulate(np.concatenate([[0.0], away]))
    if distance[-1] < 1:
        return float(scores[-1])
    n = int(np.flatnonzero(distance >= 1)[0])
    share = (1 - distance[n - 1]) / (distance[n] - distance[n - 1])
    return float(scores[n - 1] + share * (scores[n] - scores[n - 1]))


def inverse(fit: Fit, score: float) -> float:
    share = (score - fit.R_0) / (fit.A - fit.R_0) if fit.A != fit.R_0 else math.inf
    if share >= 1:
        return math.inf
    if share <= 0:
        return 0.0
    _, u, w, _ = fit.theta
    return max(0.0, fit.problem.form.hours(float(u + fit.problem.form.inverse(share) / math.exp(w)), fit.scale))


def _first(hours: np.ndarray, scores: np.ndarray, score: float) -> float:
    """Return the compute at which the score is first reached, between grid points; infinite if it never is."""
    found = np.flatnonzero(scores >= score)
    if not len(found):
        return math.inf
    n = int(found[0])
    if n == 0:
        return 0.0
    share = (score - scores[n - 1]) / (scores[n] - scores[n - 1])
    return float(hours[n - 1] * (hours[n] / hours[n - 1]) ** share)
