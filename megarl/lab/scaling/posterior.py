"""Computes the posterior of a law's parameters, by quadrature, and the scores that it
predicts.

    y = R_0 (1 − s) + A s + misfit + seed + noise           s = share(e^w (x − u))     (forms.py)

    misfit    the law is only nearly right: an Ornstein-Uhlenbeck process over log compute, as a share of the gain seen so far;
              ahead of the last point its slope drifts as well, so the error grows with
              the distance, and levels off
    seed      another seed ends at another score: an offset of each curve that grows with its score
    noise     of evaluations: from the number of answers if that is known

Given (u, w) and the sizes of these three, y is linear in R_0 and A and everything is
Gaussian, so R_0 and A are integrated in closed form. The rest is a sum over a grid of
(u, w), misfits and noises. It is exact up to the grid's spacing, deterministic, and
takes a tenth of a second. In each cell R_0 and A have a truncated Gaussian, from which
`Posterior` draws.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.lab.scaling.forms import Array, Form

CELLS = (48, 28)  # of u and w
ROUNDS = 3  # number of grids, each of which covers the mass of the one before
TRACE = 1e-6
DRAWS = 4000
MOST = 48  # most points; if there are more, neighbours are averaged
# of the slope ahead, in misfits over one unit of x; chosen on runs of the corpus
# (benchmarks/README.md)
DRIFT = 6.0
LEVELS_OFF = 2.0  # units of x ahead at which the drift has grown to 1 − 1/e of its largest
EXACT = 1e-6  # standard deviation of a value that is given
FLAT = 10.0  # standard deviation of a value about which nothing is known, for scores from 0 to 1
INTERVAL = (0.5, 0.025, 0.975)  # quantiles: the median, and both ends of a 95 % interval

_Z = np.linspace(-9, 9, 6001)
_CDF = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in _Z])


@dataclass(frozen=True, eq=False)
class CurvePoints:
    """Evaluations of one or more curves, [points] each. x: compute, in the form's
    units; curve: the number of the curve.
    """

    x: Array
    y: Array
    curve: Array
    noise: Array | None = None  # standard deviation of each score; None: unknown, the same for all

    def merged(self, most: int = MOST) -> "CurvePoints":
        """Return at most about `most` points, by averaging neighbours on a curve."""
        if len(self.x) <= most:
            return self
        together = math.ceil(len(self.x) / most)
        parts = []
        for curve in np.unique(self.curve):
            rows = np.flatnonzero(self.curve == curve)
            parts += [rows[i : i + together] for i in range(0, len(rows), together)]
        size = np.array([len(part) for part in parts])
        x, y = (np.array([values[part].mean() for part in parts]) for values in (self.x, self.y))
        noise = (
            None
            if self.noise is None
            else np.array([self.noise[part].mean() for part in parts]) / np.sqrt(size)
        )
        return CurvePoints(x, y, np.array([self.curve[part[0]] for part in parts]), noise)


class Normal(NamedTuple):
    mean: float
    deviation: float


@dataclass(frozen=True)
class Prior:
    """What is known without the points. Misfits and seeds are shares of the gain that
    the points show.
    """

    w: Normal | None  # None: flat within the form's bounds
    r0: Normal
    a: Normal
    misfits: tuple[float, ...]
    length: float  # correlation length of the misfit, in units of x
    seeds: float
    noises: tuple[
        float, ...
    ]  # multiples of the points' noise, or of the gain if the noise is unknown
    beyond: tuple[float, float] | None = (
        None  # how far u may lie below and above all x; None: the form's limits
    )


class _Sizes(NamedTuple):
    """The covariance of the points for one misfit and each noise, decomposed."""

    misfit: float
    vectors: Array  # [points, points]
    weights: Array  # [points, noises] 1 / eigenvalue


class _Cells(NamedTuple):
    """Cells of (u, w): logarithms of mass and peak, and the Gaussian of (R_0, A) in
    each cell, all [noises, cells].
    """

    log_mass: Array
    log_peak: Array
    r0: Array
    a: Array
    p00: Array  # precisions
    paa: Array
    p0a: Array


class Posterior:
    """The posterior. theta [draws, 4]: draws of the parameters (A, u, w, R_0)."""

    def __init__(self, form: Form, points: CurvePoints, prior: Prior) -> None:
        self.points = points.merged()
        self.form = form
        self.prior = prior
        x = self.points.x
        low, high = form.w_bounds
        if prior.w is not None:
            low = max(low, prior.w.mean - 3 * prior.w.deviation)
            high = min(high, prior.w.mean + 3 * prior.w.deviation)
        below, above = prior.beyond or (form.below, form.above)
        self._sizes = list(self._each_size())
        self._widest = box = np.array([[x.min() - below, x.max() + above], [low, high]])
        for _ in range(ROUNDS):
            self._integrate(box)
            box = self._around()

    @cached_property
    def gain(self) -> float:
        """The gain that the points show. Misfits and seeds are proportional to it."""
        y = self.points.y
        return max(float(np.sort(y)[-3:].mean()) - min(self.prior.r0.mean, float(y.min())), 0.02)

    def _integrate(self, box: Array) -> None:
        """Integrate over the cells of a box [u and w; low and high]."""
        self._axes = (
            np.linspace(box[0, 0], box[0, 1], CELLS[0]),
            np.linspace(box[1, 0], box[1, 1], CELLS[1]),
        )
        self._u, self._w = (part.ravel() for part in np.meshgrid(*self._axes, indexing="ij"))
        each = [self._integrated(sizes, self._u, self._w) for sizes in self._sizes]
        self._cells = _Cells(
            *(np.concatenate(parts) for parts in zip(*each, strict=True))
        )  # [sizes x noises, cells]
        mass = np.exp(self._cells.log_mass - self._cells.log_mass.max())
        self._mass = mass / mass.sum()

    def _around(self) -> Array:
        """Return the box that contains all the mass except for a trace."""
        grid = self._mass.sum(0).reshape(CELLS)
        box = []
        for axis, other in ((0, 1), (1, 0)):
            inside = np.flatnonzero(grid.sum(other) > TRACE)
            ends = max(inside[0] - 1, 0), min(inside[-1] + 1, CELLS[axis] - 1)
            box.append([self._axes[axis][end] for end in ends])
        return np.array(box)

    def _kernel(self, misfit: float, x: Array, other: Array) -> Array:
        return (misfit * self.gain) ** 2 * np.exp(-np.abs(x[:, None] - other) / self.prior.length)

    def _drift(self, misfit: float, x: Array) -> Array:
        """Return the covariance [x, x] that the slope's drift adds to scores ahead:
        that of an integrated Wiener process.
        """
        ahead = LEVELS_OFF * -np.expm1(-np.maximum(x - self.points.x.max(), 0) / LEVELS_OFF)
        near = np.minimum(ahead[:, None], ahead)
        far = np.maximum(ahead[:, None], ahead)
        covariance: Array = (DRIFT * misfit * self.gain) ** 2 * near**2 * (3 * far - near) / 6
        return covariance

    def _rise(self) -> Array:
        """Return the share of a seed's offset in each point: 0 before training, 1 at
        the largest gain.
        """
        return np.clip((self.points.y - self.prior.r0.mean) / self.gain, 0, 1)

    @property
    def _unit(self) -> Array:
        """The unit of the noises, [points]: the points' own noise, or the gain if that
        is unknown.
        """
        return (
            np.full(len(self.points.x), self.gain)
            if self.points.noise is None
            else self.points.noise
        )

    def _each_size(self) -> Iterator[_Sizes]:
        same = self.points.curve[:, None] == self.points.curve
        points = self.points
        rise = self._rise()
        offsets = (self.prior.seeds * self.gain) ** 2 * rise[:, None] * rise * same
        for misfit in self.prior.misfits:
            covariance = self._kernel(misfit, points.x, points.x) * same + offsets
            values, vectors = np.linalg.eigh(covariance / self._unit[:, None] / self._unit)
            weights = 1 / (np.maximum(values, 0)[:, None] + np.array(self.prior.noises) ** 2)
            yield _Sizes(misfit, vectors / self._unit[:, None], weights)

    def _integrated(self, sizes: _Sizes, u: Array, w: Array) -> _Cells:
        """Integrate over R_0 and A in the cells (u, w)."""
        share = self.form.share(
            np.exp(w)[:, None] * (self.points.x - u[:, None])
        )  # [cells, points]
        v = sizes.weights
        r0 = self.prior.r0
        a = self.prior.a
        s = share @ sizes.vectors
        q = sizes.vectors.sum(0) - s
        y = (
            self.points.y @ sizes.vectors - q * r0.mean - s * a.mean
        )  # residuals of the prior's means
        p00 = (q * q) @ v + r0.deviation**-2
        paa = (s * s) @ v + a.deviation**-2
        p0a = (s * q) @ v  # [cells, noises]
        b0 = (q * y) @ v
        ba = (s * y) @ v
        determinant = p00 * paa - p0a**2
        to_r0 = (paa * b0 - p0a * ba) / determinant
        to_a = (p00 * ba - p0a * b0) / determinant
        mean_r0 = r0.mean + to_r0
        mean_a = a.mean + to_a
        error = (y * y) @ v - b0 * to_r0 - ba * to_a
        log_peak = 0.5 * (np.log(v).sum(0) - error)
        if self.prior.w is not None:
            log_peak -= 0.5 * ((w[:, None] - self.prior.w.mean) / self.prior.w.deviation) ** 2
        cells = _Cells(log_peak, log_peak, mean_r0, mean_a, p00, paa, p0a)
        low, high = _ends(cells)
        log_mass = log_peak - 0.5 * np.log(determinant) + np.log(np.maximum(high - low, 1e-300))
        log_peak = log_peak - _peak(cells)[2]
        return _Cells(*(part.T for part in cells._replace(log_mass=log_mass, log_peak=log_peak)))

    def mode(self) -> Array:
        """Return the parameters [4] that fit these curves best if the law is exact, by
        a search around the best cell.
        """
        noises = np.array(self.prior.noises)
        plain = _Sizes(
            0.0,
            np.diag(1 / self._unit),
            np.broadcast_to(noises**-2, (len(self._unit), len(noises))),
        )
        masses = self._integrated(plain, self._u, self._w).log_mass
        n, best = divmod(int(masses.argmax()), masses.shape[1])
        plain = plain._replace(weights=plain.weights[:, [n]])
        u = self._u[best]
        w = self._w[best]
        wide = 1.5
        steps_u, steps_w = (
            part.ravel() for part in np.meshgrid(*[np.linspace(-1, 1, 9)] * 2, indexing="ij")
        )
        apart_u, apart_w = (axis[1] - axis[0] for axis in self._axes)
        for _ in range(24):
            us = np.clip(u + wide * apart_u * steps_u, *self._widest[0])
            ws = np.clip(w + wide * apart_w * steps_w, *self._widest[1])
            cells = _Cells(*(part[0] for part in self._integrated(plain, us, ws)))
            best = int(cells.log_peak.argmax())
            u = us[best]
            w = ws[best]
            wide = wide * 0.5
        r0, a, _ = _peak(cells)
        return np.array([a[best], u, w, min(max(r0[best], 0.0), 1.0)])

    @cached_property
    def _drawn(self) -> tuple[Array, Array]:
        """Parameters [draws, 4], and for each draw the row of `_cells` with its misfit
        and noise.
        """
        rng = np.random.default_rng(0)
        steps = (
            np.arange(DRAWS) + rng.random()
        ) / DRAWS  # systematic sampling: each cell in proportion to its mass
        where = np.searchsorted(np.cumsum(self._mass.ravel()), steps).clip(max=self._mass.size - 1)
        sizes, cell = np.divmod(where, self._mass.shape[1])
        cells = _Cells(*(part[sizes, cell] for part in self._cells))
        low, high = _ends(cells)
        determinant = cells.p00 * cells.paa - cells.p0a**2
        chance = np.clip(low + (high - low) * rng.random(DRAWS), 1e-12, 1 - 1e-12)
        # The maximum matters only where A is so surely below R_0 that the table has no
        # chance for it to be above.
        a = np.maximum(
            cells.a + np.sqrt(cells.p00 / determinant) * np.interp(chance, _CDF, _Z), cells.r0
        )
        r0 = (
            cells.r0
            - cells.p0a / cells.p00 * (a - cells.a)
            + rng.standard_normal(DRAWS) / np.sqrt(cells.p00)
        )
        jitter = [(axis[1] - axis[0]) * (rng.random(DRAWS) - 0.5) for axis in self._axes]
        u = self._u[cell] + jitter[0]
        w = np.clip(self._w[cell] + jitter[1], self._axes[1][0], self._axes[1][-1])
        return np.stack([a.clip(0, 1), u, w, r0.clip(0, 1)], axis=1), sizes

    @property
    def theta(self) -> Array:
        return self._drawn[0]

    def scores(self, x: Array) -> Array:
        """Return draws [draws, x] of the mean score of these curves at x, with misfit
        but without the noise of evaluations.
        """
        theta, of_sizes = self._drawn
        a, u, w, r0 = theta.T[:, :, None]

        def law(at: Array) -> Array:
            value: Array = r0 + (a - r0) * self.form.share(np.exp(w) * (at - u))
            return value

        scores = law(x)
        misses = self.points.y - law(self.points.x)
        rng = np.random.default_rng(1)
        curves = np.unique(self.points.curve)
        rise = self._rise()
        offsets = (self.prior.seeds * self.gain) ** 2
        for n in np.unique(of_sizes):
            rows = of_sizes == n
            (size, noise) = divmod(n, len(self.prior.noises))
            sizes = self._sizes[size]
            across = (self._kernel(sizes.misfit, x, self.points.x) + offsets * rise) / len(curves)
            prior = (self._kernel(sizes.misfit, x, x) + offsets) / len(curves)
            projected = (across @ sizes.vectors) * sizes.weights[:, noise]
            covariance = (
                prior - projected @ (across @ sizes.vectors).T + self._drift(sizes.misfit, x)
            )
            values, vectors = np.linalg.eigh(covariance)
            root = vectors * np.sqrt(np.maximum(values, 0))
            scores[rows] += misses[rows] @ sizes.vectors @ projected.T
            scores[rows] += rng.standard_normal((int(rows.sum()), len(x))) @ root.T
        return scores.clip(0, 1)


def _peak(cells: _Cells) -> tuple[Array, Array, Array]:
    """Return R_0 and A where each cell's density is highest, with A from R_0 to 1, and
    by how much its logarithm is lower there than if both were free. If a falling law
    would fit best, it is the best constant.
    """
    both = cells.p00 + cells.paa + 2 * cells.p0a
    determinant = cells.p00 * cells.paa - cells.p0a**2
    level = ((cells.p00 + cells.p0a) * cells.r0 + (cells.paa + cells.p0a) * cells.a) / both
    falls = cells.a < cells.r0
    a = cells.a.clip(0, 1)
    r0 = np.where(falls, level, cells.r0 - cells.p0a / cells.p00 * (a - cells.a))
    precision = np.where(falls, determinant / both, determinant / cells.p00)
    off = np.where(falls, cells.r0, a) - cells.a
    return r0, np.where(falls, level.clip(0, 1), a), 0.5 * off**2 * precision


def _ends(cells: _Cells) -> tuple[Array, Array]:
    """Return the probabilities that A is below R_0 and that it is below 1."""
    deviation = np.sqrt(cells.p00 / (cells.p00 * cells.paa - cells.p0a**2))
    low = (np.maximum(cells.r0, 0) - cells.a) / deviation
    high = (1 - cells.a) / deviation
    return np.interp(low, _Z, _CDF), np.interp(high, _Z, _CDF)
