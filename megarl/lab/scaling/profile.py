"""The best curve of a problem, and how far each parameter can move before the error grows too much.

grid ──► profiles of A, C_mid and B, coarse ──► the best of all ──► where each profile passes the threshold, refined
"""

import numpy as np

from megarl.lab.scaling.least_squares import A as CEILING
from megarl.lab.scaling.least_squares import FitProblem, descend, grid

REFINED = 16
"""Values between an inside and an outside value of a profile, in each of two rounds."""


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
            starts = self.rows[np.abs(self.rows[:, CEILING, None] - levels).argmin(0)]
            starts[:, CEILING] = levels
            rows, errors = descend(problem, starts, np.full(len(levels), CEILING))
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
            return float(rows[inside, parameter]) if parameter == CEILING else side * float("inf")
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
