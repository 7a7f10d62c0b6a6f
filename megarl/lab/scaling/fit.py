"""ScaleRL's fit of a learning curve, and how certain its parameters are (arXiv
2510.13786, section 2 and appendix A).

    Curves ──► `windowed`: without early points ──► posterior.py: A, B, C_mid, R_0, their intervals ──► `doubts` ──► Fit

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
from typing import Literal, TypedDict

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.lab.scaling.forms import FORMS, Array, Form
from megarl.lab.scaling.points import Curve, amount, binomial_noise
from megarl.lab.scaling.posterior import EXACT, FLAT, CurvePoints, Normal, Posterior, Prior

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
        return r0 + (a - r0) * form.share(np.exp(w) * (form.x(hours, self.scale) - u))

    def record(self) -> dict[str, object]:
        values = {key: getattr(self, key) for key in RECORDED}
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }

    @property
    def scale(self) -> float:
        return self.window[1]

    @cached_property
    def warnings(self) -> tuple[str, ...]:
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
rest comes from the open part of the corpus (benchmarks/README.md).
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
    if (chosen := FORMS.get(form)) is None:
        raise MegarlError(f"no form {form!r}; there are {', '.join(FORMS)}")
    hours, scores, number, noise, remarks = windowed(curves, start, end)
    known, r0_from = before_training(curves, r0)
    _refuse(curves[0].name, chosen, hours, scores, known, ceiling)
    scale = float(hours[-1])
    x = chosen.x(hours, scale)
    earliest = float(min(curve.pass_rate[0] for curve in curves if len(curve.pass_rate)))
    start_prior = Normal(0.7 * earliest, 0.5 * earliest + 0.05)
    if known is not None:  # the power law cannot tell R_0 from C_mid
        start_prior = Normal(
            known, EXACT if r0_from == "given" or form == "power" else BEFORE_TRAINING
        )
    prior = replace(
        PRIOR if form == "sigmoid" else replace(PRIOR, w=None, beyond=None),
        noises=UNKNOWN_NOISE if noise is None else PRIOR.noises,
        r0=start_prior,
        a=PRIOR.a if ceiling is None else Normal(ceiling, EXACT),
    )
    posterior = Posterior(chosen, CurvePoints(x, scores, number, noise), prior)
    ceilings = (
        np.array([ceiling])
        if ceiling is not None
        else CEILINGS
        if grid == "paper"
        else np.array([0.0, 1.0])
    )
    if grid == "paper":
        theta = least_squares(
            chosen, x, scores, ceilings, (0.0, earliest) if known is None else (known, known)
        )
    else:
        theta = posterior.mode()
    a, u, w, r_0 = theta.tolist()
    low, high = np.quantile(posterior.theta, (0.025, 0.975), axis=0)
    low = np.minimum(low, theta).tolist()
    high = np.maximum(high, theta).tolist()
    fitted = r_0 + (a - r_0) * chosen.share(np.exp(w) * (x - u))
    sse = float(((scores - fitted) ** 2).sum())
    spread = float(((scores - scores.mean()) ** 2).sum())
    return Fit(
        form=form,
        A=a,
        B=chosen.b(w, scale),
        C_mid=chosen.hours(u, scale),
        R_0=r_0,
        sse=sse,
        rmse=math.sqrt(sse / len(hours)),
        r2=1 - sse / spread,
        n=len(hours),
        window=(float(hours[0]), scale),
        A_interval=(low[0], high[0]),
        B_interval=(chosen.b(low[2], scale), chosen.b(high[2], scale)),
        C_mid_interval=(chosen.hours(low[1], scale), chosen.hours(high[1], scale)),
        remarks=remarks,
        unit=curves[0].unit,
        r0_from=r0_from,
        score_before=known,
        theta=theta,
        posterior=posterior,
        hours=hours,
        pass_rate=scores,
        ceilings=(float(ceilings[0]), float(ceilings[-1])),
    )


def before_training(curves: Sequence[Curve], given: float | None) -> tuple[float | None, R0From]:
    """Return the score before training (None: to be estimated) and its origin. Seeds
    begin with equal weights: their mean.
    """
    if given is not None:
        if not 0 <= given < 1:
            raise MegarlError(
                f"R_0 is {given:g}; it is the pass rate before training, between 0 and 1"
            )
        return given, "given"
    measured = [curve.r0 for curve in curves if curve.r0 is not None]
    return (sum(measured) / len(measured), "evaluation") if measured else (None, "estimate")


def _refuse(
    name: str, form: Form, hours: Array, scores: Array, r0: float | None, ceiling: float | None
) -> None:
    """Raise MegarlError if no curve can be fitted to these points."""
    parameters = 2 + (r0 is None) + (ceiling is None)
    if len(hours) <= parameters:
        raise MegarlError(
            f"{name}: {len(hours)} point{'s' * (len(hours) != 1)} in the window; a curve of"
            f" {parameters} parameters needs at least {parameters + 1}. Wait for more evaluations,"
            " widen the window (--from, --until)"
            + (", or give the score before training (--r0)" if r0 is None else "")
        )
    if (amounts := np.unique(hours).size) <= parameters:
        raise MegarlError(
            f"{name}: only {amounts} different amounts of compute; nothing can be fitted to that"
        )
    if np.ptp(scores) < 1e-9:  # also for scores whose squares are less than floats can represent
        raise ConstantScores(name, len(scores), float(scores[0]))
    if form.name == "power" and r0 is None:
        raise MegarlError(
            f"{name}: the power law cannot estimate R_0 (it only moves C_mid); give --r0"
        )


# The paper's own procedure: the sum of squares for each A of a list and a fine grid of
# C_mid and B; the smallest wins.
GRID = (64, 40)  # numbers of values of u and w
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
    (low, high) = form.w_bounds
    u = np.union1d(
        np.linspace(x.min() - span, x.max() + span, GRID[0]), np.linspace(x.min(), x.max(), INSIDE)
    )
    w = np.linspace(low, high, GRID[1])
    us, ws = (part.ravel() for part in np.meshgrid(u, w, indexing="ij"))
    errors, _ = _errors(
        form, x, y, ceilings[:, None], us[None], ws[None], r0_bounds
    )  # [ceilings, cells]
    best = errors.argmin(1)
    at_u = us[best]
    at_w = ws[best]
    wide = 1.0
    steps_u, steps_w = (
        part.ravel() for part in np.meshgrid(*[np.linspace(-1, 1, FINER)] * 2, indexing="ij")
    )
    rows = np.arange(len(ceilings))
    for _ in range(ROUNDS):
        near_u = at_u[:, None] + wide * np.diff(u).max() * steps_u
        near_w = np.clip(at_w[:, None] + wide * (w[1] - w[0]) * steps_w, low, high)
        errors, r0 = _errors(form, x, y, ceilings[:, None], near_u, near_w, r0_bounds)
        best = errors.argmin(1)
        at_u = near_u[rows, best]
        at_w = near_w[rows, best]
        wide = wide * 0.6
    n = int(errors[rows, best].argmin())
    return np.array([ceilings[n], at_u[n], at_w[n], r0[n, best[n]]])


def _errors(
    form: Form, x: Array, y: Array, a: Array, u: Array, w: Array, r0_bounds: tuple[float, float]
) -> tuple[Array, Array]:
    """Return sums of squares and the best R_0, both [ceilings, cells]. a: [ceilings,
    1]; u, w: [1 or ceilings, cells].
    """
    s = form.share(np.exp(w)[..., None] * (x - u[..., None]))  # [1 or ceilings, cells, points]
    q = 1 - s
    ss = (s * s).sum(-1)
    qq = (q * q).sum(-1)
    sq = (s * q).sum(-1)
    ys = s @ y
    yq = q @ y
    r0 = np.clip((yq - a * sq) / np.maximum(qq, 1e-300), *r0_bounds)
    return float(y @ y) - 2 * r0 * yq - 2 * a * ys + r0 * r0 * qq + 2 * a * r0 * sq + a * a * ss, r0


EARLY_HOURS = 1500.0  # GPU-hours that the paper leaves out
ENOUGH = 8  # points that must remain for the default window to leave any out


def windowed(
    curves: Sequence[Curve], start: float | None, end: float | None
) -> tuple[Array, Array, Array, Array | None, tuple[str, ...]]:
    """Return hours, scores, curve numbers and noise of the points in the window, by
    ascending hours, and remarks on the window. The noise is None if that of any curve
    is unknown.
    """
    if len({curve.unit for curve in curves}) > 1:
        raise MegarlError("core-hours and GPU-hours cannot be fitted together")
    if start is not None and end is not None and start >= end:
        raise MegarlError(f"the window is empty: from {start:g} until {end:g} hours")
    remarks: list[str] = []
    kept = []
    for number, curve in enumerate(curves):
        low = start if start is not None else _default(curve, end, remarks)
        inside = (curve.hours >= low) & (curve.hours <= (math.inf if end is None else end))
        noise = (
            binomial_noise(curve.pass_rate, curve.answers or math.nan)
            if curve.noise is None
            else curve.noise
        )
        kept.append(
            [
                part[inside]
                for part in (curve.hours, curve.pass_rate, np.full(len(inside), number), noise)
            ]
        )
    columns = [np.concatenate(part) for part in zip(*kept, strict=True)]
    hours, scores, numbers, noise = (
        column[np.argsort(columns[0], kind="stable")] for column in columns
    )
    return (
        hours,
        scores,
        numbers,
        noise if np.isfinite(noise).all() else None,
        tuple(dict.fromkeys(remarks)),
    )


def _default(curve: Curve, end: float | None, remarks: list[str]) -> float:
    """Return the hours before which points are left out by default; add a remark if
    none can be.
    """
    epoch = math.inf if curve.first_epoch is None else curve.first_epoch
    early = (
        min(epoch, EARLY_HOURS)
        if curve.unit == "gpu"
        else 0.0
        if curve.first_epoch is None
        else epoch
    )
    rest = curve.hours if end is None else curve.hours[curve.hours <= end]
    if (rest >= early).sum() >= ENOUGH or not (rest < early).any():
        return early if math.isfinite(early) else 0.0
    what = "the first epoch" if early == epoch else f"the first {EARLY_HOURS:,.0f} GPU-hours"
    later = f"{(rest >= early).sum()} of {len(rest)} points are later"
    why = "early points, where the law does not hold yet, are in the fit"
    remarks.append(f"{what} could not be left out ({later}): {why}")
    return 0.0


FEW_POINTS = 8
WIDE_INTERVAL = 0.08  # of a recipe's A: ScaleRL quotes ±0.02 for three seeds
# autocorrelation of residuals, in standard deviations, that noise alone exceeds once in
# a hundred fits
STREAKS = 2.6


def doubts(fit: Fit) -> Iterator[str]:
    """Yield one sentence for each thing that the fit's points do not support."""
    (low, high) = fit.ceilings
    (a_low, a_high) = fit.A_interval
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
        ends = (
            f"the window ends at {amount(fit.window[1], fit.unit)}, before C_mid ="
            f" {amount(fit.C_mid)}"
        )
        yield f"{ends}: the half of the curve that shows the ceiling has not been seen"
    if fit.n < FEW_POINTS:
        yield f"only {fit.n} points; even {FEW_POINTS} are few"
    if low < high and min(fit.A - low, high - fit.A) < 1e-6:
        yield (
            f"A = {fit.A:.3f} is at the edge of its range {low:g} … {high:g}: the points do not"
            " determine it"
        )
    if (fall := _fall(fit.pass_rate)) > 0:
        yield (
            f"scores are not monotone: the last ones are {fall:.3f} below earlier ones, and the law"
            " can only rise"
        )
    if low < high and a_high - a_low > WIDE_INTERVAL:
        yield f"A is only known to lie in {a_low:.3f} … {a_high:.3f}, wider than {WIDE_INTERVAL}"
    if _in_streaks(fit):
        yield "residuals come in streaks: the form does not follow the points"


def _fall(scores: np.ndarray) -> float:
    """Return how far the mean of the last quarter is below that of the best quarter; 0
    if noise (3 deviations) explains it. Noise is estimated from differences between
    neighbours, whose variance is twice that of the noise.
    """
    width = max(2, len(scores) // 4)
    means = np.convolve(scores, np.ones(width) / width, mode="valid")
    noise = math.sqrt(float((np.diff(scores) ** 2).mean()) / 2)
    fall = float(means.max() - means[-1])
    return fall if fall > 3 * noise * math.sqrt(2 / width) else 0.0


def _in_streaks(fit: Fit) -> bool:
    """Return whether neighbouring residuals are more alike than independent ones would
    be.
    """
    residual = fit.pass_rate - fit(fit.hours)
    if fit.n < FEW_POINTS or fit.rmse < 5e-4:
        return False
    together = float((residual[1:] * residual[:-1]).sum()) / float((residual**2).sum())
    return together * math.sqrt(fit.n) > STREAKS
