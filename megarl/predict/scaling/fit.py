"""ScaleRL's fit of a learning curve, and how certain its parameters are (arXiv
2510.13786, section 2 and appendix A).

    Curves ──► `windowed`: without early points
           ──► posterior.py: A, B, C_mid, R_0, their intervals ──► `doubts` ──► Fit

The paper tries A = 0.450, 0.455 … 0.800 and values of C_mid, and fits B for each pair;
the smallest sum of squares wins (`grid="paper"`). By default the parameters are the
posterior's mode. In both cases the intervals are the posterior's quantiles. R_0 is not
the score before training: early points do not follow the law, so that score only tells
R_0 up to an error (`BEFORE_TRAINING`).

Intervals describe the recipe: they include what another seed would give. Predictions
(extrapolate.py) describe given curves.

The law does not hold at first, so ScaleRL leaves out the first 1,500 GPU-hours, about
an epoch. For a run whose first epoch is shorter, or on CPU cores, the first epoch is
left out instead, as hours of a run of another size mean little.

`doubts` lists, for every fit, what its points do not support.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.forms import FORMS, Array, Form
from megarl.predict.scaling.points import Curve, amount, binomial_noise
from megarl.predict.scaling.posterior import (
    EXACT,
    FLAT,
    CurvePoints,
    Normal,
    Posterior,
    Prior,
    all_pairs,
)

Grid = Literal["paper", "free"]
R0From = Literal["evaluation", "given", "estimate"]
Interval = tuple[float, float]
CEILINGS = np.linspace(0.45, 0.8, 71)
"""The paper's values of A."""
RECORDED = (
    "form",
    "A",
    "B",
    "C_mid",
    "R_0",
    "r0_from",
    "score_before",
    "sse",
    "rmse",
    "r2",
    "n",
    "window",
    "A_interval",
    "B_interval",
    "C_mid_interval",
    "warnings",
)


class FitOptions(TypedDict, total=False):
    """The options of `fit`, which explains them."""

    r0: float | None
    start: float | None
    end: float | None
    form: str
    grid: Grid
    ceiling: float | None


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted curve. Hours are amounts of compute in `unit`, as in Curve; intervals
    are 95 % intervals.
    """

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
    remarks: tuple[str, ...]  # about the window
    unit: str
    r0_from: R0From
    score_before: float | None  # the score before training, measured or given; None: unknown
    theta: np.ndarray  # [4] A, u, w, R_0 as in forms.py, with compute in units of `scale`
    posterior: Posterior
    hours: np.ndarray  # [n] hours of the points used, ascending
    pass_rate: np.ndarray  # [n] their pass rates
    ceilings: Interval  # the range in which A was searched

    def __call__(self, hours: np.ndarray) -> np.ndarray:
        """Return the fitted pass rate [points] at compute above 0."""
        a, u, w, r0 = self.theta
        form = FORMS[self.form]
        x = form.x(hours, self.scale)
        share = form.share(np.exp(w) * (x - u))
        return r0 + (a - r0) * share

    def record(self) -> dict[str, object]:
        """Return what is printed and written of a fit, by name, for JSON."""
        record: dict[str, object] = {}
        for key in RECORDED:
            value = getattr(self, key)
            record[key] = list(value) if isinstance(value, tuple) else value
        return record

    @property
    def scale(self) -> float:
        """The compute of the last point, the unit of `theta`."""
        return self.window[1]

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Remarks on the window, and what the points do not support."""
        return (*self.remarks, *doubts(self))


class ConstantScores(MegarlError):
    """No curve can be fitted to scores that are all the same. score: what they are, of
    `count`.
    """

    def __init__(self, name: str, count: int, score: float) -> None:
        super().__init__(
            f"{name}: all {count} scores are {score:g}; a constant has no midpoint and no ceiling"
        )
        self.count = count
        self.score = score


BEFORE_TRAINING = 0.03
"""Standard deviation of R_0 around the score before training."""
LN_B = Normal(math.log(1.2), 0.5)
PRIOR = Prior(
    w=LN_B,
    r0=Normal(0.4, FLAT),
    a=Normal(0.6, FLAT),
    misfits=(0.001, 0.01, 0.03, 0.06, 0.1),
    length=0.5,
    seeds=0.04,
    noises=(0.7, 1.0, 1.4),
    beyond=(4.0, 3.0),
)
"""What is known without the points. B: 1.1 to 2.4 in the paper's fits, 1.0 to 1.15 in
runs of the corpus. seeds: the paper's three differ by .015 in A, with a gain of .2. The
rest comes from the open part of the corpus (benchmarks/forecasts.md).
"""
UNKNOWN_NOISE = tuple(np.geomspace(1e-4, 0.3, 12))  # shares of the gain


