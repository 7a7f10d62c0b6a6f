"""CISPO against a loop written from the paper's formula, and its gradient against the definition of stop-gradient."""

import math

import numpy as np
import pytest
import torch

from megarl.learner.losses import policy_loss, supervised_loss
from megarl.recipe import Loss


def by_hand(logp: np.ndarray, behaviour: np.ndarray, advantage: np.ndarray, lower: float, cap: float) -> list[float]:
    """MiniMax-M1, equations 4 and 5, token by token."""
    losses = []
    for new, old, gain in zip(logp.tolist(), behaviour.tolist(), advantage.tolist(), strict=True):
        weight = min(max(math.exp(new - old), lower), cap)
        losses.append(-weight * gain * new)
    return losses


@pytest.fixture
def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    behaviour = -draw.exponential(2.0, 200)
    return behaviour + draw.normal(0, 1.5, 200), behaviour, draw.normal(0, 1, 200)


@pytest.mark.parametrize(("lower", "cap"), [(0.0, 4.0), (0.5, 1.2), (0.0, 1e9)])
def test_loss_and_gradient(tokens: tuple[np.ndarray, ...], lower: float, cap: float) -> None:
    logp, behaviour, advantage = (torch.tensor(t) for t in tokens)
    logp.requires_grad_()
    loss, metrics = policy_loss(Loss(cap=cap, lower=lower)).function(logp, behaviour, advantage)
    np.testing.assert_allclose(loss.detach(), by_hand(*tokens, lower, cap), rtol=1e-12)
    loss.sum().backward()
    ratio = np.exp(tokens[0] - tokens[1])
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, -np.clip(ratio, lower, cap) * tokens[2], rtol=1e-12)
    np.testing.assert_allclose(metrics["ratio_mean"].mean(), ratio.mean(), rtol=1e-12)
    np.testing.assert_allclose(metrics["kl_k3"].mean(), (ratio - 1 - np.log(ratio)).mean(), rtol=1e-12)
    assert metrics["capped_share"].sum() == (ratio >= cap).sum()
    assert metrics["trained_logprob_diff_max"].max() == np.abs(tokens[0] - tokens[1]).max()


def test_a_clipped_token_still_learns() -> None:
    logp = torch.tensor([-0.1], requires_grad=True)
    loss, _ = policy_loss(Loss(cap=4.0)).function(logp, torch.tensor([-9.0]), torch.tensor([2.0]))
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.item() == -8.0


def test_metric_names_are_the_declared_ones() -> None:
    for loss in (policy_loss(Loss()), supervised_loss()):
        _, metrics = loss.function(torch.zeros(2), torch.zeros(2), torch.ones(2))
        assert tuple(metrics) == loss.metrics
