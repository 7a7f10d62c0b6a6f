"""The fit against laws it should find, against scipy, and against the truth over many
draws.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.published import Law, published
from tests.unit.predict.scaling.curves import HOURS, exact, law, noisy

LAWS = [law for law in published() if law.C_mid is not None]


def rate(found: Any, hours: np.ndarray) -> np.ndarray:
    return law(hours, found.A, found.B, found.C_mid, found.R_0)


@pytest.mark.parametrize("published_law", LAWS, ids=lambda row: row.name)
def test_published_rows_are_recovered_from_half_of_the_compute(published_law: Law) -> None:
    """Without noise: exactly. On the paper's grid A is theirs to the last digit."""
    hours = np.linspace(500, published_law.hours or 16_000, 32)
    curve = Curve("x", hours, published_law(hours), published_law.r0)
    for grid in ("free", "paper"):
        found = fit([curve], end=hours[-1] / 2, grid=grid)
        exact = (
            1 if grid == "paper" else 50
        )  # the mode knows a little of B before it has seen the points
        assert pytest.approx(published_law.A, abs=1e-5 * exact) == found.A
        assert pytest.approx(published_law.B, rel=1e-4 * exact) == found.B
        assert found.C_mid == pytest.approx(published_law.C_mid, rel=1e-4 * exact)
        assert found.r2 == pytest.approx(1, abs=1e-4)


DATA = {
    "half": (noisy(0.61, 1.92, 2542, 1), 8000.0),
    "before C_mid": (noisy(0.645, 1.89, 11272, 2), 8000.0),
    "steep": (noisy(0.585, 6.0, 3000, 3), 16000.0),
    "few": (noisy(0.61, 1.92, 2542, 4, np.linspace(2000, 12000, 6)), 12000.0),
}
NO_LAW = Curve("x", HOURS, np.random.default_rng(5).uniform(0.2, 0.6, len(HOURS)), 0.3)


def brute_force(
    hours: np.ndarray, scores: np.ndarray, r0: float, ceilings: np.ndarray
) -> tuple[float, float]:
    """ScaleRL's procedure with scipy: for each A and many C_mid, B by `curve_fit`; then
    the best polished in both.
    """

    def curve(c: np.ndarray, b: float, c_mid: float, a: float) -> np.ndarray:
        return law(c, a, b, c_mid, r0)

    best = (math.inf, 0.0)
    span = np.log([hours[0] / 1000, hours[-1] * 1000])
    for a in ceilings:

        def residual(p: np.ndarray, a: float = a) -> np.ndarray:
            return curve(hours, math.exp(p[0]), math.exp(p[1]), a) - scores

        for start in ((0.5, 0.3), (0.5, 0.5), (0.5, 0.7), (2.0, 0.5), (8.0, 0.5), (30.0, 0.48)):
            found = optimize.least_squares(
                residual,
                (math.log(start[0]), span[0] + start[1] * (span[1] - span[0])),
                bounds=([math.log(0.05), span[0]], [math.log(50), span[1]]),
                xtol=1e-14,
                ftol=1e-14,
                gtol=1e-14,
            )
            best = min(best, (2 * found.cost, float(a)))
    return best


@pytest.mark.parametrize("name", DATA)
def test_same_as_brute_force_on_the_papers_grid(name: str) -> None:
    curve, end = DATA[name]
    found = fit([curve], end=end, grid="paper")
    near = np.unique(
        np.clip(np.round((found.A + np.arange(-4, 5) * 0.005) / 0.005) * 0.005, 0.45, 0.8)
    )
    sse, ceiling = brute_force(
        found.hours, found.pass_rate, 0.3, np.unique([*near, *np.linspace(0.45, 0.8, 8)])
    )
    assert found.sse <= sse * (1 + 1e-6)
    assert found.sse == pytest.approx(sse, rel=1e-5)
    assert pytest.approx(ceiling, abs=1e-9) == found.A
    assert ((rate(found, found.hours) - found.pass_rate) ** 2).sum() == pytest.approx(found.sse)


def test_never_worse_than_brute_force_where_there_are_many_minima() -> None:
    """Scores without a law: a step in any gap between points may be the best."""
    found = fit([NO_LAW], grid="paper")
    assert found.sse <= brute_force(found.hours, found.pass_rate, 0.3, np.linspace(0.45, 0.8, 8))[
        0
    ] * (1 + 1e-6)


@pytest.mark.parametrize("form", ["logistic", "power"])
def test_other_forms_find_their_own_curves(form: str) -> None:
    hours = np.linspace(2000, 16_000, 20)
    if form == "logistic":
        scores = 0.3 + 0.3 / (1 + np.exp(-0.0008 * (hours - 3000)))
        expected = (0.6, 0.0008, 3000)
    else:
        scores = 0.62 - 0.32 * (1500 / hours) ** 0.7
        expected = (0.62, 0.7, 1500)
    found = fit([Curve("x", hours, scores, 0.3)], form=form)
    assert (found.A, found.B, found.C_mid) == pytest.approx(expected, rel=5e-3)


