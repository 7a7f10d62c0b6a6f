"""Least squares of a form, for many starting points or many fixed values at once.

    grid()      every (A, u, w) of a coarse grid, R_0 solved if it is free   ─► starts, the best for each value of each
    descend()   Levenberg-Marquardt within bounds, all rows in one batch     ─► minima
    FitProfile  profiles of A, C_mid and B, coarse ─► the best of all ─► where each profile passes a threshold, refined

The parameters of a row are [A, u, w, R_0] (forms.py); one that is not free in a row keeps its value. The profile of a
parameter, the smallest error as a function of it, is a batch in which each row holds another value of it.

Written by hand, for scipy.optimize.least_squares solves one row at a time: 3 ms for each of a fit's 400 rows and of the 1,300
of a curve's interval, after an import of more than half a second. Here these take 0.2 and 0.1 seconds.
"""

from dataclasses import dataclass

import numpy as np

from megarl.lab.scaling.forms import Form

A, U, W, R0 = range(4)
GRID = (101, 32, 32)  # numbers of values of A, u and w
INSIDE = 48  # more values of u among the points, where a steep curve may have a minimum in each gap
ITERATIONS = 200
PATIENCE = 5  # steps without a gain of one in 10⁹ after which a row is done


@dataclass(frozen=True, eq=False)
class FitProblem:
    """Points `x` (Form.x) and scores `y`, both [points], and the bounds of parameters."""

    form: Form
    x: np.ndarray
    y: np.ndarray
    a_bounds: tuple[float, float]
    r0_bounds: tuple[float, float]  # equal if R_0 is known

    @property
    def low(self) -> np.ndarray:
        return np.array([self.a_bounds[0], self.x.min() - self.form.below, self.form.w_bounds[0], self.r0_bounds[0]])

    @property
    def high(self) -> np.ndarray:
        return np.array([self.a_bounds[1], self.x.max() + self.form.above, self.form.w_bounds[1], self.r0_bounds[1]])

    @property
    def free(self) -> np.ndarray:
        """Which parameters are free, [4] bool."""
        return self.low < self.high


