"""Computes the posterior of a law's parameters, by quadrature, and the scores that it
predicts.

    y = R_0 (1 − s) + A s + misfit + seed + noise     s = share(e^w (x − u))  (forms.py)

    misfit    the law is only nearly right: an Ornstein-Uhlenbeck process over log
              compute, as a share of the gain seen so far; ahead of the last point its
              slope drifts as well, so the error grows with the distance, and levels off
    seed      another seed ends at another score: an offset of each curve that grows
              with its score
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
from typing import Any, NamedTuple

import numpy as np

from megarl.predict.scaling.forms import Array, Form

CELLS = (48, 28)  # of u and w
ROUNDS = 3  # number of grids, each of which covers the mass of the one before
TRACE = 1e-6  # share of the mass of all cells that a row of cells may have and be left out
DRAWS = 4000
MOST = 48  # most points; if there are more, neighbours are averaged
# of the slope ahead, in misfits over one unit of x; chosen on runs of the corpus
# (benchmarks/forecasts.md)
DRIFT = 6.0
LEVELS_OFF = 2.0  # units of x ahead at which the drift has grown to 1 − 1/e of its largest
EXACT = 1e-6  # standard deviation of a value that is given
FLAT = 10.0  # standard deviation of a value about which nothing is known, for scores from 0 to 1
INTERVAL = (0.5, 0.025, 0.975)  # quantiles: the median, and both ends of a 95 % interval

# The normal distribution as a table, for np.interp: scipy takes too long to import.
_Z = np.linspace(-9, 9, 6001)
_CDF = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in _Z])


def all_pairs(first: Array, second: Array) -> tuple[Array, Array]:
    """Return all pairs of values of two axes, as two arrays [pairs]."""
    grid_first, grid_second = np.meshgrid(first, second, indexing="ij")
    return grid_first.ravel(), grid_second.ravel()


@dataclass(frozen=True, eq=False)
class CurvePoints:
    """Evaluations of one or more curves, [points] each. x: compute, in the form's
    units; y: scores; curve: the number of the curve.
    """

    x: Array
    y: Array
    curve: Array
    noise: Array | None = None  # standard deviation of each score; None: unknown, the same for all

    def merged(self, limit: int = MOST) -> "CurvePoints":
        """Return at most about `limit` points, by averaging neighbours on a curve."""
        if len(self.x) <= limit:
            return self
        group_size = math.ceil(len(self.x) / limit)
        groups = []
        for curve in np.unique(self.curve):
            rows = np.flatnonzero(self.curve == curve)
            groups += [rows[i : i + group_size] for i in range(0, len(rows), group_size)]
        noise = None
        if self.noise is not None:
            sizes = np.array([len(group) for group in groups])
            noise = _means(self.noise, groups) / np.sqrt(sizes)
        curves = np.array([self.curve[group[0]] for group in groups])
        return CurvePoints(_means(self.x, groups), _means(self.y, groups), curves, noise)


def _means(values: Array, groups: list[Array]) -> Array:
    """Return the mean of the values in each group of rows."""
    return np.array([values[group].mean() for group in groups])


class Normal(NamedTuple):
    """A normal distribution."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class Prior:
    """What is known without the points. Misfits and seeds are shares of the gain that
    the points show. noises: multiples of the points' noise, or of the gain if the noise
    is unknown; beyond: how far u may lie below and above all x (None: the form's
    limits).
    """

    w: Normal | None  # None: flat within the form's bounds
    r0: Normal
    a: Normal
    misfits: tuple[float, ...]
    length: float  # correlation length of the misfit, in units of x
    seeds: float
    noises: tuple[float, ...]
    beyond: tuple[float, float] | None = None


class _Sizes(NamedTuple):
    """The covariance of the points, decomposed, for one misfit and each noise of the
    prior: residuals @ vectors are independent, with a variance of 1 / weights.
    """

    misfit: float
    vectors: Array  # [points, points]
    weights: Array  # [points, noises]


