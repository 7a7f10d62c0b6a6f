"""Linear warm-up, then constant (arXiv 2510.13786, appendix A)."""

import pytest

from megarl.learner.trainer import learning_rate
from megarl.recipe import Optimizer


def test_warm_up_ends_at_the_given_rate() -> None:
    settings = Optimizer(lr=5e-7, warmup_steps=100)
    assert learning_rate(0, settings) == pytest.approx(5e-9)
    assert learning_rate(49, settings) == pytest.approx(2.5e-7)
    assert learning_rate(99, settings) == learning_rate(5000, settings) == 5e-7


def test_no_warm_up() -> None:
    assert learning_rate(0, Optimizer(lr=1e-3, warmup_steps=0)) == 1e-3