def test_estimated_r0() -> None:
    curve = replace(exact(0.61, 1.92, 2542), r0=None)
    found = fit([curve], start=0)
    assert pytest.approx(0.3, abs=1e-3) == found.R_0
    assert pytest.approx(0.61, abs=1e-3) == found.A
    assert any("R_0 = 0.300 is an estimate" in warning for warning in found.warnings)


def test_a_measured_r0_is_evidence_and_a_given_one_is_the_truth() -> None:
    """A real curve leaves the score before training by another way than the law:
    measured R_0 = .36, the points want .30.
    """
    curve = noisy(0.61, 1.92, 2542)
    measured = fit([replace(curve, r0=0.36)], end=8000)
    given_ = fit([curve], end=8000, r0=0.36)
    assert abs(measured.R_0 - 0.3) < 0.05
    assert pytest.approx(0.36, abs=1e-5) == given_.R_0
    assert measured.A_interval[0] < 0.61 < measured.A_interval[1]


def test_seeds_are_pooled() -> None:
    curves = [
        replace(noisy(0.61, 1.92, 2542, seed), seed=seed, r0=0.3 + 0.01 * (seed - 1))
        for seed in range(3)
    ]
    pooled = fit(curves, end=8000)
    alone = fit(curves[:1], end=8000)
    assert pooled.n == 3 * alone.n
    assert pytest.approx(0.3, abs=0.03) == pooled.R_0
    assert np.ptp(pooled.A_interval) < np.ptp(alone.A_interval)


def test_units_scale() -> None:
    """A run of seconds on a CPU is fitted as one of weeks is."""
    curve = noisy(0.61, 1.92, 2542)
    small = replace(curve, hours=curve.hours / 1e6, unit="core")
    big = fit([curve], start=0)
    tiny = fit([small], start=0)
    assert (tiny.A, tiny.B, tiny.C_mid * 1e6) == pytest.approx((big.A, big.B, big.C_mid), rel=1e-6)
    assert tiny.A_interval == pytest.approx(big.A_interval, abs=1e-5)


class TestWindow:
    def test_first_1500_gpu_hours(self) -> None:
        assert fit([exact(0.61, 1.92, 2542)]).window == (1500, 16_000)

    def test_first_epoch(self) -> None:
        found = fit([replace(exact(0.61, 1.92, 2542), first_epoch=4100.0, unit="core")])
        assert found.window == (4500, 16_000)

    def test_options_win(self) -> None:
        assert fit([exact(0.61, 1.92, 2542)], start=900, end=9000).window == (1000, 9000)

    def test_core_hours_are_not_gpu_hours(self) -> None:
        assert fit([replace(exact(0.61, 1.92, 2542), unit="core")]).window[0] == 500

    def test_too_few_behind_it(self) -> None:
        found = fit([exact(0.61, 1.92, 2542)], end=4000)
        assert found.window[0] == 500
        assert any(
            "first 1,500 GPU-hours could not be left out (6 of 8" in warning
            for warning in found.warnings
        )

    @pytest.mark.parametrize(
        ("epoch", "start"), [(900.0, 1000), (4100.0, 1500), (math.inf, 1500), (None, 1500)]
    )
    def test_the_papers_hours_or_a_shorter_epoch(self, epoch: float | None, start: float) -> None:
        found = fit([replace(exact(0.61, 1.92, 2542), first_epoch=epoch)])
        assert found.window[0] == start
        assert not any("could not be left out" in warning for warning in found.warnings)

    def test_run_in_its_first_epoch(self) -> None:
        found = fit([replace(exact(0.61, 1.92, 2542), first_epoch=math.inf, unit="core")])
        assert any(
            "the first epoch could not be left out (0 of 32" in warning
            for warning in found.warnings
        )


