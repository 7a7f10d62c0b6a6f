"""Predictions against the truth, and against the curve's own inverse; their Gaussians
are in test_posterior.py.
"""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

from megarl.predict.scaling.extrapolate import errors_of_later_points, hours_to, inverse, predict
from megarl.predict.scaling.fit import Fit, fit
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.tables import reached
from tests.unit.predict.scaling.curves import HOURS, exact, law, noisy


@pytest.fixture(scope="module")
def half() -> Fit:
    return fit([noisy(0.61, 1.92, 2542, 1)], end=8000, r0=0.3)


def test_a_given_law_predicts_itself() -> None:
    """Points without noise, of a law: the score at twice and at a thousand times the
    compute.
    """
    found = fit([exact(0.61, 1.92, 2542)], end=8000)
    there = predict(found, np.array([16_000.0, 8e6]))
    assert there.pass_rate == pytest.approx(
        [law(np.array([16_000.0]), 0.61, 1.92, 2542)[0], 0.61], abs=2e-3
    )


def test_far_away_it_is_wider_than_the_interval_of_the_asymptote(half: Fit) -> None:
    """A is a parameter of the law, and the slope ahead may leave the law; but not
    without end.
    """
    there = predict(half, np.array([1e9, 1e12]))
    assert there.pass_rate == pytest.approx(half.A, abs=0.02)
    assert there.low[0] < half.A_interval[0]
    assert half.A_interval[1] < there.high[0]
    assert there.high[0] - there.low[0] < 4 * (half.A_interval[1] - half.A_interval[0])
    assert there.high[1] - there.low[1] == pytest.approx(there.high[0] - there.low[0], abs=0.01)


def test_less_is_known_further_ahead_and_least_of_a_curve_that_strays() -> None:
    """Points on a law say that it holds; a curve that bends away from it says that it
    may bend again.
    """

    def widths(curve: Curve) -> np.ndarray:
        there = predict(fit([curve], end=8000), np.array([10_000.0, 16_000.0, 32_000.0]))
        return there.high - there.low

    on = exact(0.61, 1.92, 2542)
    bent = replace(on, pass_rate=on.pass_rate + 0.015 * np.sin(6 * np.log(on.hours)))
    assert (np.diff(widths(bent)) > 0.05).all()
    assert (widths(bent) > 5 * widths(on)).all()


def test_double_the_compute_is_predicted() -> None:
    found = fit([noisy(0.61, 1.92, 2542, 3)], end=8000)
    there = predict(found, np.array([16_000.0]))
    assert there.low[0] < law(np.array([16_000.0]), 0.61, 1.92, 2542)[0] < there.high[0]
    assert there.high[0] - there.low[0] < 0.13


def test_a_curve_that_strays_from_the_law_is_not_left_behind() -> None:
    """A run that fell by .02 below its law for good: the law alone would promise a jump
    back up.
    """
    curve = noisy(0.61, 1.92, 2542, 3)
    fallen = replace(curve, pass_rate=curve.pass_rate - 0.02 * (curve.hours > 6000), answers=16_000)
    there = predict(fit([fallen], end=10_000), np.array([10_500.0]))
    truth = fallen.pass_rate[fallen.hours > 10_000][0]
    assert abs(there.pass_rate[0] - truth) < 0.01
    assert there.low[0] < truth < there.high[0]


def test_hours_to_a_score() -> None:
    found = fit([exact(0.61, 1.92, 2542)])
    assert hours_to(found, 0.455).hours == pytest.approx(2542, rel=0.02)  # half-way
    assert hours_to(found, 0.2).hours == 0
    assert math.isinf(hours_to(found, 0.63).hours)


def test_what_is_said_of_a_score_fits_the_numbers_beside_it() -> None:
    """A score between R_0 and the curve's first point is not one "not above R_0"; nor
    is an A above the score "below it".
    """
    late = fit([noisy(0.61, 1.92, 2542)], start=12_000)
    early = (late.R_0 + predict(late, late.hours[:1] / 10).pass_rate[0]) / 2
    assert "is reached before 1,200 GPU-hours" in reached(late, early, hours_to(late, early))
    open_ = fit([Curve("x", HOURS, law(HOURS, 0.9, 1.2, 100_000, 0.2), 0.2)])
    assert (score := open_.A - 0.01) < open_.A
    assert f"likely never reached: the best fit's A = {open_.A:.3f}" in reached(
        open_, score, hours_to(open_, score)
    )


def test_interval_of_hours_is_where_the_band_passes_the_score(half: Fit) -> None:
    when = hours_to(half, 0.55)
    low, high = when.interval
    assert low < when.hours < high
    assert predict(half, np.array([low])).high[0] == pytest.approx(0.55, abs=2e-3)
    assert predict(half, np.array([high])).low[0] == pytest.approx(0.55, abs=2e-3)
    assert math.isinf(hours_to(half, half.A).interval[1])  # A may be below it


@pytest.mark.parametrize("form", ["sigmoid", "logistic", "power"])
def test_inverse_of_each_form(form: str) -> None:
    found = fit([noisy(0.61, 1.92, 2542)], form=form)
    score = (found.R_0 + found.A) / 2
    assert found(np.array([inverse(found, score)]))[0] == pytest.approx(score, abs=1e-9)


def test_later_points_are_judged() -> None:
    curve = noisy(0.61, 1.92, 2542, 1)
    found = fit([curve], end=8000)
    later = errors_of_later_points(found, [curve])
    assert later is not None
    assert (later.n, later.until) == (16, 16_000)
    behind = curve.hours > 8000
    errors = curve.pass_rate[behind] - predict(found, curve.hours[behind]).pass_rate
    assert later.mean_error == pytest.approx(errors.mean())
    assert abs(later.largest_error) == pytest.approx(np.abs(errors).max())
    assert later.inside >= 14
    assert errors_of_later_points(fit([curve]), [curve]) is None


def test_thousands_of_later_points_are_judged_at_once() -> None:
    """A score for each step; by their covariance 2,500 would take minutes."""
    curve = noisy(0.61, 1.92, 2542, 1, np.linspace(2000, 16_000, 3000))
    found = fit([curve], end=8000)
    began = time.monotonic()
    later = errors_of_later_points(found, [curve])
    assert time.monotonic() - began < 10
    assert later is not None
    few = errors_of_later_points(
        found, [replace(curve, hours=curve.hours[::60], pass_rate=curve.pass_rate[::60])]
    )
    assert few is not None
    assert later.mean_error == pytest.approx(few.mean_error, abs=3e-3)
    assert later.inside / later.n == pytest.approx(0.95, abs=0.06)


def test_band_of_a_fit_that_knows_little_rises_as_its_curves_do() -> None:
    """Found in a picture: searches that stop early made it jagged."""
    found = fit([noisy(0.645, 1.89, 11272, 1, np.linspace(1406, 11_250, 8))])
    there = predict(found, np.geomspace(2000, 2e5, 40))
    assert np.diff(there.high).min() > -5e-3
    assert np.diff(there.low).min() > -5e-3
