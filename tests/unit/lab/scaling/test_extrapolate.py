"""Predictions against scipy's profile, against the truth, and against the curve's own inverse."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from megarl.lab.scaling.extrapolate import hours_to, later_points, predict
from megarl.lab.scaling.fit import Fit, fit
from tests.unit.lab.scaling.curves import exact, law, noisy


@pytest.fixture(scope="module")
def half() -> Fit:
    return fit([noisy(0.61, 1.92, 2542, 1)], end=8000, r0=0.3)


def best_through(found: Fit, hours: float, score: float) -> float:
    """Smallest error of laws with this score at these hours, by scipy: A follows from the other two."""

    def residual(p: np.ndarray) -> np.ndarray:
        b, c_mid = np.exp(p)
        ceiling = 0.3 + (score - 0.3) * (1 + (c_mid / hours) ** b)
        return law(found.hours, ceiling, b, c_mid, 0.3) - found.pass_rate

    starts = [(math.log(found.B) + d, math.log(found.C_mid) + e) for d in (-0.2, 0, 0.2) for e in (-0.2, 0, 0.2)]
    return min(2 * optimize.least_squares(residual, s, xtol=1e-14, ftol=1e-14, gtol=1e-14).cost for s in starts)


@pytest.mark.parametrize("hours", [2000.0, 8000.0, 16_000.0, 64_000.0])
def test_interval_is_the_profile_of_the_prediction(half: Fit, hours: float) -> None:
    there = predict(half, np.array([hours]))
    t = stats.t.ppf(0.975, half.n - 3)
    allowed = half.sse * (1 + t**2 / (half.n - 3))
    for edge in (there.low[0], there.high[0]):
        excess = best_through(half, hours, edge) - half.sse
        assert excess == pytest.approx(allowed - half.sse, rel=0.03)


def test_far_away_it_is_the_interval_of_the_asymptote(half: Fit) -> None:
    there = predict(half, np.array([1e9]))
    assert (there.low[0], there.high[0]) == pytest.approx(half.A_interval, abs=2e-4)


def test_double_the_compute_is_predicted() -> None:
    found = fit([noisy(0.61, 1.92, 2542, 3)], end=8000)
    there = predict(found, np.array([16_000.0]))
    assert there.low[0] < law(np.array([16_000.0]), 0.61, 1.92, 2542)[0] < there.high[0]
    assert there.high[0] - there.low[0] < 0.03


def test_hours_to_a_score() -> None:
    found = fit([exact(0.61, 1.92, 2542)])
    assert hours_to(found, 0.455).hours == pytest.approx(2542, rel=1e-3)  # half-way
    assert hours_to(found, 0.2).hours == 0
    assert math.isinf(hours_to(found, 0.61 + 1e-6).hours)


def test_interval_of_hours_is_where_the_band_passes_the_score(half: Fit) -> None:
    reached = hours_to(half, 0.55)
    low, high = reached.interval
    assert low < reached.hours < high
    assert predict(half, np.array([low])).high[0] == pytest.approx(0.55, abs=1e-3)
    assert predict(half, np.array([high])).low[0] == pytest.approx(0.55, abs=1e-3)
    between = (half.A + half.A_interval[0]) / 2
    assert math.isinf(hours_to(half, between).interval[1])  # A may be below it


@pytest.mark.parametrize("form", ["sigmoid", "logistic", "power"])
def test_inverse_of_each_form(form: str) -> None:
    found = fit([noisy(0.61, 1.92, 2542)], form=form)
    score = (found.R_0 + found.A) / 2
    assert found(np.array([hours_to(found, score).hours]))[0] == pytest.approx(score, abs=1e-9)


def test_later_points_are_judged() -> None:
    curve = noisy(0.61, 1.92, 2542, 1)
    found = fit([curve], end=8000)
    later = later_points(found, [curve])
    assert later is not None
    assert (later.n, later.until) == (16, 16_000)
    errors = curve.pass_rate[curve.hours > 8000] - found(curve.hours[curve.hours > 8000])
    assert later.mean_error == pytest.approx(errors.mean())
    assert abs(later.largest_error) == pytest.approx(np.abs(errors).max())
    assert later.inside >= 14
    assert later_points(fit([curve]), [curve]) is None


def test_band_of_a_fit_that_knows_little_rises_as_its_curves_do() -> None:
    """Found in a picture: searches that stop early made it jagged."""
    found = fit([noisy(0.645, 1.89, 11272, 1, np.linspace(1406, 11_250, 8))])
    there = predict(found, np.geomspace(2000, 2e5, 40))
    assert np.diff(there.high).min() > -2e-3
    assert np.diff(there.low).min() > -2e-3
    assert there.high[-1] == pytest.approx(found.A_interval[1], abs=0.01)