def fit(
    curves: Sequence[Curve],
    *,
    r0: float | None = None,
    start: float | None = None,
    end: float | None = None,
    form: str = "sigmoid",
    grid: Grid = "free",
    ceiling: float | None = None,
) -> Fit:
    """Fit all curves together (the seeds of one recipe). r0: score before training, by
    default from the curves; start, end: the window in hours; ceiling: a fixed A.
    MegarlError if no curve can be fitted.
    """
    if not curves:
        raise MegarlError("nothing to fit: no curve was given")
    chosen = FORMS.get(form)
    if chosen is None:
        raise MegarlError(f"no form {form!r}; there are {', '.join(FORMS)}")
    points = windowed(curves, start, end)
    score_before, r0_from = before_training(curves, r0)
    _refuse(curves[0].name, chosen, points, score_before, ceiling)

    scale = float(points.hours[-1])
    x = chosen.x(points.hours, scale)
    earliest = float(min(curve.pass_rate[0] for curve in curves if len(curve.pass_rate)))
    r0_prior = _r0_prior(chosen, earliest, score_before, r0_from)
    prior = _prior(chosen, r0_prior, ceiling, noise_known=points.noise is not None)
    curve_points = CurvePoints(x, points.scores, points.curve, points.noise)
    posterior = Posterior(chosen, curve_points, prior)
    ceilings = _ceilings(grid, ceiling)
    if grid == "paper":
        r0_bounds = (0.0, earliest) if score_before is None else (score_before, score_before)
        theta = least_squares(chosen, x, points.scores, ceilings, r0_bounds)
    else:
        theta = posterior.mode()
    return _described(
        chosen,
        points,
        theta,
        posterior,
        unit=curves[0].unit,
        r0_from=r0_from,
        score_before=score_before,
        ceilings=(float(ceilings[0]), float(ceilings[-1])),
    )


def _r0_prior(form: Form, earliest: float, score_before: float | None, r0_from: R0From) -> Normal:
    """Return the prior of R_0. earliest: the lowest first score of the curves, which
    have gained something by then.
    """
    if score_before is None:
        return Normal(0.7 * earliest, 0.5 * earliest + 0.05)
    if r0_from == "given" or form.name == "power":  # the power law cannot tell R_0 from C_mid
        return Normal(score_before, EXACT)
    return Normal(score_before, BEFORE_TRAINING)


def _prior(form: Form, r0: Normal, ceiling: float | None, *, noise_known: bool) -> Prior:
    """Return PRIOR adapted to the form, R_0 and noise; a given ceiling fixes A."""
    prior = replace(PRIOR, r0=r0)
    # PRIOR's w (ln B) and beyond are the sigmoid's; other forms have other bounds.
    if form.name != "sigmoid":
        prior = replace(prior, w=None, beyond=None)
    if not noise_known:
        prior = replace(prior, noises=UNKNOWN_NOISE)
    if ceiling is not None:
        prior = replace(prior, a=Normal(ceiling, EXACT))
    return prior


def _ceilings(grid: Grid, ceiling: float | None) -> Array:
    """Return the values of A to try or, for a free grid, the ends of their range."""
    if ceiling is not None:
        return np.array([ceiling])
    if grid == "paper":
        return CEILINGS
    return np.array([0.0, 1.0])


