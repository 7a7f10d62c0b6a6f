"""ScaleRL's fit of a learning curve, and how certain its parameters are (arXiv 2510.13786, section 2 and appendix A).

    Curves ──► `windowed`: without early points ──► FitProfile: A, B, C_mid and their intervals ──► `doubts` ──► Fit

The paper tries A = 0.450, 0.455 … 0.800 and C_mid, and fits B for each pair; the smallest sum of squares wins. Here C_mid is
continuous and so, unless `grid="paper"`, is A between 0 and 1. R_0 is the score before training and is not fitted if known.

A parameter's interval holds the values whose best curve has an error of at most

    sse · (1 + t² / (n − p))      t: Student's 97.5 % quantile with n − p degrees of freedom, p fitted parameters,

the profile likelihood of Gaussian noise of unknown size. A measured R_0 has the noise of the other evaluations: each end is
moved by how far R_0 ± t·noise would move the parameter, the two added in quadrature. `benchmarks/scaling_calibration.py`
measures how often the intervals contain the truth.

Which points are fitted: the law does not hold at first, so ScaleRL leaves out the first 1,500 GPU-hours, about an epoch.
A run whose first epoch is shorter, or on CPU cores, has the epoch left out instead: hours of a run of another size mean little.

`doubts` says with every fit what its points cannot support.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.lab.scaling.forms import FORMS, Array, Form
from megarl.lab.scaling.least_squares import R0, A, FitProblem, FitProfile, U, W, descend, predicted, student_t
from megarl.lab.scaling.points import Curve, Unit, amount

Grid = Literal["paper", "free"]
R0From = Literal["evaluation", "given", "estimate"]
Interval = tuple[float, float]
GRIDS: dict[str, tuple[Interval, float | None]] = {"paper": ((0.45, 0.8), 0.005), "free": ((0.0, 1.0), None)}
"""Bounds of A, and its step."""
KEYS = ("form", "A", "B", "C_mid", "R_0", "sse", "rmse", "r2", "n")
INTERVALS = ("window", "A_interval", "B_interval", "C_mid_interval")


class FitOptions(TypedDict, total=False):
    """How `fit` fits. start, end: hours of the window; ceiling: holds A there."""

    r0: float | None
    start: float | None
    end: float | None
    form: str
    grid: Grid
    ceiling: float | None


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted curve. Hours are of `unit`; an interval end that the points do not bound is infinite."""

    form: str
    A: float
    B: float
    C_mid: float
    R_0: float
    sse: float
    rmse: float
    r2: float
    n: int
    window: Interval  # hours of the first and the last point that were used
    A_interval: Interval
    B_interval: Interval
    C_mid_interval: Interval
    warnings: tuple[str, ...]
    unit: Unit
    r0_from: R0From
    theta: np.ndarray  # [4] parameters as least_squares has them
    problem: FitProblem  # the problem that was solved; x is in units of `scale`
    allowed_sse: float  # largest error of a curve in the 95 % region of one parameter or prediction, with R_0 certain
    region: tuple[np.ndarray, np.ndarray]
    """The profiles' parameters [rows, 4], of curves inside the region and somewhat outside, and their errors [rows]."""
    if_r0: np.ndarray  # [2, 4] parameters refitted at the ends of R_0's interval; those of the fit if R_0 has none
    hours: np.ndarray  # [n] hours of the points used, ascending

    def __call__(self, hours: np.ndarray) -> np.ndarray:
        """Return the fitted pass rate [points] at compute above 0."""
        return curve_at(self.problem.form, self.theta, hours, self.scale)

    def record(self) -> dict[str, object]:
        """Return a record for JSON; null is an unbounded interval end."""
        intervals = {key: [end if math.isfinite(end) else None for end in getattr(self, key)] for key in INTERVALS}
        return {key: getattr(self, key) for key in KEYS} | intervals | {"warnings": list(self.warnings)}

    @property
    def pass_rate(self) -> np.ndarray:
        """[n] pass rates of the points used."""
        return self.problem.y

    @property
    def scale(self) -> float:
        return self.window[1]


