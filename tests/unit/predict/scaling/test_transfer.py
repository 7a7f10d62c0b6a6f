"""Size to size: against power laws that are known."""

import numpy as np
import pytest

from benchmarks.transfer import judge
from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.fit import Fit, fit
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.transfer import SCATTER, SLOPES, doubts, named_size, transfer

SIZES = np.array([3e5, 8e5, 2e6, 5e6])
ANSWERS = 4096
Laws = np.ndarray  # [sizes, 4] A, B, C_mid, R_0


def laws(slopes: np.ndarray, scatter: np.ndarray) -> Laws:
    """scatter: [sizes, 4] how far each size is from the line, in the logarithms."""
    at = (
        np.array([np.log(0.12), np.log(1.15), np.log(4.0), np.log(0.6)])
        + np.log(SIZES / 2e6)[:, None] * slopes
        + scatter
    )
    a = 1 - np.exp(at[:, 0])
    b = np.exp(at[:, 1])
    c = np.exp(at[:, 2])
    r0 = (1 - np.exp(at[:, 3])).clip(0.05, 0.8)
    return np.stack([a.clip(r0 + 0.1, 0.99), b, c, r0], axis=1)


def score(law: np.ndarray, hours: np.ndarray) -> np.ndarray:
    a, b, middle, r0 = law
    return np.asarray(r0 + (a - r0) / (1 + (middle / hours) ** b))


def fitted(of: Laws, rng: np.random.Generator, count: int = 3) -> dict[float, Fit]:
    fits = {}
    for size, law in zip(SIZES[:count], of, strict=False):
        hours = law[2] * np.geomspace(0.15, 6, 10)
        rates = rng.binomial(ANSWERS, score(law, hours)) / ANSWERS
        fits[float(size)] = fit(
            [
                Curve(
                    "",
                    hours,
                    rates,
                    float(rng.binomial(ANSWERS, law[3]) / ANSWERS),
                    "core",
                    answers=ANSWERS,
                )
            ]
        )
    return fits


def test_intervals_hold_what_they_say() -> None:
    """Lines and scatter as the priors have them, three sizes fitted, the fourth
    predicted: 95 % of 240 values.
    """
    inside = np.zeros(6)
    for draw in range(40):
        rng = np.random.default_rng(draw)
        scatter = rng.standard_normal((4, 4)) * np.abs(rng.standard_normal(4)) * SCATTER
        of = laws(SLOPES[:, 0] + rng.standard_normal(4) * SLOPES[:, 1], scatter)
        found = transfer(fitted(of, rng), SIZES[3])
        hours = of[3, 2] * np.array([1.0, 4.0])
        middle, low, high = np.concatenate([found.intervals, found.scores(hours)], axis=1)
        true = np.concatenate([of[3], score(of[3], hours)])
        inside += (low <= true) & (true <= high)
        assert (low <= middle).all()
    assert 0.87 <= inside.mean() / 40 <= 0.99, inside / 40


def test_a_size_off_the_line_is_missed() -> None:
    """A policy that cannot learn what smaller ones did: no interval from them holds
    that, and it should not.
    """
    of = laws(np.array([-0.1, 0.0, 0.5, 0.0]), np.zeros((4, 4)))
    found = transfer(fitted(of, np.random.default_rng(0)), SIZES[3])
    assert found.intervals[1, 0] > of[0, 3] + 0.1  # its R_0
    hours = np.array([4 * of[3, 2]])
    assert found.scores(hours)[1, 0] > of[3, 3] + 0.05
    assert abs(found.scores(hours)[0, 0] - score(of[3], hours)[0]) < 0.03


def test_more_sizes_and_a_known_start_narrow_the_interval() -> None:
    of = laws(np.array([-0.1, 0.0, 0.5, -0.1]), np.zeros((4, 4)))
    fits = fitted(of, np.random.default_rng(0))
    hours = np.array([2 * of[3, 2]])

    def width(sizes: int, r0: float | None = None) -> float:
        _, low, high = transfer(dict(list(fits.items())[3 - sizes :]), SIZES[3], r0).scores(hours)
        return float(high[0] - low[0])

    assert width(3, of[3, 3]) < 0.9 * width(3) < 0.9 * width(2)
    assert any("2 sizes" in text for text in doubts(dict(list(fits.items())[:2]), 1e6))
    assert any("further beyond" in text for text in doubts(fits, 1e9))
    assert any("a run of this size begins at 0.05" in text for text in doubts(fits, 5e6, 0.05))
    assert not any("begins" in text for text in doubts(fits, 5e6, 0.4))
    enough = fits | {4e6: fits[2e6]}
    assert all(" parameters: A is only known" in text for text in doubts(enough, 5e6))


def test_judge_tells_a_curve_that_follows_from_one_that_does_not() -> None:
    """benchmarks/transfer.py: nearer than the next smaller size; and a policy that
    stops learning lies outside.
    """
    rng = np.random.default_rng(0)
    of = laws(np.array([-0.1, 0.0, 0.6, 0.0]), np.zeros((4, 4)))
    of[:, 2] *= 10  # petaFLOP
    curves = {}
    for size, law in zip(SIZES, of, strict=True):
        hours = law[2] * np.geomspace(0.1, 6, 12)
        rates = rng.binomial(ANSWERS, score(law, hours)) / ANSWERS
        curves[float(size)] = [Curve("", hours, rates, float(law[3]), "core", answers=ANSWERS)]
    row = judge("quickstart", curves)
    assert row["inside"] == 1
    assert row["rmse"] < row["rmse_of_next_smaller"]
    (last,) = curves[SIZES[3]]
    stopped = Curve(
        "", last.hours, np.minimum(last.pass_rate, of[3, 3] + 0.1), last.r0, "core", answers=ANSWERS
    )
    assert judge("quickstart", curves | {SIZES[3]: [stopped]})["inside"] < 0.5


def test_bad_input() -> None:
    fits = fitted(laws(np.zeros(4), np.zeros((4, 4))), np.random.default_rng(0), 2)
    one = fits[SIZES[0]]
    for sizes, size, message in (
        ({3e5: one}, 1e6, "1 size"),
        (fits, -1.0, "above 0"),
        ({0.0: one} | fits, 1e6, "above 0"),
    ):
        with pytest.raises(MegarlError, match=message):
            transfer(sizes, size)
    for r0 in (1.5, 1.0, -0.1, float("nan")):
        with pytest.raises(MegarlError, match="it is the pass rate before training"):
            transfer(fits, 1e6, r0)
    power = fit([Curve("", one.hours, one.pass_rate, 0.3, "core", answers=ANSWERS)], form="power")
    with pytest.raises(MegarlError, match="sigmoid"):
        transfer({1e5: power, 2e5: power}, 1e6)
    with pytest.raises(MegarlError, match="the number of active parameters"):
        named_size("points.csv")
    assert named_size("8e9=points.csv") == (8e9, "points.csv")
