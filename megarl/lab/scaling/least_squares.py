"""The paper's own procedure: for each A of a list and a fine grid of C_mid and B the sum of squares; the smallest wins.

every (A, u, w) of a grid, R_0 in closed form if it is free ─► the best (u, w) of each A ─► finer grids around it
"""

import numpy as np

from megarl.lab.scaling.forms import Array, Form

GRID = (64, 40)  # numbers of values of u and w
INSIDE = 48  # more values of u among the points, where a steep curve may have a minimum in each gap
FINER = 9  # values on each axis around the best, in each of ROUNDS grids
ROUNDS = 40


def least_squares(
    form: Form, x: Array, y: Array, ceilings: Array, r0_bounds: tuple[float, float]
) -> tuple[Array, float]:
    """Return parameters [4] (A, u, w, R_0) and the sum of squares. x, y: [points]; r0_bounds: equal if R_0 is known."""
    span, (low, high) = np.log(1000.0) if form.log else form.above, form.w_bounds
    u = np.union1d(np.linspace(x.min() - span, x.max() + span, GRID[0]), np.linspace(x.min(), x.max(), INSIDE))
    w = np.linspace(low, high, GRID[1])
    us, ws = (part.ravel() for part in np.meshgrid(u, w, indexing="ij"))
    errors, _ = _errors(form, x, y, ceilings[:, None], us[None], ws[None], r0_bounds)  # [ceilings, cells]
    best = errors.argmin(1)
    at_u, at_w, wide = us[best], ws[best], 1.0
    steps_u, steps_w = (part.ravel() for part in np.meshgrid(*[np.linspace(-1, 1, FINER)] * 2, indexing="ij"))
    rows = np.arange(len(ceilings))
    for _ in range(ROUNDS):
        near_u = at_u[:, None] + wide * np.diff(u).max() * steps_u
        near_w = np.clip(at_w[:, None] + wide * (w[1] - w[0]) * steps_w, low, high)
        errors, r0 = _errors(form, x, y, ceilings[:, None], near_u, near_w, r0_bounds)
        best = errors.argmin(1)
        at_u, at_w, wide = near_u[rows, best], near_w[rows, best], wide * 0.6
    n = int(errors[rows, best].argmin())
    return np.array([ceilings[n], at_u[n], at_w[n], r0[n, best[n]]]), float(errors[n, best[n]])


def _errors(
    form: Form, x: Array, y: Array, a: Array, u: Array, w: Array, r0_bounds: tuple[float, float]
) -> tuple[Array, Array]:
    """Return sums of squares and R_0 [ceilings, cells] of cells [1 or ceilings, cells]."""
    s = form.share(np.exp(w)[..., None] * (x - u[..., None]))  # [1 or ceilings, cells, points]
    q = 1 - s
    ss, qq, sq, ys, yq = (s * s).sum(-1), (q * q).sum(-1), (s * q).sum(-1), s @ y, q @ y
    r0 = np.clip((yq - a * sq) / np.maximum(qq, 1e-300), *r0_bounds)
    return float(y @ y) - 2 * r0 * yq - 2 * a * ys + r0 * r0 * qq + 2 * a * r0 * sq + a * a * ss, r0
