"""Linear warm-up, then constant (arXiv 2510.13786, appendix A) or what transformers'
schedules say.
"""

import pytest
import torch
from transformers import get_scheduler

from megarl.core.learner.optimizer import learning_rate
from megarl.core.recipe import Optimizer


def test_warm_up_ends_at_the_given_rate() -> None:
    settings = Optimizer(lr=5e-7, warmup_steps=100)
    assert learning_rate(0, settings, 7400) == pytest.approx(5e-9)
    assert learning_rate(49, settings, 7400) == pytest.approx(2.5e-7)
    assert learning_rate(99, settings, 7400) == learning_rate(5000, settings, 7400) == 5e-7


def test_no_warm_up() -> None:
    assert learning_rate(0, Optimizer(lr=1e-3, warmup_steps=0), 10) == 1e-3


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules_are_transformers_after_the_warm_up(schedule: str, warmup: int) -> None:
    settings = Optimizer.model_validate({"lr": 2e-4, "warmup_steps": warmup, "schedule": schedule})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-4)
    theirs = get_scheduler(schedule, optimizer, warmup, 40)
    for step in range(40):
        if step >= warmup:
            assert learning_rate(step, settings, 40) == pytest.approx(
                theirs.get_last_lr()[0], rel=1e-12
            )
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_left_at_the_end(schedule: str) -> None:
    settings = Optimizer.model_validate({"lr": 1.0, "warmup_steps": 2, "schedule": schedule})
    rates = [learning_rate(step, settings, 10) for step in range(13)]
    assert rates[1] == rates[2] == 1.0
    assert rates[2:11] == sorted(rates[2:11], reverse=True)
    assert rates[6] == pytest.approx(0.5)  # half-way both are half-way
    assert rates[10:] == pytest.approx([0.0] * 3)
