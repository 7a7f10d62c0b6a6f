"""The law over batch sizes: P prompts per step, G rollouts per prompt, n rollouts in
all. One fit for short runs of few (P, G).

    R(n; P, G) = R_0 + (A_PG − R_0) / (1 + (n_PG / n)^B)       n_PG = N (P/P_0)^α (G/G_0)^β
                                                           1 − A_PG = (1 − A) (P/P_0)^−δ
                                                           (G/G_0)^−ε

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
from megarl.lab.scaling.fit import BEFORE_TRAINING, LN_B, before_training, windowed
from megarl.lab.scaling.forms import FORMS, Array
from megarl.lab.scaling.points import Curve
from megarl.lab.scaling.posterior import Normal

WALKERS = 64
ROUNDS = 1500
THIN = 8
MISFIT = 0.03
LENGTH = (
    1.5  # how far a run strays from its curve, as a share of the gain, and for how long in ln n
)
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
    """A run. curve: its `hours` are cumulative rollouts; device_hours: those of a step,
    without start-up and evaluations.
    """

    prompts: int
    generations: int
    curve: Curve
    device_hours: float

    @property
    def batch(self) -> tuple[int, int]:
        return self.prompts, self.generations


class CellLaw:
    """The fitted law. theta [draws, 8]: R_0, A, ln B, ln(N / scale), α, β, δ, ε.
    MegarlError if the runs cannot be fitted.
    """

    def __init__(self, runs: Sequence[CellRun]) -> None:
        if len({run.batch for run in runs}) < 2:
            alone = (
                f"{len(runs)} run{'s' * (len(runs) != 1)} of one batch cannot tell what another"
                " would do"
            )
            raise MegarlError(
                f"{alone}; give runs that differ in batch.prompts or sampling.generations (--curves"
                " A,B)"
            )
        curves = [run.curve for run in runs]
        batches = np.log([run.batch for run in runs])
        self.centre = batches.mean(0)
        hours, self.y, number, noise, _ = windowed(curves, 0.0, None)
        if noise is None:
            advice = "give run directories, or a column `answers`"
            raise MegarlError(f"--curves: no number of answers is known for the scores; {advice}")
        if len(self.y) < 6:
            raise MegarlError(
                f"{len(self.y)} scores in all runs; the law over batches needs 6 or more: train"
                " further"
            )
        self.scale = float(hours.max())
        self._x = np.log(hours / self.scale)
        self._cell = batches[number] - self.centre
        known, _ = before_training(curves, None)
        self._start = (
            Normal(float(self.y.min()), 0.2) if known is None else Normal(known, BEFORE_TRAINING)
        )
        self.gain = max(float(np.sort(self.y)[-3:].mean()) - self._start.mean, 0.02)
        rise = np.clip((self.y - self._start.mean) / self.gain, 0, 1)
        same = number[:, None] == number
        strays = (
            MISFIT**2 * np.exp(-np.abs(self._x[:, None] - self._x) / LENGTH)
            + OFFSET**2 * rise[:, None] * rise
        )
        self._whiten = np.linalg.inv(
            np.linalg.cholesky(self.gain**2 * strays * same + np.diag(noise**2))
        )
        self.theta = _sampled(self._density, self._walkers())

    def _walkers(self) -> Array:
        rng = np.random.default_rng(1)
        r0 = (self._start.mean + 0.01 * rng.standard_normal(WALKERS)).clip(0.001, 0.95)
        a = 1 - (1 - np.maximum(self.y.max(), r0).clip(0, 0.999)) * rng.uniform(0.1, 0.9, WALKERS)
        others = [LN_B.mean, -0.5, POWERS.mean, POWERS.mean, 0.0, 0.0]
        return np.column_stack([r0, a, np.array(others) + 0.05 * rng.standard_normal((WALKERS, 6))])

    def _density(self, theta: Array) -> Array:
        """Return the log density [walkers] of parameters [walkers, 8], up to a
        constant.
        """
        r0, a, w, u = theta.T[:4]
        about = (self._start, LN_B, POWERS, POWERS, CEILINGS, CEILINGS)
        prior = sum(
            ((part - m) / d) ** 2 for part, (m, d) in zip((r0, w, *theta.T[4:]), about, strict=True)
        )
        low = self._x.min() - 4
        high = self._x.max() + 3  # as PRIOR.beyond
        allowed = (r0 > 0) & (a > r0) & (a < 1) & (u > low) & (u < high)
        whitened = (self.y - self._law(theta, self._cell, self._x)) @ self._whiten.T
        return np.where(allowed, -0.5 * (prior + (whitened**2).sum(1)), -np.inf)

    def _law(self, theta: Array, cell: Array, x: Array) -> Array:
        """Return scores [draws, points]. cell: [points, 2] logarithms of P and G,
        relative to the centre.
        """
        r0, a, w, u = theta.T[:4, :, None]
        ceiling = 1 - (1 - a.clip(0, 1)) * np.exp(-(theta[:, 6:] @ cell.T).clip(-20, 20))
        share = FORMS["sigmoid"].share(np.exp(w.clip(-9, 9)) * (x - u - theta[:, 4:6] @ cell.T))
        return np.asarray(r0 + np.maximum(ceiling - r0, 0) * share)

    def scores(self, cells: Array, rollouts: Array) -> Array:
        """Return draws [draws, cells] of other runs' scores. cells: [cells, 2] prompts
        and generations; rollouts: [cells].
        """
        law = self._law(self.theta, np.log(cells) - self.centre, np.log(rollouts / self.scale))
        rise = np.clip((law - self._start.mean) / self.gain, 0, None)
        strays = (
            math.hypot(MISFIT, OFFSET)
            * self.gain
            * np.random.default_rng(2).standard_normal(law.shape)
        )
        return np.asarray((law + rise * strays).clip(0, 1))


def _sampled(density: Callable[[Array], Array], walkers: Array) -> Array:
    """Return draws [draws, dimensions] from the last two thirds of the rounds."""
    rng = np.random.default_rng(0)
    at = walkers
    value = density(walkers)
    kept = []
    half = len(walkers) // 2
    dimensions = walkers.shape[1]
    for n in range(ROUNDS):
        for move, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
            z = (rng.random(half) + 1) ** 2 / 2
            anchor = at[other][rng.integers(half, size=half)]
            new = anchor + z[:, None] * (at[move] - anchor)
            there = density(new)
            taken = np.log(rng.random(half)) < (dimensions - 1) * np.log(z) + there - value[move]
            at[move], value[move] = (
                np.where(taken[:, None], new, at[move]),
                np.where(taken, there, value[move]),
            )
        if n >= ROUNDS // 3 and n % THIN == 0:
            kept.append(at.copy())
    return np.concatenate(kept)
