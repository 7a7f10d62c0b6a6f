"""The law over batch sizes: P prompts per step, G rollouts per prompt, n rollouts in
all. One fit for short runs of few (P, G).

    R(n; P, G) = R_0 + (A_PG − R_0) / (1 + (n_PG / n)^B)

          n_PG = N (P/P_0)^α (G/G_0)^β
      1 − A_PG = (1 − A) (P/P_0)^−δ (G/G_0)^−ε

P_0 and G_0 are the runs' geometric means. α = 0: only rollouts count, as with noisy
gradients; α = 1: only steps count, as beyond the critical batch size (arXiv
1812.06162). Powers approximate the change from one to the other, so they hold only near
the runs.

How far a run strays from its curve, and a curve from these powers, is part of the noise
(posterior.py). The eight parameters are sampled by the stretch move of Goodman and
Weare (2010, doi 10.2140/camcos.2010.5.65).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.fit import BEFORE_TRAINING, LN_B, before_training, windowed
from megarl.predict.scaling.forms import SIGMOID, Array
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.posterior import Normal

WALKERS = 64
ROUNDS = 1500
THIN = 8  # one round in so many gives draws, as neighbouring ones are alike
# how far a run strays from its curve, as a share of the gain, and for how long in ln n
MISFIT = 0.03
LENGTH = 1.5
# how far a run strays from the powers, and a seed from other seeds, as a share of the
# gain
OFFSET = 0.06
POWERS = Normal(0.5, 0.4)
"""Prior of α and β. ScaleRL's paper: batches of 512 to 2,048 give 1.07 in GPU-hours; 8
to 32 generations .13 for β − α.
"""
CEILINGS = Normal(0.08, 0.1)
"""Prior of δ and ε. In the paper, batch sizes give .08, generations .01 for ε − δ; a
seed's ±.015 in A corresponds to ±.04.
"""


class CellRun(NamedTuple):
    """A run with one batch size: prompts per step, rollouts per prompt (`generations`).

    curve: scores over the cumulative number of rollouts, which its `hours` hold;
    device_hours: of one step, without start-up and evaluations.
    """

    prompts: int
    generations: int
    curve: Curve
    device_hours: float

    @property
    def batch(self) -> tuple[int, int]:
        """Prompts per step and rollouts per prompt."""
        return self.prompts, self.generations


class CellLaw:
    """The fitted law. theta [draws, 8]: R_0, A, ln B, ln(N / scale), α, β, δ, ε, where
    `scale` is the largest number of rollouts. MegarlError if the runs cannot be fitted.
    """

    def __init__(self, runs: Sequence[CellRun]) -> None:
        if len({run.batch for run in runs}) < 2:
            plural = "" if len(runs) == 1 else "s"
            raise MegarlError(
                f"{len(runs)} run{plural} of one batch cannot tell what another would do; give"
                " runs that differ in batch.prompts or sampling.generations (--curves A,B)"
            )
        curves = [run.curve for run in runs]
        points = windowed(curves, 0.0, None)
        self.y = points.scores
        if points.noise is None:
            raise MegarlError(
                "--curves: no number of answers is known for the scores; give run directories, or"
                " a column `answers`"
            )
        if len(self.y) < 6:
            raise MegarlError(
                f"{len(self.y)} scores in all runs; the law over batches needs 6 or more: train"
                " further"
            )
        log_batches = np.log([run.batch for run in runs])
        self.centre = log_batches.mean(0)  # ln P_0, ln G_0
        self.scale = float(points.hours.max())
        self._x = np.log(points.hours / self.scale)
        self._cell = log_batches[points.curve] - self.centre  # [points, 2], as in `_law`
        self._start = _prior_of_start(curves, self.y)
        three_highest = np.sort(self.y)[-3:]
        highest = float(three_highest.mean())
        self.gain = max(highest - self._start.mean, 0.02)
        self._whiten = self._whitening(points.curve, points.noise)
        self.theta = _sampled(self._density, self._walkers())

    def _whitening(self, curve: Array, noise: Array) -> Array:
        """Return the matrix [points, points] that makes residuals independent, with a
        variance of 1. curve: the number of each point's curve; noise: its standard
        error.

        Points of one curve stray together: by its misfit if they are close in ln n, by
        its offset as far as the score has risen.
        """
        gained = self.y - self._start.mean
        rise = np.clip(gained / self.gain, 0, 1)
        same_curve = curve[:, None] == curve
        distance = np.abs(self._x[:, None] - self._x)
        misfit = MISFIT**2 * np.exp(-distance / LENGTH)
        offset = OFFSET**2 * rise[:, None] * rise
        strays = misfit + offset
        variances = np.diag(noise**2)
        covariance = self.gain**2 * strays * same_curve + variances
        root = np.linalg.cholesky(covariance)
        return np.linalg.inv(root)

    def _walkers(self) -> Array:
        """Return parameters [walkers, 8] from which the sampling begins: all possible
        (`_density`), with each A at random between the highest score and 1.
        """
        rng = np.random.default_rng(1)
        r0 = self._start.mean + 0.01 * rng.standard_normal(WALKERS)
        r0 = r0.clip(0.001, 0.95)
        highest = np.maximum(self.y.max(), r0)
        gap = 1 - highest.clip(0, 0.999)
        a = 1 - gap * rng.uniform(0.1, 0.9, WALKERS)
        # ln B, ln(N / scale), α, β, δ, ε
        centre = np.array([LN_B.mean, -0.5, POWERS.mean, POWERS.mean, 0.0, 0.0])
        jitter = 0.05 * rng.standard_normal((WALKERS, 6))
        return np.column_stack([r0, a, centre + jitter])

    def _density(self, theta: Array) -> Array:
        """Return the log density [walkers] of parameters [walkers, 8], up to a
        constant.
        """
        r0, a, w, u, *powers = theta.T
        priors = (self._start, LN_B, POWERS, POWERS, CEILINGS, CEILINGS)
        squares = 0  # of all deviations from prior means; A and u have flat priors
        for values, prior in zip((r0, w, *powers), priors, strict=True):
            deviations = (values - prior.mean) / prior.deviation
            squares = squares + deviations**2
        # u may lie as far beyond the points as PRIOR.beyond of fit.py allows.
        low = self._x.min() - 4
        high = self._x.max() + 3
        allowed = (r0 > 0) & (a > r0) & (a < 1) & (u > low) & (u < high)
        errors = self.y - self._law(theta, self._cell, self._x)
        residuals = errors @ self._whiten.T
        log_density = -0.5 * (squares + (residuals**2).sum(1))
        return np.where(allowed, log_density, -np.inf)

    def _law(self, theta: Array, cell: Array, x: Array) -> Array:
        """Return scores [draws, points]. cell: [points, 2] logarithms of P and G,
        relative to the centre. x: [points] logarithms of rollouts / scale. Parameters
        that `_density` rules out are clipped, so that nothing overflows.
        """
        r0, a, w, u = theta.T[:4, :, None]  # [draws, 1] each
        gap_powers = theta[:, 6:] @ cell.T
        gap_factor = np.exp(-gap_powers.clip(-20, 20))
        gap = 1 - a.clip(0, 1)
        ceiling = 1 - gap * gap_factor
        middle_powers = theta[:, 4:6] @ cell.T
        steepness = np.exp(w.clip(-9, 9))
        share = SIGMOID.share(steepness * (x - u - middle_powers))
        gain = np.maximum(ceiling - r0, 0)
        return np.asarray(r0 + gain * share)

    def scores(self, cells: Array, rollouts: Array) -> Array:
        """Return draws [draws, cells] of the scores of further runs, one per cell.
        cells: [cells, 2] prompts and generations; rollouts: [cells]. A run strays from
        the law as far as the law's score has risen.
        """
        cell = np.log(cells) - self.centre
        x = np.log(rollouts / self.scale)
        law = self._law(self.theta, cell, x)
        gained = law - self._start.mean
        rise = np.clip(gained / self.gain, 0, None)
        random = np.random.default_rng(2).standard_normal(law.shape)
        strays = math.hypot(MISFIT, OFFSET) * self.gain * random
        return np.asarray((law + rise * strays).clip(0, 1))


def _prior_of_start(curves: Sequence[Curve], scores: Array) -> Normal:
    """Return the prior of R_0: around the score before training or, if no curve has
    one, widely around the lowest score.
    """
    score_before, _ = before_training(curves, None)
    if score_before is None:
        return Normal(float(scores.min()), 0.2)
    return Normal(score_before, BEFORE_TRAINING)


def _sampled(density: Callable[[Array], Array], walkers: Array) -> Array:
    """Return draws [draws, dimensions] of a density by the stretch move.

    density: returns log densities [n] of parameters [n, dimensions]; walkers:
    [WALKERS, dimensions], where it begins. Each half of the walkers moves in turn, each
    walker along the line through one of the other half. The first third of the rounds
    only leads away from the beginning, and has no draws.
    """
    rng = np.random.default_rng(0)
    position = walkers
    value = density(walkers)
    draws = []
    half = len(walkers) // 2
    dimensions = walkers.shape[1]
    first_half = slice(half)
    second_half = slice(half, None)
    for number in range(ROUNDS):
        for moving, fixed in ((first_half, second_half), (second_half, first_half)):
            # from 1/2 to 2, with a density proportional to 1 / √stretch
            stretch = (rng.random(half) + 1) ** 2 / 2
            partners = rng.integers(half, size=half)
            anchor = position[fixed][partners]
            present = position[moving]
            present_value = value[moving]
            proposed = anchor + stretch[:, None] * (present - anchor)
            proposed_value = density(proposed)
            log_volume = (dimensions - 1) * np.log(stretch)
            log_ratio = log_volume + proposed_value - present_value
            accepted = np.log(rng.random(half)) < log_ratio
            position[moving] = np.where(accepted[:, None], proposed, present)
            value[moving] = np.where(accepted, proposed_value, present_value)
        if number >= ROUNDS // 3 and number % THIN == 0:
            draws.append(position.copy())
    return np.concatenate(draws)
