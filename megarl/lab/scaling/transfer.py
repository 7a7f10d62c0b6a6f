"""Predicts a larger policy from smaller ones: A, B, C_mid and R_0 by power laws in N,
the number of active parameters.

    ln(1 − A), ln B, ln C_mid, ln(1 − R_0)  =  intercept + slope · ln N + scatter

Each size's fit gives a mean and a covariance of the four (posterior.py); a size strays
from the line by a scatter. Given the magnitudes of the scatter, lines and predictions
are Gaussian; the magnitudes are drawn from their prior, and weighted by the likelihood
of the fits. Two or three sizes tell little about the scatter, so intervals are then
nearly those of the prior.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.lab.scaling.fit import PRIOR, Fit
from megarl.lab.scaling.forms import FORMS, Array
from megarl.lab.scaling.posterior import FLAT, INTERVAL

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
        `hours` above 0, [3, hours].
        """
        a, b, middle, r0 = self.draws.T[:, :, None]
        share = FORMS["sigmoid"].share(b * np.log(hours / middle))
        strays = np.hypot(PRIOR.seeds, np.median(PRIOR.misfits)) * np.random.default_rng(
            1
        ).standard_normal(share.shape)
        return np.asarray(
            np.quantile((r0 + (a - r0) * share * (1 + strays)).clip(0, 1), INTERVAL, axis=0)
        )


def transfer(fits: Mapping[float, Fit], size: float, r0: float | None = None) -> Transferred:
    """Predict a policy of `size` active parameters from fits by size. r0: its score
    before training, if measured.
    """
    if len(fits) < 2:
        raise MegarlError(
            f"{len(fits)} size cannot show the effect of size; give fits of two or more"
        )
    if min(*fits, size) <= 0 or not np.isfinite([*fits, size]).all():
        raise MegarlError("a size is a number of parameters above 0")
    if r0 is not None and not 0 <= r0 < 1:
        raise MegarlError(f"R_0 is {r0:g}; it is the pass rate before training, from 0 to below 1")
    if (
        len({(fit.unit, fit.form) for fit in fits.values()}) > 1
        or next(iter(fits.values())).form != "sigmoid"
    ):
        raise MegarlError(
            "sizes can be compared only with one unit of compute, and with the sigmoid"
        )
    known = [_logarithms(fit) for fit in fits.values()]
    k = len(fits)
    y = np.concatenate([part.mean(0) for part in known])
    lines = np.log(list(fits)) - np.log(size)  # so that the intercept is the prediction
    x = np.concatenate(
        [np.concatenate([np.eye(4), at * np.eye(4)], axis=1) for at in lines]
    )  # [4k, 8]
    mean = np.concatenate([y.reshape(k, 4).mean(0), SLOPES[:, 0]])
    prior = np.diag(np.concatenate([np.full(4, FLAT), SLOPES[:, 1]]) ** 2)
    rng = np.random.default_rng(0)
    tau = np.abs(rng.standard_normal((DRAWS, 4))) * SCATTER
    across = x @ prior @ x.T
    for n, part in enumerate(known):
        across[4 * n : 4 * n + 4, 4 * n : 4 * n + 4] += np.cov(part.T)
    covariance = across + np.tile(tau**2, k)[:, :, None] * np.eye(4 * k)  # [draws, 4k, 4k]
    missed = y - x @ mean
    to_line = (prior @ x.T)[:4]  # [4, 4k]
    solved = np.linalg.solve(
        covariance, np.broadcast_to(np.column_stack([missed, to_line.T]), (DRAWS, 4 * k, 5))
    )
    log_weight = -0.5 * (np.linalg.slogdet(covariance)[1] + solved[:, :, 0] @ missed)
    weight = np.exp(log_weight - log_weight.max())
    rows = rng.choice(DRAWS, DRAWS, p=weight / weight.sum())
    middle = mean[:4] + solved[rows, :, 0] @ to_line.T
    spread = prior[:4, :4] - to_line @ solved[rows, :, 1:] + tau[rows][:, :, None] ** 2 * np.eye(4)
    drawn = middle + np.einsum(
        "nij,nj->ni", np.linalg.cholesky(spread), rng.standard_normal((DRAWS, 4))
    )
    a = 1 - np.exp(drawn[:, 0])
    b = np.exp(drawn[:, 1])
    c_mid = np.exp(drawn[:, 2])
    start = 1 - np.exp(drawn[:, 3])
    start = start.clip(0, 1) if r0 is None else np.full(DRAWS, r0)
    return Transferred(np.column_stack([a.clip(start, 1), b, c_mid, start]))


def _logarithms(fit: Fit) -> Array:
    """Return draws [draws, 4] of the fit's ln(1 − A), ln B, ln C_mid, ln(1 − R_0)."""
    a, u, w, r0 = fit.posterior.theta.T
    return np.column_stack(
        [np.log1p(-a.clip(0, 0.998)), w, u + np.log(fit.scale), np.log1p(-r0.clip(0, 0.998))]
    )


FEW_SIZES = 4
ALIKE = 0.1
"""How far the score before training may lie outside those of the fits."""


def doubts(fits: Mapping[float, Fit], size: float, r0: float | None = None) -> Iterator[str]:
    """Yield one sentence for each thing that these fits do not support. r0: as for
    `transfer`.
    """
    starts = [fit.R_0 for fit in fits.values()]
    if r0 is not None and not min(starts) - ALIKE <= r0 <= max(starts) + ALIKE:
        alike = "a law in size holds only between runs that begin alike"
        yield (
            f"the size begins at {r0:.2f}, the fits at {min(starts):.2f} to {max(starts):.2f}:"
            f" {alike}"
        )
    if len(fits) < FEW_SIZES:
        assumed = "the intervals mostly show what is assumed about it"
        yield f"{len(fits)} sizes hardly show how far a size strays from a line: {assumed}"
    if size > max(fits) ** 2 / min(fits):
        yield "the size is further beyond the largest than that is beyond the smallest"
    for n, fit in fits.items():
        yield from (f"{n:.3g} parameters: {warning}" for warning in fit.warnings)


def named_size(source: str) -> tuple[float, str]:
    """Split N=POINTS into the number of parameters and a path; for a run directory
    alone, read the number from its model.
    """
    size, _, path = source.partition("=")
    try:
        return float(size), path
    except ValueError:
        run = RunDir(Path(source))
    if not run.recipe.exists():
        raise MegarlError(
            f"{source}: give the number of active parameters, such as 8e9={path or source}"
        ) from None
    from megarl.core.base import architecture  # slow to import, like the recipe
    from megarl.core.recipe import load

    return float(architecture.read(load(str(run.recipe)).model.path).active_parameters), source