def _described(
    form: Form,
    points: "WindowedPoints",
    theta: Array,
    posterior: Posterior,
    *,
    unit: str,
    r0_from: R0From,
    score_before: float | None,
    ceilings: Interval,
) -> Fit:
    """Return the fit with these parameters, its errors and its intervals."""
    scale = float(points.hours[-1])
    x = form.x(points.hours, scale)
    scores = points.scores
    a, u, w, r0 = theta.tolist()
    low, high = np.quantile(posterior.theta, (0.025, 0.975), axis=0)
    # An interval contains its parameter, also where the best fit is an unlikely one.
    low = np.minimum(low, theta).tolist()
    high = np.maximum(high, theta).tolist()
    share = form.share(np.exp(w) * (x - u))
    fitted = r0 + (a - r0) * share
    residuals = scores - fitted
    deviations = scores - scores.mean()
    sse = float((residuals**2).sum())
    total = float((deviations**2).sum())
    return Fit(
        form=form.name,
        A=a,
        B=form.b(w, scale),
        C_mid=form.hours(u, scale),
        R_0=r0,
        sse=sse,
        rmse=math.sqrt(sse / len(scores)),
        r2=1 - sse / total,
        n=len(scores),
        window=(float(points.hours[0]), scale),
        A_interval=(low[0], high[0]),
        B_interval=(form.b(low[2], scale), form.b(high[2], scale)),
        C_mid_interval=(form.hours(low[1], scale), form.hours(high[1], scale)),
        remarks=points.remarks,
        unit=unit,
        r0_from=r0_from,
        score_before=score_before,
        theta=theta,
        posterior=posterior,
        hours=points.hours,
        pass_rate=scores,
        ceilings=ceilings,
    )


def before_training(curves: Sequence[Curve], r0: float | None) -> tuple[float | None, R0From]:
    """Return the score before training (None: to be estimated) and its origin. It is
    the mean of the curves' scores, because all seeds begin with equal weights. r0: the
    score, if the user states it.
    """
    if r0 is not None:
        if not 0 <= r0 < 1:
            raise MegarlError(
                f"R_0 is {r0:g}; it is the pass rate before training, between 0 and 1"
            )
        return r0, "given"
    measured = [curve.r0 for curve in curves if curve.r0 is not None]
    if not measured:
        return None, "estimate"
    return sum(measured) / len(measured), "evaluation"


def _refuse(
    name: str, form: Form, points: "WindowedPoints", r0: float | None, ceiling: float | None
) -> None:
    """Raise MegarlError if no curve can be fitted to these points. r0: the score before
    training, None if R_0 is to be estimated; ceiling: A, None if it is to be fitted.
    """
    parameters = 2  # B and C_mid
    give_r0 = ""
    if r0 is None:
        parameters += 1
        give_r0 = ", or give the score before training (--r0)"
    if ceiling is None:
        parameters += 1
    count = len(points.hours)
    if count <= parameters:
        plural = "" if count == 1 else "s"
        raise MegarlError(
            f"{name}: {count} point{plural} in the window; a curve of"
            f" {parameters} parameters needs at least {parameters + 1}. Wait for more evaluations,"
            f" widen the window (--from, --until){give_r0}"
        )
    amounts = np.unique(points.hours).size
    if amounts <= parameters:
        raise MegarlError(
            f"{name}: only {amounts} different amounts of compute; nothing can be fitted to that"
        )
    scores = points.scores
    if np.ptp(scores) < 1e-9:  # also for scores whose squares are less than floats can represent
        raise ConstantScores(name, len(scores), float(scores[0]))
    if form.name == "power" and r0 is None:
        raise MegarlError(
            f"{name}: the power law cannot estimate R_0 (it only moves C_mid); give --r0"
        )


# The paper's own procedure: the sum of squares for each A of a list and a fine grid of
# C_mid and B; the smallest wins.
GRID = (64, 40)  # numbers of values of u and w (forms.py)
INSIDE = 48  # more values of u among the points, where a steep curve may have a minimum in each gap
FINER = 9  # values on each axis around the best cell, in each of ROUNDS grids
ROUNDS = 40


