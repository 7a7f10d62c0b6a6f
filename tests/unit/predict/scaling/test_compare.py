"""Comparisons whose answer is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.compare import compare, efficiency, overtakes
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.points import Curve
from tests.unit.predict.scaling.curves import HOURS, exact, law, noisy


def test_all_are_refitted_at_one_ceiling() -> None:
    """The paper's figure 7: B of every arm at .605, whatever each one's own A."""
    runs = {
        "scalerl": [exact(0.61, 1.92, 2542)],
        "off-policy": [exact(0.6, 1.5, 3409)],
        "dapo": [exact(0.61, 1.77, 3093)],
    }
    found = compare(runs, ceiling=0.605)
    assert found.ceiling == 0.605
    for name, refitted in found.at_ceiling.items():
        assert pytest.approx(0.605, abs=1e-5) == refitted.A
        alone = fit(runs[name], ceiling=0.605)
        assert (refitted.B, refitted.B_interval) == (alone.B, alone.B_interval)
    assert (
        "same ceiling within 0.02 (A 0.610 and 0.600); with both at 0.605, B differs"
        in found.verdict
    )
    assert "scalerl is quicker" in found.verdict
    assert "scalerl is ahead throughout" in found.verdict
    row: dict[str, Any] = found.rows()[1]
    assert (row["name"], row["A_common"]) == ("off-policy", 0.605)
    assert row["B_at_A_common"] == found.at_ceiling["off-policy"].B
    low, high = row["B_at_A_common_interval"]
    assert low <= row["B_at_A_common"] <= high
    assert 0.6 < compare(runs).ceiling < 0.61, "left out: the mean"
    with pytest.raises(
        MegarlError,
        match=r"--ceiling is 0\.5, and scalerl has reached 0\.60.; give one that no run has passed",
    ):
        compare(runs, ceiling=0.5)


def test_the_common_ceiling_is_the_mean_whatever_the_intervals() -> None:
    """ScaleRL refits both of two runs at the mean of their A (arXiv 2510.13786, section
    4).
    """
    wide = noisy(0.62, 1.5, 2500, hours=np.linspace(1600, 6000, 9))
    found = compare({"narrow": [exact(0.61, 1.92, 2542)], "wide": [wide]})
    narrow, other = (entry.fit for entry in found.entries)
    assert narrow is not None
    assert other is not None
    assert np.ptp(other.A_interval) > 2 * np.ptp(narrow.A_interval)
    assert found.ceiling == pytest.approx((narrow.A + other.A) / 2)


def test_two_of_one_ceiling_are_compared_there_whatever_a_third_has() -> None:
    """At the mean of all, .64, the first two would have passed their ceiling, and B
    would be the window's edge.
    """
    runs = {
        "a": [exact(0.8, 1.3, 2500)],
        "b": [exact(0.79, 1.8, 2500)],
        "low": [noisy(0.6, 1.5, 2500)],
    }
    found = compare(runs)
    assert found.ceiling < 0.77
    assert found.comparable.keys() <= {"low"}
    assert "(A 0.800 and 0.790); with both at 0.79" in found.against_first[0]
    assert ": 1.3" in found.against_first[0]
    assert "(a) against 1.7" in found.against_first[0]


def test_exponents_of_different_ceilings_are_not_compared() -> None:
    found = compare({"scalerl": [exact(0.61, 1.92, 2542)], "magistral": [exact(0.535, 1.44, 2800)]})
    assert "scalerl has the higher ceiling: A 0.610 against 0.535 of magistral." in found.verdict
    assert "B " not in found.verdict


def test_noise_of_exponents_is_no_difference() -> None:
    found = compare({"a": [noisy(0.61, 1.92, 2542, 1)], "b": [noisy(0.61, 1.92, 2542, 2)]})
    assert "B does not differ measurably" in found.verdict
    assert "within the noise" in found.verdict


def test_overtaking() -> None:
    short = (0.61, 1.92, 2542)
    long = (0.645, 1.89, 11272)
    found = compare({"14k": [exact(*short)], "32k": [exact(*long, hours=HOURS * 3)]})
    truth = optimize.brentq(
        lambda c: law(np.array([c]), *short)[0] - law(np.array([c]), *long)[0], 5000, 200_000
    )
    fits = [entry.fit for entry in found.entries]
    assert fits[0]
    assert fits[1]
    (first, _), (second, hours) = overtakes("14k", fits[0], "32k", fits[1])
    assert (first, second) == ("14k", "32k")
    assert hours == pytest.approx(truth, rel=0.01)
    assert "14k is ahead at first; 32k overtakes at" in found.verdict
    assert "(extrapolated: the points end at 16,000)" in found.verdict


def test_what_is_not_certain_is_said() -> None:
    early = {
        "a": [noisy(0.61, 1.92, 2542)],
        "b": [noisy(0.61, 1.92, 2542, 4, np.linspace(1000, 6000, 6))],
    }
    assert "But A of b may be anywhere in 0." in compare(early).verdict
    apart = {"a": [noisy(0.61, 1.92, 2542)], "b": [noisy(0.645, 1.89, 11272, 1)]}
    assert "intervals overlap, so this is not certain" in compare(apart, end=12_000).verdict


def test_a_run_that_cannot_be_fitted_does_not_stop_the_others() -> None:
    short = Curve("short", HOURS[:2], np.array([0.3, 0.4]), 0.3)
    found = compare(
        {"short": [short], "a": [exact(0.61, 1.92, 2542)], "b": [exact(0.5, 1.2, 2542)]}
    )
    assert len(found.against_first) == 1
    assert found.against_first[0].startswith("a has the higher ceiling")
    assert "short was not fitted: 2 points in the window" in found.verdict
    assert set(found.at_ceiling) == {"a", "b"}
    assert found.rows()[0]["problem"]


def test_mixed_units_are_refused() -> None:
    curve = exact(0.61, 1.92, 2542)
    with pytest.raises(MegarlError, match="in GPU-hours and in core-hours cannot be compared"):
        compare({"gpu": [curve], "cpu": [replace(curve, unit="core")]})


def test_efficiency_is_a_line_of_slope_b() -> None:
    found = fit([exact(0.61, 1.92, 2542)])
    x, y = efficiency(found, found.hours, found.pass_rate)
    slope, offset = np.polyfit(x, y, 1)
    assert (slope, offset) == pytest.approx((1.92, 0), abs=2e-3)
    above = efficiency(found, np.array([1000.0, 2000.0]), np.array([0.7, 0.2]))
    assert len(above[0]) == 0
