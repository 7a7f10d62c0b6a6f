"""The quadrature against scipy's Gaussians written out in full, and against least
squares.
"""

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from megarl.predict.scaling.forms import FORMS
from megarl.predict.scaling.posterior import FLAT, CurvePoints, Normal, Posterior, Prior
from tests.unit.predict.scaling.curves import law

SIGMOID = FORMS["sigmoid"]
HOURS = np.geomspace(500, 8000, 14)
X = np.log(HOURS / 8000)
NOISE = 0.004
PRIOR = Prior(
    w=Normal(math.log(1.5), 0.5),
    r0=Normal(0.31, 0.03),
    a=Normal(0.6, 0.3),
    misfits=(0.03,),
    length=1.5,
    seeds=0.04,
    noises=(1.0,),
    beyond=(4.0, 3.0),
)


def points(curves: int = 2) -> CurvePoints:
    rng = np.random.default_rng(0)
    scores = [
        law(HOURS, 0.61, 1.92, 2542) + NOISE * rng.standard_normal(len(X)) for _ in range(curves)
    ]
    numbers = np.repeat(np.arange(curves), len(X))
    return CurvePoints(
        np.tile(X, curves), np.concatenate(scores), numbers, np.full(curves * len(X), NOISE)
    )


def in_full(posterior: Posterior, x: np.ndarray, curve: np.ndarray, rise: np.ndarray) -> np.ndarray:
    """The covariance of misfits and offsets, entry by entry, as the module's docstring
    says.
    """
    size = posterior.gain
    covariance = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        for j in range(len(x)):
            if curve[i] == curve[j]:
                covariance[i, j] = (0.03 * size) ** 2 * math.exp(-abs(x[i] - x[j]) / 1.5)
                covariance[i, j] += (0.04 * size) ** 2 * rise[i] * rise[j]
    return covariance


def test_a_cell_is_the_gaussian_written_out() -> None:
    """Its mass, but for a constant and the bounds of A, is the density of the scores;
    its (R_0, A) their conditional mean.
    """
    data = points()
    posterior = Posterior(SIGMOID, data, PRIOR)
    noise = np.diag(np.full(len(data.x), NOISE**2))
    cells = [(-1.2, 0.6), (-1.0, 0.7), (0.5, 0.1)]
    us, ws = (np.array(part) for part in zip(*cells, strict=True))
    found = posterior._integrated(posterior._sizes[0], us, ws)
    expected = []
    for n, (u, w) in enumerate(cells):
        s = SIGMOID.share(np.exp(w) * (data.x - u))
        design = np.stack([1 - s, s], axis=1)
        prior = np.diag([0.03**2, 0.3**2])
        covariance = (
            in_full(posterior, data.x, data.curve, posterior._rise())
            + noise
            + design @ prior @ design.T
        )
        mean = design @ [0.31, 0.6]
        density = stats.multivariate_normal(mean, covariance).logpdf(data.y)
        expected.append(density + stats.norm(math.log(1.5), 0.5).logpdf(w))
        gain = prior @ design.T @ np.linalg.inv(covariance)
        r0, a = np.array([0.31, 0.6]) + gain @ (data.y - mean)
        assert (found.r0[0, n], found.a[0, n]) == pytest.approx((r0, a), abs=1e-7)
    found = type(found)(*(part[0] for part in found))
    inside = found.log_mass - np.log(np.maximum(1e-300, _inside(found)))
    assert np.diff(inside) == pytest.approx(np.diff(expected), rel=1e-6)


def _inside(cells: object) -> np.ndarray:
    from megarl.predict.scaling.posterior import _ends

    low, high = _ends(cells)  # type: ignore[arg-type]
    return high - low