def predicted(form: Form, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return predictions [rows, points] of parameters [rows, 4] at x [points] or [rows, points]."""
    a, u, w, r0 = theta.T[:, :, None]
    return r0 + (a - r0) * form.share(np.exp(w) * (x - u))


def grid(problem: FitProblem) -> tuple[np.ndarray, np.ndarray]:
    """Return starts: for each grid value of A, u and w in turn, the best of the others. Parameters [rows, 4]; index held.

    With q = 1 − s the error of (A, R_0) is Σ(y − R_0 q − A s)², so R_0 has a closed form and only sums over points are kept.
    """
    levels = GRID[A] if problem.free[A] else 1
    a, u, w = (np.linspace(problem.low[i], problem.high[i], n) for i, n in ((A, levels), (U, GRID[U]), (W, GRID[W])))
    u = np.union1d(u, np.linspace(problem.x.min(), problem.x.max(), INSIDE))
    s = problem.form.share(np.exp(w)[:, None] * (problem.x - u[:, None, None]))  # [u, w, points]
    q, y = 1 - s, problem.y
    ss, qq, sq = (s * s).sum(-1), (q * q).sum(-1), (s * q).sum(-1)
    ys, yq, yy = s @ y, q @ y, float(y @ y)
    level = a[:, None, None]
    r0 = np.clip((yq - level * sq) / np.maximum(qq, 1e-300), *problem.r0_bounds)  # [a, u, w]
    sse = yy - 2 * r0 * yq - 2 * level * ys + r0 * r0 * qq + 2 * level * r0 * sq + level * level * ss
    starts, held = [], []
    for axis, count in enumerate(sse.shape):
        flat = np.moveaxis(sse, axis, 0).reshape(count, -1).argmin(1)
        index = list(np.unravel_index(flat, np.delete(sse.shape, axis)))
        index.insert(axis, np.arange(count))
        i, j, k = index
        starts.append(np.stack([a[i], u[j], w[k], r0[i, j, k]], axis=1))
        held += [axis] * count
    return np.concatenate(starts), np.array(held)


def descend(
    problem: FitProblem, theta: np.ndarray, held: np.ndarray | None = None, target: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return minima [rows, 4] from starts `theta`, and their errors [rows]. held [rows]: a parameter that each row keeps.

    target, (x [rows], score [rows]): pulls the curve through it, by one more point of heavy weight that the errors
    do not count. The smallest error of curves through a point is the profile of the prediction there.
    """
    form, low, high = problem.form, problem.low, problem.high
    x, y = (np.broadcast_to(values, (len(theta), values.size)) for values in (problem.x, problem.y))
    weight = np.ones(problem.x.size)
    if target is not None:
        x, y = (np.column_stack(pair) for pair in zip((x, y), target, strict=True))
        weight = np.append(weight, 100.0)
    movable = np.broadcast_to(problem.free, theta.shape).copy()
    if held is not None:
        movable[np.arange(len(theta)), held] = False
    theta = np.clip(theta, low, high)
    residual = weight * (y - predicted(form, theta, x))
    error = (residual**2).sum(1)
    damping, idle = np.full(len(theta), 1e-3), np.zeros(len(theta), dtype=int)
    for _ in range(ITERATIONS):
        go = np.flatnonzero(idle < PATIENCE)
        if not len(go):
            break
        slopes = weight[:, None] * jacobian(form, theta[go], x[go])  # [rows, points, 4]
        across, at = slopes.transpose(0, 2, 1), theta[go]
        downhill = (across @ residual[go, :, None])[:, :, 0]
        # Parameters held, or pushed against a bound, do not move.
        active = movable[go] & ~((at <= low) & (downhill < 0)) & ~((at >= high) & (downhill > 0))
        normal = (across @ slopes) * (active[:, :, None] & active[:, None, :])
        diagonal = np.einsum("rii->ri", normal)
        normal = normal + np.eye(4) * (damping[go, None] * diagonal + ~active + 1e-14)[:, None, :]
        step = np.linalg.solve(normal, (downhill * active)[:, :, None])[:, :, 0]
        tried = np.clip(at + step, low, high)
        new_residual = weight * (y[go] - predicted(form, tried, x[go]))
        new_error = (new_residual**2).sum(1)
        better, gained = new_error < error[go], new_error < error[go] * (1 - 1e-9)
        idle[go] = np.where(gained, 0, idle[go] + 1)
        damping[go] = np.clip(np.where(better, damping[go] / 5, damping[go] * 10), 1e-7, 1e8)
        taken = go[better]
        theta[taken], residual[taken], error[taken] = tried[better], new_residual[better], new_error[better]
    return theta, (residual[:, : problem.x.size] ** 2).sum(1)


def jacobian(form: Form, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return derivatives of `predicted` by each parameter: [rows, points, 4]."""
    a, u, w, r0 = theta.T[:, :, None]
    z = np.exp(w) * (x - u)
    share, by_z = form.share(z), (a - r0) * form.slope(z)
    return np.stack([share, -by_z * np.exp(w), by_z * z, 1 - share], axis=-1)


REFINED = 16  # values between an inside and an outside value of a profile, in each of two rounds


class FitProfile:
    """Profiles of A, u and w of a problem, and its minimum `theta` [4] with error `sse`."""

    def __init__(self, problem: FitProblem, step: float | None = None) -> None:
        """Compute the profiles. step: A may only be a multiple of this (the paper's grid); the interval ignores this."""
        self.problem = problem
        starts, self.held = grid(problem)
        self.rows, self.errors = descend(problem, starts, self.held)
        order = np.argsort(self.errors)
        polished, errors = descend(problem, self.rows[order[:12]])
        self.theta, self.sse = polished[errors.argmin()], float(errors.min())
        self.smallest = self.sse
        """Smallest error with continuous parameters, even if A is on a grid."""
        if step is not None:
            low, high = problem.a_bounds
            levels = np.linspace(low, high, round((high - low) / step) + 1)
            starts = self.rows[np.abs(self.rows[:, A, None] - levels).argmin(0)]
            starts[:, A] = levels
            rows, errors = descend(problem, starts, np.full(len(levels), A))
            self.theta, self.sse = rows[errors.argmin()], float(errors.min())

    def region(self, allowed: float) -> tuple[np.ndarray, np.ndarray]:
        """Return profile rows whose error exceeds the smallest by at most four times what `allowed` does, and their errors."""
        near = self.errors <= self.smallest + 4 * (allowed - self.smallest)
        return np.concatenate([self.rows[near], self.theta[None]]), np.append(self.errors[near], self.sse)

    def interval(self, parameter: int, allowed: float) -> tuple[float, float]:
        """Return the outermost values whose best curve has at most this error; infinite where C_mid or B is unbounded."""
        if not self.problem.free[parameter]:
            return float(self.theta[parameter]), float(self.theta[parameter])
        mine = self.held == parameter
        rows = np.concatenate([self.rows[mine], self.theta[None]])
        errors = np.append(self.errors[mine], self.smallest)
        order = np.argsort(rows[:, parameter])
        rows, errors = rows[order], errors[order]
        inside = np.flatnonzero(errors <= allowed)
        low = self._end(parameter, allowed, rows, errors, int(inside[0]), -1)
        high = self._end(parameter, allowed, rows, errors, int(inside[-1]), 1)
        return min(low, float(self.theta[parameter])), max(high, float(self.theta[parameter]))

    def _end(
        self, parameter: int, allowed: float, rows: np.ndarray, errors: np.ndarray, inside: int, side: int
    ) -> float:
        """Return where the profile passes `allowed` between the row inside and its neighbour on that side."""
        outside = inside + side
        if not 0 <= outside < len(rows):
            return float(rows[inside, parameter]) if parameter == A else side * float("inf")
        near, near_error = rows[inside], float(errors[inside])
        far, far_error = float(rows[outside, parameter]), float(errors[outside])
        for _ in range(2):
            values = np.linspace(near[parameter], far, REFINED + 2)[1:-1]
            starts = np.repeat(near[None], REFINED, axis=0)
            starts[:, parameter] = values
            found, found_errors = descend(self.problem, starts, np.full(REFINED, parameter))
            good = np.flatnonzero(found_errors <= allowed)
            last = int(good[-1]) if len(good) else -1
            if last + 1 < REFINED:
                far, far_error = float(values[last + 1]), float(found_errors[last + 1])
            if last >= 0:
                near, near_error = found[last], float(found_errors[last])
        share = (allowed - near_error) / (far_error - near_error) if far_error > near_error else 0.5
        return float(near[parameter] + share * (far - near[parameter]))


def student_t(df: int) -> float:
    """Return the 97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; exact where the series is too coarse)."""
    if df <= 4:
        return (12.7062, 4.3027, 3.1824, 2.7764)[df - 1]
    z = 1.959964
    return (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * df**4)
    )