class TestWarnings:
    def test_none_where_there_is_nothing_to_say(self) -> None:
        assert fit([noisy(0.61, 1.92, 2542)]).warnings == ()

    def test_window_ends_before_c_mid(self) -> None:
        found = fit([noisy(0.645, 1.89, 11272)], end=8000)
        assert any("before C_mid" in warning for warning in found.warnings)
        assert any("wider than 0.08" in warning for warning in found.warnings)

    def test_few_points(self) -> None:
        found = fit([noisy(0.61, 1.92, 2542)], start=9000, end=11_000)
        assert any("only 5 points" in warning for warning in found.warnings)

    def test_edge_of_the_grid(self) -> None:
        found = fit([exact(0.9, 1.9, 2542)], grid="paper")
        assert any("A = 0.800 is at the edge" in warning for warning in found.warnings)
        assert fit([exact(0.7, 1.9, 2542)]).warnings == ()

    def test_not_monotone(self) -> None:
        curve = noisy(0.61, 1.92, 2542)
        fallen = replace(curve, pass_rate=curve.pass_rate - np.linspace(0, 0.15, len(HOURS)))
        assert any("not monotone" in warning for warning in fit([fallen]).warnings)

    @pytest.mark.parametrize("fall", [0.0, 0.2])
    def test_a_run_that_does_not_rise(self, fall: float) -> None:
        """Neither the best fit nor a draw of the posterior falls, as the best line
        would.
        """
        noise = 0.004 * np.random.default_rng(0).standard_normal(len(HOURS))
        found = fit([Curve("x", HOURS, 0.4 - fall * HOURS / HOURS[-1] + noise, 0.4)])
        assert found.A >= found.R_0 > found.pass_rate.min()
        assert found.A_interval[0] > 0.9 * found.R_0
        assert any("scores do not rise" in warning for warning in found.warnings)
        assert not any("before C_mid" in warning for warning in found.warnings)

    def test_streaks(self) -> None:
        curve = exact(0.61, 1.92, 2542)
        wavy = replace(curve, pass_rate=curve.pass_rate + 0.01 * np.sin(np.arange(len(HOURS)) / 2))
        assert any("streaks" in warning for warning in fit([wavy]).warnings)


class TestRefusals:
    def test_one_point(self) -> None:
        with pytest.raises(
            MegarlError, match="1 point in the window; a curve of 3 parameters needs at least 4"
        ):
            fit([Curve("x", np.array([5.0]), np.array([0.5]), 0.3)])

    def test_constant_scores(self) -> None:
        with pytest.raises(MegarlError, match=r"all 30 scores are 0\.5"):
            fit([Curve("x", HOURS, np.full(32, 0.5), 0.3)])
        with pytest.raises(
            MegarlError, match=r"all 30 scores are 0\.4"
        ):  # a mean of which is not 0.4, but nearly
            fit([Curve("x", HOURS, np.full(32, 0.4), 0.4)])

    def test_same_compute(self) -> None:
        with pytest.raises(MegarlError, match="only 1 different amounts of compute"):
            fit([Curve("x", np.full(9, 2000.0), np.linspace(0.3, 0.4, 9), 0.3)])

    @pytest.mark.parametrize(
        ("message", "options"),
        {
            "no form 'tanh'": {"form": "tanh"},
            "0 points in the window": {"start": 20_000},
            "the window is empty": {"start": 9, "end": 8},
            "R_0 is 30": {"r0": 30},
        }.items(),
    )
    def test_options(self, message: str, options: dict[str, Any]) -> None:
        with pytest.raises(MegarlError, match=message):
            fit([exact(0.61, 1.92, 2542)], **options)

    def test_power_without_r0(self) -> None:
        with pytest.raises(MegarlError, match="the power law cannot estimate R_0"):
            fit([replace(exact(0.61, 1.92, 2542), r0=None)], form="power")

    def test_mixed_units(self) -> None:
        curve = exact(0.61, 1.92, 2542)
        with pytest.raises(MegarlError, match="core-hours and GPU-hours"):
            fit([curve, replace(curve, unit="core")])

    def test_nothing(self) -> None:
        with pytest.raises(MegarlError, match="no curve"):
            fit([])


def test_scores_of_one_answer_each() -> None:
    """A run that is scored on one answer has a noise of its own, however often it is
    right.
    """
    rates = np.array([0.0, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1])
    found = fit([Curve("x", np.linspace(2000, 16_000, 12), rates, 0.3, answers=1)])
    assert np.ptp(found.A_interval) > 0.5, "twelve answers tell little"


@settings(max_examples=25, deadline=None)
@given(
    scores=st.lists(st.floats(0, 1), min_size=4, max_size=12),
    r0=st.one_of(st.none(), st.floats(0, 0.9)),
    form=st.sampled_from(["sigmoid", "logistic", "power"]),
)
@example(scores=[0.0, 1e-200, 0.0, 0.0], r0=0.0, form="sigmoid")
@example(scores=[2.2e-313, 1e-281, 0.0, 0.0, 0.0], r0=None, form="logistic")
def test_any_scores_give_finite_numbers_or_a_message(
    scores: list[float], r0: float | None, form: str
) -> None:
    try:
        found = fit(
            [Curve("x", 7.0 * 1.4 ** np.arange(len(scores)), np.array(scores), r0)], form=form
        )
    except MegarlError:
        return
    numbers = (found.A, found.B, found.C_mid, found.R_0, found.sse, found.rmse, found.r2)
    assert np.isfinite(numbers).all()
    assert 0 <= found.A <= 1
    assert found.B > 0
    for value, (low, high) in (
        (found.A, found.A_interval),
        (found.B, found.B_interval),
        (found.C_mid, found.C_mid_interval),
    ):
        slack = 1e-9 * abs(value) + 1e-12
        assert low <= value + slack
        assert value <= high + slack
    assert np.isfinite(found(found.hours)).all()