def test_scores_go_on_from_the_points() -> None:
    """With the law all but given, what is left is the Gaussian process: mean and
    deviation by the textbook's formula.
    """
    data = points(1)
    held = Prior(
        w=Normal(math.log(1.92), 1e-3),
        r0=Normal(0.3, 1e-6),
        a=Normal(0.61, 1e-6),
        misfits=(0.03,),
        length=1.5,
        seeds=0.04,
        noises=(1.0,),
        beyond=(4.0, 3.0),
    )
    posterior = Posterior(SIGMOID, data, held)
    ahead = np.log(np.array([8000.0, 16_000.0, 64_000.0]) / 8000)
    drawn = posterior.scores(ahead)
    _, u, w, _ = posterior.theta.mean(0)

    def curve(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = 0.3 + 0.31 * SIGMOID.share(np.exp(w) * (x - u))
        return result

    x = np.concatenate([data.x, ahead])
    rise = np.concatenate([posterior._rise(), np.ones(3)])
    joint = in_full(posterior, x, np.zeros(len(x)), rise)
    n = len(data.x)
    distance = 2 * (1 - np.exp(-ahead / 2))  # from the last point, at 0; levels off
    for i, j in np.ndindex(3, 3):  # the drift of the slope: a Wiener process, integrated
        a = distance[i]
        b = distance[j]
        twice = integrate.quad(lambda t, a=a, b=b: (a - t) * (b - t), 0, min(a, b))[0]
        joint[n + i, n + j] += (6 * 0.03 * posterior.gain) ** 2 * twice
    gain = joint[n:, :n] @ np.linalg.inv(joint[:n, :n] + np.diag(np.full(n, NOISE**2)))
    mean = curve(ahead) + gain @ (data.y - curve(data.x))
    deviation = np.sqrt(np.diag(joint[n:, n:] - gain @ joint[:n, n:]))
    assert drawn.mean(0) == pytest.approx(mean, abs=1.5e-3)
    assert drawn.std(0) == pytest.approx(deviation, rel=0.15)


def test_with_nothing_but_noise_the_intervals_are_those_of_least_squares() -> None:
    """No misfit, no seeds, no prior: scipy's covariance of A, B and C_mid."""
    hours = np.geomspace(300, 60_000, 40)
    scores = law(hours, 0.61, 1.92, 2542) + 0.002 * np.random.default_rng(3).standard_normal(40)
    plain = Prior(None, Normal(0.3, 1e-6), Normal(0.6, FLAT), (0.0,), 1.0, 0.0, (1.0,), (1.0, 0.0))
    x = np.log(hours / 60_000)
    posterior = Posterior(SIGMOID, CurvePoints(x, scores, np.zeros(40), np.full(40, 0.002)), plain)

    def curve(x: np.ndarray, a: float, u: float, w: float) -> np.ndarray:
        result: np.ndarray = 0.3 + (a - 0.3) / (1 + np.exp(-math.exp(w) * (x - u)))
        return result

    best, covariance = optimize.curve_fit(
        curve, x, scores, (0.6, -3, 0.6), sigma=np.full(40, 0.002), absolute_sigma=True
    )
    assert posterior.mode()[:3] == pytest.approx(best, abs=2e-4)
    spread = posterior.theta[:, :3].std(0)
    assert spread == pytest.approx(np.sqrt(np.diag(covariance)), rel=0.1)


def test_many_points_are_averaged_with_their_neighbours() -> None:
    x = np.linspace(-3, 0, 1000)
    y = np.linspace(0.3, 0.6, 1000)
    merged = CurvePoints(x, y, np.repeat([0, 1], 500), np.full(1000, 0.01)).merged(64)
    assert 60 <= len(merged.x) <= 64
    assert set(merged.curve) == {0, 1}
    assert merged.noise is not None
    assert merged.noise[0] == pytest.approx(0.01 / 4)
    assert np.interp(merged.x[5], x, y) == pytest.approx(merged.y[5])
    assert CurvePoints(x, y, np.zeros(1000)).merged().noise is None, "what is unknown stays so"


def test_the_same_points_give_the_same_draws() -> None:
    one, two = (Posterior(SIGMOID, points(), PRIOR) for _ in range(2))
    assert (one.theta == two.theta).all()
    assert (one.scores(X[-3:]) == two.scores(X[-3:])).all()
