"""Predicts a larger policy from smaller ones: A, B, C_mid and R_0 by power laws in N,
the number of active parameters.

    ln(1 − A), ln B, ln C_mid, ln(1 − R_0)  =  intercept + slope · ln N + scatter

Each size's fit gives a mean and a covariance of the four (posterior.py); a size strays
from the line by a scatter. Given the magnitudes of the scatter, lines and predictions
are Gaussian; the magnitudes are drawn from their prior, and weighted by the likelihood
of the fits. Two or three sizes tell little about the scatter, so intervals are then
nearly those of the prior.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.predict.scaling.fit import PRIOR, Fit
from megarl.predict.scaling.forms import SIGMOID, Array
from megarl.predict.scaling.posterior import FLAT, INTERVAL

SLOPES = np.array([(0.0, 0.3), (0.0, 0.15), (0.5, 1.0), (0.0, 0.5)])
"""Prior mean and deviation of each slope: a guess. ScaleRL's 8B and 17Bx16 (17B active)
give −.39, −.20 and .67.
"""
SCATTER = np.array([0.15, 0.1, 0.4, 0.2])
"""Deviation of the half-normal prior of each scatter: a guess. The paper's eight
leave-one-out runs, all of one size, deviate by .02 in ln(1 − A), .08 in ln B and .11 in
ln C_mid.
"""
DRAWS = 4000


class Transferred(NamedTuple):
    """The prediction for a size. draws: [draws, 4] A, B, C_mid, R_0."""

    draws: Array

    @property
    def intervals(self) -> Array:
        """The median and both ends of the 95 % interval, [3, 4]."""
        return np.asarray(np.quantile(self.draws, INTERVAL, axis=0))

    def scores(self, hours: Array) -> Array:
        """Return the median and both ends of the 95 % interval of a run's score at
        `hours` above 0, [3, hours]. A run strays from its law by a share of the gain,
        as large as those of seeds and misfits in `PRIOR`.
        """
        a, b, middle, r0 = self.draws.T[:, :, None]  # [draws, 1] each
        z = b * np.log(hours / middle)
        share = SIGMOID.share(z)
        random = np.random.default_rng(1).standard_normal(share.shape)
        deviation = np.hypot(PRIOR.seeds, np.median(PRIOR.misfits))
        strays = deviation * random
        gain = (a - r0) * share * (1 + strays)
        scores = (r0 + gain).clip(0, 1)
        return np.asarray(np.quantile(scores, INTERVAL, axis=0))


def transfer(fits: Mapping[float, Fit], size: float, r0: float | None = None) -> Transferred:
    """Predict a policy of `size` active parameters from the fits of other policies, by
    their active parameters. r0: the predicted policy's score before training, if it is
    measured. MegarlError if these cannot be used together.
    """
    _refuse(fits, size, r0)
    logarithms = [_logarithms(fit) for fit in fits.values()]
    # Relative to `size`, so that each line's intercept is its prediction.
    log_sizes = np.log(list(fits)) - np.log(size)
    rng = np.random.default_rng(0)
    draws = _predicted(logarithms, log_sizes, rng)
    log_gap, log_b, log_c_mid, log_wrong_at_start = draws.T
    a = 1 - np.exp(log_gap)
    b = np.exp(log_b)
    c_mid = np.exp(log_c_mid)
    start = (1 - np.exp(log_wrong_at_start)).clip(0, 1)
    if r0 is not None:
        start = np.full(DRAWS, r0)
    return Transferred(np.column_stack([a.clip(start, 1), b, c_mid, start]))


def _refuse(fits: Mapping[float, Fit], size: float, r0: float | None) -> None:
    """Raise MegarlError if `transfer` cannot predict from these arguments: fewer than
    two sizes, an impossible size or R_0, fits of several units or no sigmoids.
    """
    if len(fits) < 2:
        raise MegarlError(
            f"{len(fits)} size cannot show the effect of size; give fits of two or more"
        )
    if min(*fits, size) <= 0 or not np.isfinite([*fits, size]).all():
        raise MegarlError("a size is a number of parameters above 0")
    if r0 is not None and not 0 <= r0 < 1:
        raise MegarlError(f"R_0 is {r0:g}; it is the pass rate before training, from 0 to below 1")
    units = {fit.unit for fit in fits.values()}
    forms = {fit.form for fit in fits.values()}
    if len(units) > 1 or forms != {"sigmoid"}:
        raise MegarlError(
            "sizes can be compared only with one unit of compute, and with the sigmoid"
        )


def _predicted(logarithms: Sequence[Array], log_sizes: Array, rng: np.random.Generator) -> Array:
    """Return draws [DRAWS, 4] of the four logarithms at the size whose `log_sizes`
    would be 0: the lines' intercepts plus scatter. The scatter is drawn from its prior
    and resampled by the likelihood of the fits; the rest is Gaussian, given the fits.
    logarithms: draws [draws, 4] of each of k fits; log_sizes: [k].
    """
    k = len(logarithms)
    y = np.concatenate([draws.mean(0) for draws in logarithms])  # [4k]
    identity = np.eye(4)
    rows_by_size = []
    for log_size in log_sizes:
        rows_by_size.append(np.concatenate([identity, log_size * identity], axis=1))
    x = np.concatenate(rows_by_size)  # [4k, 8]: intercepts, slopes
    mean_intercept = y.reshape(k, 4).mean(0)
    mean_slope, slope_deviation = SLOPES.T
    mean = np.concatenate([mean_intercept, mean_slope])
    deviation = np.concatenate([np.full(4, FLAT), slope_deviation])
    prior = np.diag(deviation**2)

    # The covariance of the fits' means, for each drawn scatter.
    scatter = np.abs(rng.standard_normal((DRAWS, 4))) * SCATTER
    of_lines_and_fits = x @ prior @ x.T
    for n, draws in enumerate(logarithms):
        rows = slice(4 * n, 4 * n + 4)
        of_lines_and_fits[rows, rows] += np.cov(draws.T)
    variances = np.tile(scatter**2, k)
    of_scatter = variances[:, :, None] * np.eye(4 * k)
    covariance = of_lines_and_fits + of_scatter  # [DRAWS, 4k, 4k]

    residuals = y - x @ mean
    # The likelihood of each drawn scatter. One solution serves this and what follows.
    cov_intercepts_fits = (prior @ x.T)[:4]  # [4, 4k]
    right_side = np.column_stack([residuals, cov_intercepts_fits.T])
    right_sides = np.broadcast_to(right_side, (DRAWS, 4 * k, 5))
    solved = np.linalg.solve(covariance, right_sides)
    solved_residuals = solved[:, :, 0]
    solved_intercepts = solved[:, :, 1:]
    log_determinant = np.linalg.slogdet(covariance)[1]
    log_weight = -0.5 * (log_determinant + solved_residuals @ residuals)
    weight = np.exp(log_weight - log_weight.max())

    # The intercepts, given the fits, with a scatter of the predicted size's own.
    chosen = rng.choice(DRAWS, DRAWS, p=weight / weight.sum())
    centre = mean[:4] + solved_residuals[chosen] @ cov_intercepts_fits.T
    own_scatter = scatter[chosen][:, :, None] ** 2 * identity
    explained = cov_intercepts_fits @ solved_intercepts[chosen]
    predicted_covariance = prior[:4, :4] - explained + own_scatter
    root = np.linalg.cholesky(predicted_covariance)
    random = rng.standard_normal((DRAWS, 4))
    return np.asarray(centre + np.einsum("nij,nj->ni", root, random))


def _logarithms(fit: Fit) -> Array:
    """Return draws [draws, 4] of the fit's ln(1 − A), ln B, ln C_mid, ln(1 − R_0). A
    and R_0 are clipped, because the logarithm of 0 is none.
    """
    a, u, w, r0 = fit.posterior.theta.T
    log_gap = np.log1p(-a.clip(0, 0.998))
    log_c_mid = u + np.log(fit.scale)
    log_wrong_at_start = np.log1p(-r0.clip(0, 0.998))
    return np.column_stack([log_gap, w, log_c_mid, log_wrong_at_start])


FEW_SIZES = 4
ALIKE = 0.1
"""How far the score before training may lie outside those of the fits without a
doubt.
"""


def doubts(fits: Mapping[float, Fit], size: float, r0: float | None = None) -> Iterator[str]:
    """Yield a sentence for each reason to doubt what `transfer` predicts for `size`
    active parameters. fits: by the active parameters of their policies. r0: the
    predicted policy's score before training, if it is measured.
    """
    starts = [fit.R_0 for fit in fits.values()]
    low = min(starts)
    high = max(starts)
    if r0 is not None and not low - ALIKE <= r0 <= high + ALIKE:
        yield (
            f"a run of this size begins at {r0:.2f}, those of the fits at {low:.2f} to {high:.2f}:"
            " a law in size holds only between runs that begin alike"
        )
    if len(fits) < FEW_SIZES:
        yield (
            f"{len(fits)} sizes hardly show how far a size strays from a line: the intervals mostly"
            " show what is assumed about it"
        )
    smallest = min(fits)
    largest = max(fits)
    if size / largest > largest / smallest:
        yield "the size is further beyond the largest than that is beyond the smallest"
    for parameters, fit in fits.items():
        for warning in fit.warnings:
            yield f"{parameters:.3g} parameters: {warning}"


def named_size(source: str) -> tuple[float, str]:
    """Split N=POINTS into the number of parameters and a path; for a run directory
    alone, read the number from its model. MegarlError if it is neither.
    """
    size, _, path = source.partition("=")
    try:
        return float(size), path
    except ValueError:  # no number before "=": the whole is a run directory
        run = RunDir(Path(source))
    if not run.recipe.exists():
        raise MegarlError(
            f"{source}: give the number of active parameters, such as 8e9={path or source}"
        ) from None
    from megarl.core.base import architecture  # slow to import, like the recipe
    from megarl.core.recipe import load

    shape = architecture.read(load(str(run.recipe)).model.path)
    return float(shape.active_parameters), source