def least_squares(
    form: Form, x: Array, y: Array, ceilings: Array, r0_bounds: tuple[float, float]
) -> Array:
    """Return the parameters [4] (A, u, w, R_0) with the least sum of squares. x, y:
    [points]; r0_bounds: equal if R_0 is known. It tries every (A, u, w) of a grid, with
    a free R_0 in closed form; then finer grids around the best (u, w) of each A.
    """
    span = np.log(1000.0) if form.log else form.above
    low, high = form.w_bounds
    first = x.min()
    last = x.max()
    everywhere = np.linspace(first - span, last + span, GRID[0])
    among_points = np.linspace(first, last, INSIDE)
    u_axis = np.union1d(everywhere, among_points)
    w_axis = np.linspace(low, high, GRID[1])
    grid_u, grid_w = all_pairs(u_axis, w_axis)
    a = ceilings[:, None]
    errors, _ = _errors(form, x, y, a, grid_u[None], grid_w[None], r0_bounds)
    best_cell = errors.argmin(1)  # [ceilings]
    best_u = grid_u[best_cell]
    best_w = grid_w[best_cell]

    widest_step_u = np.diff(u_axis).max()
    step_w = w_axis[1] - w_axis[0]
    radius = 1.0  # of the finer grid, in steps of the first one
    unit_axis = np.linspace(-1, 1, FINER)
    steps_u, steps_w = all_pairs(unit_axis, unit_axis)
    rows = np.arange(len(ceilings))
    for _ in range(ROUNDS):
        finer_u = best_u[:, None] + radius * widest_step_u * steps_u
        finer_w = best_w[:, None] + radius * step_w * steps_w
        finer_w = np.clip(finer_w, low, high)
        errors, r0 = _errors(form, x, y, a, finer_u, finer_w, r0_bounds)
        best_cell = errors.argmin(1)
        best_u = finer_u[rows, best_cell]
        best_w = finer_w[rows, best_cell]
        radius = radius * 0.6
    best = int(errors[rows, best_cell].argmin())
    best_r0 = r0[best, best_cell[best]]
    return np.array([ceilings[best], best_u[best], best_w[best], best_r0])


def _errors(
    form: Form, x: Array, y: Array, a: Array, u: Array, w: Array, r0_bounds: tuple[float, float]
) -> tuple[Array, Array]:
    """Return sums of squares and the best R_0, both [ceilings, cells]. x, y: [points];
    a: [ceilings, 1]; u, w: [1 or ceilings, cells].

    The law is R_0 q + A s, with q = 1 − s. So R_0 follows from sums over the points of
    products of q, s and y, which `qq`, `sq`, … are named after.
    """
    steepness = np.exp(w)[..., None]
    from_middle = x - u[..., None]
    s = form.share(steepness * from_middle)  # [1 or ceilings, cells, points]
    q = 1 - s
    ss = (s * s).sum(-1)
    qq = (q * q).sum(-1)
    sq = (s * q).sum(-1)
    ys = s @ y
    yq = q @ y
    yy = float(y @ y)
    r0 = (yq - a * sq) / np.maximum(qq, 1e-300)  # qq is 0 where all points are at the ceiling
    r0 = np.clip(r0, *r0_bounds)
    # The square of y - r0 q - a s, term by term.
    errors = yy - 2 * r0 * yq - 2 * a * ys
    errors = errors + r0 * r0 * qq
    errors = errors + 2 * a * r0 * sq
    errors = errors + a * a * ss
    return errors, r0


EARLY_HOURS = 1500.0  # GPU-hours that the paper leaves out
ENOUGH = 8  # points that must remain for the default window to leave any out


class WindowedPoints(NamedTuple):
    """The points in the window, by ascending hours, [points] each."""

    hours: Array
    scores: Array
    curve: Array  # the number of each point's curve
    noise: Array | None  # None if that of any curve is unknown
    remarks: tuple[str, ...]  # on the window


def windowed(curves: Sequence[Curve], start: float | None, end: float | None) -> WindowedPoints:
    """Return the points of all curves in the window, with remarks on it. start, end:
    its hours; None: each curve's default start, and no end. MegarlError if the window
    is empty, or the curves have different units.
    """
    if len({curve.unit for curve in curves}) > 1:
        raise MegarlError("core-hours and GPU-hours cannot be fitted together")
    if start is not None and end is not None and start >= end:
        raise MegarlError(f"the window is empty: from {start:g} until {end:g} hours")
    remarks: list[str] = []
    hours = []
    scores = []
    curve_numbers = []
    noises = []
    for number, curve in enumerate(curves):
        low = _default_start(curve, end, remarks) if start is None else start
        high = math.inf if end is None else end
        inside = (curve.hours >= low) & (curve.hours <= high)
        hours.append(curve.hours[inside])
        scores.append(curve.pass_rate[inside])
        curve_numbers.append(np.full(inside.sum(), number))
        noises.append(_noise(curve)[inside])
    all_hours = np.concatenate(hours)
    order = np.argsort(all_hours, kind="stable")
    noise = np.concatenate(noises)[order]
    return WindowedPoints(
        all_hours[order],
        np.concatenate(scores)[order],
        np.concatenate(curve_numbers)[order],
        noise if np.isfinite(noise).all() else None,
        tuple(dict.fromkeys(remarks)),
    )


