"""Lengths as drawn have the mean they are asked for."""

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.predict.planning.workload import LogNormal, Measured, lognormal, workload


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_mean_after_cutting_off(spread: float, share: float) -> None:
    drawn = LogNormal(share * 10_000, spread, 10_000).draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(share * 10_000, rel=0.01)
    assert drawn.max() <= 10_000
    assert drawn.min() >= 1


def test_measured_lengths_are_those_measured() -> None:
    drawn = Measured((3, 5, 5)).draw(np.random.default_rng(0), 1000)
    assert set(drawn.tolist()) == {3, 5}


def test_a_request_met_at_random_is_longer_than_the_mean() -> None:
    """Lengths 1 and 9 in equal number: (1 + 81) / 2 / (2 x 5) = 4.1 of a life, and the
    prompt.
    """
    recipe = load("scalerl-8b")
    work = workload(recipe, Measured((1, 9)), 1.0, 0)
    assert work.live_context == pytest.approx(256 + 4.1, rel=0.02)


@pytest.mark.parametrize(
    ("mean", "spread", "words"),
    [(0.5, 0.5, "--mean-tokens"), (1e6, 0.5, "14048"), (100, 0, "--spread")],
)
def test_impossible_lengths_are_refused(mean: float, spread: float, words: str) -> None:
    with pytest.raises(MegarlError, match=words):
        lognormal(load("scalerl-8b"), mean, spread)