def fit(
    curves: Sequence[Curve], *, r0: float | None = None, start: float | None = None, end: float | None = None,
    form: str = "sigmoid", grid: Grid = "free", ceiling: float | None = None,
) -> Fit:  # fmt: skip
    """Fit all curves together (the seeds of one recipe). start, end: hours of the window; ceiling: holds A there."""
    if not curves:
        raise MegarlError("nothing to fit: no curve was given")
    if (chosen := FORMS.get(form)) is None:
        raise MegarlError(f"no form {form!r}; there are {', '.join(FORMS)}")
    hours, scores, remarks = windowed(curves, start, end)
    known, r0_from = _before_training(curves, r0)
    _refuse(curves[0].name, chosen, hours, scores, known, ceiling)
    bounds, step = GRIDS[grid] if ceiling is None else ((ceiling, ceiling), None)
    scale = float(hours[-1])
    earliest = min(float(c.pass_rate[0]) for c in curves if len(c.pass_rate))
    r0_bounds = (0.0, earliest) if known is None else (known, known)
    problem = FitProblem(chosen, chosen.x(hours, scale), scores, bounds, r0_bounds)
    profile = FitProfile(problem, step)
    allowed = profile.smallest * _threshold(problem)
    if_r0 = _refitted(problem, profile.theta, profile.smallest, sum(c.r0 is not None for c in curves), r0_from)
    ends = [widened(profile.interval(i, allowed), float(profile.theta[i]), if_r0[:, i]) for i in (A, U, W)]
    result = Fit(
        form=form,
        A=float(profile.theta[A]),
        B=chosen.b(float(profile.theta[W]), scale),
        C_mid=chosen.hours(float(profile.theta[U]), scale),
        R_0=float(profile.theta[R0]),
        sse=profile.sse,
        rmse=math.sqrt(profile.sse / len(hours)),
        r2=1 - profile.sse / float(((scores - scores.mean()) ** 2).sum()),
        n=len(hours),
        window=(float(hours[0]), scale),
        A_interval=(max(ends[A][0], bounds[0]), min(ends[A][1], bounds[1])),
        B_interval=(chosen.b(ends[W][0], scale), chosen.b(ends[W][1], scale)),
        C_mid_interval=(chosen.hours(ends[U][0], scale), chosen.hours(ends[U][1], scale)),
        warnings=(),
        unit=curves[0].unit,
        r0_from=r0_from,
        theta=profile.theta,
        problem=problem,
        allowed_sse=allowed,
        region=profile.region(allowed),
        if_r0=if_r0,
        hours=hours,
    )
    return replace(result, warnings=(*remarks, *doubts(result)))


def curve_at(form: Form, theta: np.ndarray, hours: np.ndarray, scale: float) -> np.ndarray:
    """Return pass rates [points] for one curve's parameters [4]."""
    return predicted(form, theta[None], form.x(hours, scale))[0]


def widened(interval: Interval, value: float, if_r0: np.ndarray) -> Interval:
    """Widen the interval by the uncertainty of R_0: `if_r0` [2] is the value at either end of R_0's interval."""
    low = value - math.hypot(value - interval[0], value - min(value, float(if_r0.min())))
    high = value + math.hypot(interval[1] - value, max(value, float(if_r0.max())) - value)
    return low, high


def _refitted(problem: FitProblem, theta: np.ndarray, sse: float, evaluations: int, r0_from: str) -> np.ndarray:
    """Return parameters [2, 4] at either end of R_0's 95 % interval, if R_0 is the mean of noisy evaluations."""
    both = np.stack([theta, theta])
    if r0_from != "evaluation":
        return both
    half = math.sqrt(sse * (_threshold(problem) - 1) / evaluations)
    for row, r0 in zip(both, (theta[R0] - half, theta[R0] + half), strict=True):
        row[R0] = min(max(r0, 0.0), 1.0)
        row[:] = descend(replace(problem, r0_bounds=(row[R0],) * 2), row[None])[0][0]
    return both


def _threshold(problem: FitProblem) -> float:
    """Return 1 + t²/(n − p)."""
    left = problem.y.size - int(problem.free.sum())
    return 1 + student_t(left) ** 2 / left


def _before_training(curves: Sequence[Curve], given: float | None) -> tuple[float | None, R0From]:
    """Return R_0 and its origin; None: to be estimated. Seeds start from the same weights, so their scores are averaged."""
    if given is not None:
        if not 0 <= given < 1:
            raise MegarlError(f"R_0 is {given:g}; it is the pass rate before training, between 0 and 1")
        return given, "given"
    measured = [curve.r0 for curve in curves if curve.r0 is not None]
    return (sum(measured) / len(measured), "evaluation") if measured else (None, "estimate")