class _Cells(NamedTuple):
    """Cells of (u, w): in each cell the logarithm of the posterior's mass, that of its
    highest density, and the Gaussian of (R_0, A) before it is truncated to R_0 < A < 1.
    All are [noises, cells].
    """

    log_mass: Array
    log_peak: Array
    r0: Array  # means
    a: Array
    p00: Array  # the precision matrix: of R_0, of A, of both
    paa: Array
    p0a: Array

    @property
    def determinant(self) -> Array:
        """The determinant of the precision matrix."""
        return self.p00 * self.paa - self.p0a**2

    def at(self, *index: Any) -> "_Cells":
        """Return each array's values at this index."""
        return _Cells(*(values[index] for values in self))


class _Draws(NamedTuple):
    """Draws of the posterior. theta: [draws, 4]; group: the row of the posterior's
    cells, i.e. the misfit and the noise, of each draw.
    """

    theta: Array
    group: Array


class _Continuation(NamedTuple):
    """How scores at x stray from the law, given the points, for one misfit and noise:
    on average by (the points' residuals @ _Sizes.vectors) @ projection, and around that
    with covariance root @ root.T.
    """

    projection: Array  # [points, x]
    root: Array  # [x, x]


class Posterior:
    """The posterior of the parameters (A, u, w, R_0), by draws: `theta`, [draws, 4].
    gain: the gain that the points show; prior.misfits and seeds are multiples of it.
    """

    def __init__(self, form: Form, points: CurvePoints, prior: Prior) -> None:
        self.points = points.merged()
        self.form = form
        self.prior = prior
        x = self.points.x
        low, high = form.w_bounds
        if prior.w is not None:  # beyond three deviations there is next to no mass
            low = max(low, prior.w.mean - 3 * prior.w.deviation)
            high = min(high, prior.w.mean + 3 * prior.w.deviation)
        below, above = prior.beyond or (form.below, form.above)
        lowest_u = x.min() - below
        highest_u = x.max() + above
        self._sizes = list(self._decompositions())
        self._limits = np.array([[lowest_u, highest_u], [low, high]])
        box = self._limits
        for _ in range(ROUNDS):  # each time with finer cells
            self._integrate(box)
            box = self._around()

    @cached_property
    def gain(self) -> float:
        """The gain that the points show. Misfits and seeds are proportional to it."""
        y = self.points.y
        three_highest = np.sort(y)[-3:]  # a single one may be high by noise
        highest = float(three_highest.mean())
        lowest = min(self.prior.r0.mean, float(y.min()))
        return max(highest - lowest, 0.02)  # never 0, or nothing could stray

    def _integrate(self, box: Array) -> None:
        """Set the cells of a box [u and w; low and high], and the share of all mass in
        each, [sizes x noises, cells].
        """
        u_axis = np.linspace(box[0, 0], box[0, 1], CELLS[0])
        w_axis = np.linspace(box[1, 0], box[1, 1], CELLS[1])
        self._axes = (u_axis, w_axis)
        self._u, self._w = all_pairs(u_axis, w_axis)
        by_size = [self._integrated(sizes, self._u, self._w) for sizes in self._sizes]
        columns = [np.concatenate(arrays) for arrays in zip(*by_size, strict=True)]
        self._cells = _Cells(*columns)  # [sizes x noises, cells]
        log_mass = self._cells.log_mass
        mass = np.exp(log_mass - log_mass.max())
        self._mass = mass / mass.sum()

    def _around(self) -> Array:
        """Return the box [u and w; low and high] that contains all the mass except for
        a trace, with a cell more at each end.
        """
        grid = self._mass.sum(0).reshape(CELLS)
        masses = (grid.sum(1), grid.sum(0))  # along u, along w
        box = []
        for values, mass in zip(self._axes, masses, strict=True):
            inside = np.flatnonzero(mass > TRACE)
            first = max(inside[0] - 1, 0)
            last = min(inside[-1] + 1, len(values) - 1)
            box.append([values[first], values[last]])
        return np.array(box)

    def _kernel(self, misfit: float, x_a: Array, x_b: Array) -> Array:
        """Return the covariance [x_a, x_b] of the misfit."""
        distance = np.abs(x_a[:, None] - x_b)
        variance = (misfit * self.gain) ** 2
        correlation = np.exp(-distance / self.prior.length)
        return variance * correlation

    def _drift(self, misfit: float, x: Array) -> Array:
        """Return the covariance [x, x] that the slope's drift adds to scores ahead of
        the last point: that of an integrated Wiener process over `ahead`, a distance
        that levels off.
        """
        distance = np.maximum(x - self.points.x.max(), 0)
        ahead = LEVELS_OFF * -np.expm1(-distance / LEVELS_OFF)
        nearer = np.minimum(ahead[:, None], ahead)
        farther = np.maximum(ahead[:, None], ahead)
        variance = (DRIFT * misfit * self.gain) ** 2
        covariance: Array = variance * nearer**2 * (3 * farther - nearer) / 6
        return covariance

    def _rise(self) -> Array:
        """Return the share of a seed's offset in each point: 0 before training, 1 at
        the largest gain.
        """
        gained = self.points.y - self.prior.r0.mean
        return np.clip(gained / self.gain, 0, 1)

    @property
    def _seed_variance(self) -> float:
        """The variance of a seed's offset at the largest gain."""
        return (self.prior.seeds * self.gain) ** 2

    @property
    def _unit(self) -> Array:
        """What `prior.noises` are multiples of, [points]: the points' own noise, or the
        gain if that is unknown.
        """
        if self.points.noise is None:
            return np.full(len(self.points.x), self.gain)
        return self.points.noise

    def _decompositions(self) -> Iterator[_Sizes]:
        """Yield the decomposed covariance for each misfit of the prior. In units of the
        points' noise, all noises add multiples of the identity, so that all have the
        same eigenvectors.
        """
        points = self.points
        unit = self._unit
        same_curve = points.curve[:, None] == points.curve
        rise = self._rise()
        offsets = self._seed_variance * rise[:, None] * rise * same_curve
        noise_variances = np.array(self.prior.noises) ** 2
        for misfit in self.prior.misfits:
            kernel = self._kernel(misfit, points.x, points.x)
            covariance = kernel * same_curve + offsets
            in_units = covariance / unit[:, None] / unit
            values, vectors = np.linalg.eigh(in_units)
            variances = np.maximum(values, 0)
            weights = 1 / (variances[:, None] + noise_variances)
            yield _Sizes(misfit, vectors / unit[:, None], weights)

    def _integrated(self, sizes: _Sizes, u: Array, w: Array) -> _Cells:
        """Integrate over R_0 and A in the cells (u, w), [cells] each.

        With R_0 and A relative to their prior means, y = R_0 q + A s is a regression,
        weighted by v. In its normal equations p is the matrix and b the right side, and
        the prior's precisions are added to p.
        """
        r0 = self.prior.r0
        a = self.prior.a
        steepness = np.exp(w)[:, None]
        from_middle = self.points.x - u[:, None]
        share = self.form.share(steepness * from_middle)
        s = share @ sizes.vectors  # [cells, points], as are q and y
        q = sizes.vectors.sum(0) - s
        rotated = self.points.y @ sizes.vectors
        y = rotated - q * r0.mean - s * a.mean
        v = sizes.weights
        p00 = (q * q) @ v + r0.deviation**-2  # [cells, noises], as is all that follows
        paa = (s * s) @ v + a.deviation**-2
        p0a = (s * q) @ v
        b0 = (q * y) @ v
        ba = (s * y) @ v
        determinant = p00 * paa - p0a**2
        to_r0 = (paa * b0 - p0a * ba) / determinant
        to_a = (p00 * ba - p0a * b0) / determinant
        squares = (y * y) @ v
        error = squares - b0 * to_r0 - ba * to_a  # that of the best R_0 and A
        log_weights = np.log(v).sum(0)
        log_peak = 0.5 * (log_weights - error)
        prior_w = self.prior.w
        if prior_w is not None:
            deviations = (w[:, None] - prior_w.mean) / prior_w.deviation
            log_peak -= 0.5 * deviations**2
        mean_r0 = r0.mean + to_r0
        mean_a = a.mean + to_a
        untruncated = _Cells(log_peak, log_peak, mean_r0, mean_a, p00, paa, p0a)
        low, high = _ends(untruncated)
        log_share_within = np.log(np.maximum(high - low, 1e-300))
        log_volume = 0.5 * np.log(determinant)
        cells = untruncated._replace(
            log_mass=log_peak - log_volume + log_share_within,
            log_peak=log_peak - _peak(untruncated).loss,
        )
        return _Cells(*(values.T for values in cells))

    def mode(self) -> Array:
        """Return the parameters [4] that fit these curves best if the law is exact, by
        a search around the best cell.
        """
        unit = self._unit
        noises = np.array(self.prior.noises)
        weights = np.broadcast_to(noises**-2, (len(unit), len(noises)))
        exact_law = _Sizes(0.0, np.diag(1 / unit), weights)
        masses = self._integrated(exact_law, self._u, self._w).log_mass  # [noises, cells]
        noise, best = divmod(int(masses.argmax()), masses.shape[1])
        exact_law = exact_law._replace(weights=weights[:, [noise]])  # the likeliest noise
        u = self._u[best]
        w = self._w[best]
        step_u, step_w = (axis[1] - axis[0] for axis in self._axes)
        unit_axis = np.linspace(-1, 1, 9)
        offsets_u, offsets_w = all_pairs(unit_axis, unit_axis)
        radius = 1.5  # of the search, in steps of the grid
        for _ in range(24):
            around_u = u + radius * step_u * offsets_u
            around_w = w + radius * step_w * offsets_w
            near_u = np.clip(around_u, *self._limits[0])
            near_w = np.clip(around_w, *self._limits[1])
            cells = self._integrated(exact_law, near_u, near_w).at(0)  # its only noise
            best = int(cells.log_peak.argmax())
            u = near_u[best]
            w = near_w[best]
            radius = radius * 0.5
        peak = _peak(cells)
        a = peak.a[best]
        r0 = min(max(peak.r0[best], 0.0), 1.0)
        return np.array([a, u, w, r0])

    @cached_property
    def _drawn(self) -> _Draws:
        """The draws: systematic sampling of cells, each in proportion to its mass; u
        and w evenly from the cell, A and, given A, R_0 from its truncated Gaussian.
        """
        rng = np.random.default_rng(0)
        quantiles = (np.arange(DRAWS) + rng.random()) / DRAWS
        cumulated = np.cumsum(self._mass.ravel())
        flat = np.searchsorted(cumulated, quantiles)
        flat = flat.clip(max=self._mass.size - 1)
        group, cell = np.divmod(flat, self._mass.shape[1])
        cells = self._cells.at(group, cell)
        low, high = _ends(cells)
        chance = low + (high - low) * rng.random(DRAWS)
        chance = np.clip(chance, 1e-12, 1 - 1e-12)
        normal = np.interp(chance, _CDF, _Z)  # of A, in deviations from its mean
        deviation = np.sqrt(cells.p00 / cells.determinant)
        # The maximum matters only where A is so surely below R_0 that the table has no
        # chance for it to be above.
        a = np.maximum(cells.a + deviation * normal, cells.r0)
        slope = cells.p0a / cells.p00
        mean_r0 = cells.r0 - slope * (a - cells.a)
        r0 = mean_r0 + rng.standard_normal(DRAWS) / np.sqrt(cells.p00)
        u_axis, w_axis = self._axes
        width_u = u_axis[1] - u_axis[0]
        width_w = w_axis[1] - w_axis[0]
        u = self._u[cell] + width_u * (rng.random(DRAWS) - 0.5)
        w = self._w[cell] + width_w * (rng.random(DRAWS) - 0.5)
        w = np.clip(w, w_axis[0], w_axis[-1])
        theta = np.stack([a.clip(0, 1), u, w, r0.clip(0, 1)], axis=1)
        return _Draws(theta, group)

    @property
    def theta(self) -> Array:
        """Draws [draws, 4] of the parameters (A, u, w, R_0)."""
        return self._drawn.theta

    def _law(self, x: Array) -> Array:
        """Return the law's scores [draws, x] at x for each draw."""
        a, u, w, r0 = self.theta.T[:, :, None]  # [draws, 1] each
        share = self.form.share(np.exp(w) * (x - u))
        value: Array = r0 + (a - r0) * share
        return value

    def _continuation(self, group: int, x: Array) -> _Continuation:
        """Return how the mean of these curves continues at x. group: as in _Draws. It
        is a Gaussian process, conditioned on the points.
        """
        size, noise = divmod(group, len(self.prior.noises))
        sizes = self._sizes[size]
        curves = len(np.unique(self.points.curve))
        offsets = self._seed_variance
        kernel = self._kernel(sizes.misfit, x, self.points.x)
        across = (kernel + offsets * self._rise()) / curves  # [x, points], of x and points
        prior = (self._kernel(sizes.misfit, x, x) + offsets) / curves
        rotated = across @ sizes.vectors
        projected = rotated * sizes.weights[:, noise]
        drift = self._drift(sizes.misfit, x)
        covariance = prior - projected @ rotated.T + drift
        values, vectors = np.linalg.eigh(covariance)
        deviations = np.sqrt(np.maximum(values, 0))
        return _Continuation(projected.T, vectors * deviations)

    def scores(self, x: Array) -> Array:
        """Return draws [draws, x] of the mean score of these curves at x, with misfit
        but without the noise of evaluations.
        """
        scores = self._law(x)
        residuals = self.points.y - self._law(self.points.x)
        groups = self._drawn.group
        rng = np.random.default_rng(1)
        for group in np.unique(groups):
            rows = groups == group
            continuation = self._continuation(group, x)
            vectors = self._sizes[group // len(self.prior.noises)].vectors
            scores[rows] += residuals[rows] @ vectors @ continuation.projection
            random = rng.standard_normal((int(rows.sum()), len(x)))
            scores[rows] += random @ continuation.root.T
        return scores.clip(0, 1)


class _Peak(NamedTuple):
    """Where a cell's density is highest, with A from R_0 to 1. loss: by how much its
    logarithm is lower there than if both were free.
    """

    r0: Array
    a: Array
    loss: Array


def _peak(cells: _Cells) -> _Peak:
    """Return the peak of each cell. If a falling law would fit best, it is the best
    constant, `level`; else the A nearest to the Gaussian's, and the best R_0 for it.
    """
    both = cells.p00 + cells.paa + 2 * cells.p0a
    determinant = cells.determinant
    weight_r0 = cells.p00 + cells.p0a
    weight_a = cells.paa + cells.p0a
    level = (weight_r0 * cells.r0 + weight_a * cells.a) / both
    falls = cells.a < cells.r0
    rising_a = cells.a.clip(0, 1)
    slope = cells.p0a / cells.p00
    rising_r0 = cells.r0 - slope * (rising_a - cells.a)
    r0 = np.where(falls, level, rising_r0)
    a = np.where(falls, level.clip(0, 1), rising_a)
    # That of A − R_0, which a constant holds at 0; else that of A, for the best R_0.
    precision = np.where(falls, determinant / both, determinant / cells.p00)
    distance = np.where(falls, cells.r0, rising_a) - cells.a
    return _Peak(r0, a, 0.5 * distance**2 * precision)


def _ends(cells: _Cells) -> tuple[Array, Array]:
    """Return the probabilities, by a cell's Gaussian, that A is below the mean of R_0
    (or 0) and that it is below 1.
    """
    deviation = np.sqrt(cells.p00 / cells.determinant)
    low = (np.maximum(cells.r0, 0) - cells.a) / deviation
    high = (1 - cells.a) / deviation
    return np.interp(low, _Z, _CDF), np.interp(high, _Z, _CDF)