def _noise(curve: Curve) -> Array:
    """Return the standard error of each score [points]; NaN if it is unknown."""
    if curve.noise is not None:
        return curve.noise
    return binomial_noise(curve.pass_rate, curve.answers or math.nan)


def _default_start(curve: Curve, end: float | None, remarks: list[str]) -> float:
    """Return the hours before which points are left out by default: the end of the
    first epoch, or on GPUs EARLY_HOURS if that is earlier. Return 0, and add a remark,
    if too few points would be left. end: of the window.
    """
    epoch_end = math.inf if curve.first_epoch is None else curve.first_epoch
    if curve.unit == "gpu":
        early = min(epoch_end, EARLY_HOURS)
    elif curve.first_epoch is None:
        early = 0.0
    else:
        early = epoch_end
    hours = curve.hours if end is None else curve.hours[curve.hours <= end]
    later = (hours >= early).sum()
    if later >= ENOUGH or not (hours < early).any():
        return early if math.isfinite(early) else 0.0
    period = f"the first {EARLY_HOURS:,.0f} GPU-hours"
    if early == epoch_end:
        period = "the first epoch"
    remarks.append(
        f"{period} could not be left out ({later} of {len(hours)} points are later): early points,"
        " where the law does not hold yet, are in the fit"
    )
    return 0.0


FEW_POINTS = 8
WIDE_INTERVAL = 0.08  # of a recipe's A: ScaleRL quotes ±0.02 for three seeds
# autocorrelation of residuals, in standard deviations, that noise alone exceeds once in
# a hundred fits
STREAKS = 2.6


def doubts(fit: Fit) -> Iterator[str]:
    """Yield one sentence for each thing that the fit's points do not support."""
    low, high = fit.ceilings  # equal if the user gave A
    a_low, a_high = fit.A_interval
    if fit.r0_from == "estimate":
        yield (
            f"R_0 = {fit.R_0:.3f} is an estimate: no score before training is known (--r0 gives"
            " one)"
        )
    if fit.A - fit.R_0 < 1e-6:
        yield (
            f"scores do not rise: the best fit is a constant {fit.A:.3f}, and nothing determines"
            " its B and C_mid"
        )
    elif fit.form != "power" and fit.window[1] < fit.C_mid:
        yield (
            f"the window ends at {amount(fit.window[1], fit.unit)}, before C_mid ="
            f" {amount(fit.C_mid)}: the half of the curve that shows the ceiling has not been seen"
        )
    if fit.n < FEW_POINTS:
        yield f"only {fit.n} points; even {FEW_POINTS} are few"
    to_end = min(fit.A - low, high - fit.A)
    if low < high and to_end < 1e-6:
        yield (
            f"A = {fit.A:.3f} is at the edge of its range {low:g} … {high:g}: the points do not"
            " determine it"
        )
    fall = _fall(fit.pass_rate)
    if fall > 0:
        yield (
            f"scores are not monotone: the last ones are {fall:.3f} below earlier ones, and the law"
            " can only rise"
        )
    if low < high and a_high - a_low > WIDE_INTERVAL:
        yield f"A is only known to lie in {a_low:.3f} … {a_high:.3f}, wider than {WIDE_INTERVAL}"
    if _in_streaks(fit):
        yield "residuals come in streaks: the form does not follow the points"


def _fall(scores: np.ndarray) -> float:
    """Return how far the mean of the last quarter of the scores is below that of the
    best quarter; 0 if noise (3 deviations) explains it. Noise is estimated from
    differences between neighbours, whose variance is twice that of the noise.
    """
    width = max(2, len(scores) // 4)
    means = np.convolve(scores, np.ones(width) / width, mode="valid")
    noise = math.sqrt(float((np.diff(scores) ** 2).mean()) / 2)
    fall = float(means.max() - means[-1])
    explained_by_noise = 3 * noise * math.sqrt(2 / width)
    return fall if fall > explained_by_noise else 0.0


def _in_streaks(fit: Fit) -> bool:
    """Return whether neighbouring residuals are more alike than independent ones would
    be.
    """
    residual = fit.pass_rate - fit(fit.hours)
    # Residuals as small as what rounding to three digits leaves tell nothing.
    if fit.n < FEW_POINTS or fit.rmse < 5e-4:
        return False
    products = float((residual[1:] * residual[:-1]).sum())
    autocorrelation = products / float((residual**2).sum())
    return autocorrelation * math.sqrt(fit.n) > STREAKS