def _refuse(name: str, form: Form, hours: Array, scores: Array, r0: float | None, ceiling: float | None) -> None:
    """Raise MegarlError for points to which no curve can be fitted."""
    parameters = 2 + (r0 is None) + (ceiling is None)
    if len(hours) <= parameters:
        raise MegarlError(
            f"{name}: {len(hours)} point{'s' * (len(hours) != 1)} in the window; a curve of {parameters} parameters needs at "
            f"least {parameters + 1}. Wait for more evaluations, widen the window (--from, --until)"
            + (", or give the score before training (--r0)" if r0 is None else "")
        )
    if (amounts := np.unique(hours).size) <= parameters:
        raise MegarlError(f"{name}: only {amounts} different amounts of compute; nothing can be fitted to that")
    if ((scores - scores.mean()) ** 2).sum() == 0:  # also for scores that differ by less than floats can represent
        scores_are = f"all {len(scores)} scores are {scores[0]:g}"
        raise MegarlError(f"{name}: {scores_are}; a constant has no midpoint and no ceiling")
    if form.name == "power" and r0 is None:
        raise MegarlError(f"{name}: the power law cannot estimate R_0 (it only moves C_mid); give --r0")


EARLY_HOURS = 1500.0  # GPU-hours that the paper leaves out
ENOUGH = 8  # points that must remain for the default window to leave any out


def windowed(curves: Sequence[Curve], start: float | None, end: float | None) -> tuple[Array, Array, list[str]]:
    """Return hours and scores of all curves inside the window, [points] by ascending hours, and remarks about it."""
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
    """Return the hours before which points are left out."""
    epoch = math.inf if curve.first_epoch is None else curve.first_epoch
    early = min(epoch, EARLY_HOURS) if curve.unit == "gpu" else 0.0 if curve.first_epoch is None else epoch
    rest = curve.hours if end is None else curve.hours[curve.hours <= end]
    if (rest >= early).sum() >= ENOUGH or not (rest < early).any():
        return early if math.isfinite(early) else 0.0
    what = "the first epoch" if early == epoch else f"the first {EARLY_HOURS:,.0f} GPU-hours"
    later = f"{(rest >= early).sum()} of {len(rest)} points are later"
    remarks.append(
        f"{what} could not be left out ({later}): early points, where the law does not hold yet, are in the fit"
    )
    return 0.0


FEW_POINTS = 8
WIDE_INTERVAL = 0.05
STREAKS = 2.6  # deviations of the residuals' autocorrelation that noise alone exceeds once in a hundred fits


def doubts(fit: Fit) -> Iterator[str]:
    """Yield what the fit's points cannot support, one sentence each."""
    (low, high), (a_low, a_high) = fit.problem.a_bounds, fit.A_interval
    if fit.r0_from == "estimate":
        yield f"R_0 = {fit.R_0:.3f} is an estimate: no score before training is known (--r0 gives one)"
    if fit.form != "power" and fit.window[1] < fit.C_mid:
        ends = f"the window ends at {amount(fit.window[1], fit.unit)}, before C_mid = {amount(fit.C_mid)}"
        yield f"{ends}: the half of the curve that shows the ceiling has not been seen"
    if fit.n < FEW_POINTS:
        yield f"only {fit.n} points; {FEW_POINTS} are few already"
    if low < high and min(fit.A - low, high - fit.A) < 1e-6:
        yield f"A = {fit.A:.3f} is at the edge of its range {low:g} … {high:g}: the points do not determine it"
    if (fall := _fall(fit.pass_rate)) > 0:
        yield f"scores are not monotone: the last ones are {fall:.3f} below earlier ones, and the law can only rise"
    if low < high and a_high - a_low > WIDE_INTERVAL:
        yield f"A is only known to lie in {a_low:.3f} … {a_high:.3f}, wider than {WIDE_INTERVAL}"
    if _in_streaks(fit):
        yield "residuals come in streaks: the form does not follow the points; the intervals are too narrow"


def _fall(scores: np.ndarray) -> float:
    """Return how far the mean of the last quarter is below the best quarter; 0 if noise (3 deviations) explains it.

    Noise is estimated from differences of neighbours, whose variance is twice its own.
    """
    width = max(2, len(scores) // 4)
    means = np.convolve(scores, np.ones(width) / width, mode="valid")
    noise = math.sqrt(float((np.diff(scores) ** 2).mean()) / 2)
    fall = float(means.max() - means[-1])
    return fall if fall > 3 * noise * math.sqrt(2 / width) else 0.0


def _in_streaks(fit: Fit) -> bool:
    """Return whether neighbouring residuals agree more than independent ones would."""
    residual = fit.pass_rate - fit(fit.hours)
    if fit.n < FEW_POINTS or fit.sse < 1e-12:
        return False
    together = float((residual[1:] * residual[:-1]).sum()) / float((residual**2).sum())
    return together * math.sqrt(fit.n) > STREAKS
