"""KL estimates against numpy, finite differences, and sums over a whole small
vocabulary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.algorithm.losses import policy_loss
from megarl.core.algorithm.losses.terms import Estimator, Tokens, estimate, metric_names
from megarl.core.recipe import Loss, Reference

Floats = np.ndarray
FORMULAS: dict[
    Estimator, Callable[[Floats, Floats], Floats]
] = {  # of p = pi(y), r = pi_ref(y), as Schulman writes them
    "k1": lambda p, r: -np.log(r / p),
    "k2": lambda p, r: 0.5 * np.log(r / p) ** 2,
    "k3": lambda p, r: (r / p - 1) - np.log(r / p),
}
LOGPROBS = st.floats(-30, 0)


def kl(p: Floats, q: Floats) -> float:
    return float((p * np.log(p / q)).sum())


def distributions(seed: int, size: int = 11) -> tuple[torch.Tensor, Floats, Floats]:
    """Logits with gradient and their distribution; another one not far off."""
    random = np.random.default_rng(seed)
    logits = torch.tensor(random.normal(0, 1.5, size), requires_grad=True)
    reference = torch.softmax(logits.detach() + torch.tensor(random.normal(0, 0.8, size)), 0)
    return logits, torch.softmax(logits.detach(), 0).numpy(), reference.numpy()


@pytest.mark.parametrize("estimator", FORMULAS)
def test_value_and_gradient(estimator: Estimator) -> None:
    random = np.random.default_rng(0)
    p = random.uniform(0.01, 1, 40)
    r = random.uniform(0.01, 1, 40)
    logp = torch.tensor(np.log(p), requires_grad=True)
    found = estimate(logp, torch.tensor(np.log(r)), estimator)
    np.testing.assert_allclose(found.detach(), FORMULAS[estimator](p, r), rtol=1e-10)
    found.sum().backward()
    step = 1e-6
    at = np.log(p)
    up, down = (FORMULAS[estimator](np.exp(at + sign * step), r) for sign in (1, -1))
    np.testing.assert_allclose(logp.grad, (up - down) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_are_unbiased_and_k2_is_not(seed: int) -> None:
    """Means over the whole vocabulary, each token as often as the policy samples it."""
    _, p, r = distributions(seed)
    means = {
        e: float((p * estimate(torch.tensor(np.log(p)), torch.tensor(np.log(r)), e).numpy()).sum())
        for e in FORMULAS
    }
    assert means["k1"] == pytest.approx(kl(p, r), rel=1e-12)
    assert means["k3"] == pytest.approx(kl(p, r), rel=1e-12)
    assert abs(means["k2"] - kl(p, r)) > 1e-3 * kl(p, r)


def gradient(of: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> Floats:
    (found,) = torch.autograd.grad(of(torch.log_softmax(logits, 0)), logits)
    return found.numpy()


@pytest.mark.parametrize("seed", range(3))
def test_mean_gradients_in_the_loss_and_in_the_reward(seed: int) -> None:
    """k2 in the loss and k1 in the reward: of KL(pi || ref); k3 in the loss: of KL(ref
    || pi); k1 in the loss: none.
    """
    logits, p, r = distributions(seed)
    often = torch.tensor(p)
    log_r = torch.tensor(np.log(r))
    forward = gradient(lambda logp: (torch.tensor(r) * (log_r - logp)).sum(), logits)
    reverse = gradient(lambda logp: (logp.exp() * (logp - log_r)).sum(), logits)

    def gradient_of(estimator: Any) -> Any:
        return gradient(lambda logp: (often * estimate(logp, log_r, estimator)).sum(), logits)

    in_loss = {estimator: gradient_of(estimator) for estimator in FORMULAS}
    np.testing.assert_allclose(in_loss["k1"], 0, atol=1e-15)
    np.testing.assert_allclose(in_loss["k2"], reverse, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(in_loss["k3"], forward, rtol=1e-9, atol=1e-14)
    in_reward = gradient(
        lambda logp: (often * estimate(logp.detach(), log_r, "k1") * logp).sum(), logits
    )
    np.testing.assert_allclose(in_reward, reverse, rtol=1e-9, atol=1e-14)


@given(
    pairs=st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=20),
    estimator=st.sampled_from(["k2", "k3"]),
)
def test_k2_and_k3_are_never_negative(
    pairs: list[tuple[float, float]], estimator: Estimator
) -> None:
    logp, reference = torch.tensor(pairs, dtype=torch.float32).T
    found = estimate(logp, reference, estimator)
    assert (found >= 0).all()
    assert found[logp == reference].eq(0).all()


def tokens(logp: torch.Tensor, reference: torch.Tensor) -> Tokens:
    n = torch.tensor([len(logp)])
    one = torch.ones_like(logp)
    return Tokens(logp, logp.detach(), reference, one, one, one, n, n.to(logp.dtype))


@settings(deadline=None)
@given(values=st.lists(LOGPROBS, min_size=1, max_size=10), estimator=st.sampled_from(["k2", "k3"]))
def test_a_policy_that_is_the_reference_has_no_penalty_and_no_gradient(
    values: list[float], estimator: Estimator
) -> None:
    logp = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    section = Reference(coefficient=3.0, estimator=estimator)
    with_kl, metrics = policy_loss(Loss(), section)(tokens(logp, logp.detach()))
    without, _ = policy_loss(Loss())(tokens(logp, logp.detach()))
    assert torch.equal(with_kl, without)
    assert metrics["kl_reference"].eq(0).all()
    (of_kl,) = torch.autograd.grad((with_kl - without).sum(), logp)
    assert of_kl.eq(0).all()


@pytest.mark.parametrize("estimator", FORMULAS)
def test_k2_and_k3_change_the_loss_and_k1_does_not(estimator: Estimator) -> None:
    random = np.random.default_rng(1)
    logp, reference = (torch.tensor(-random.exponential(1, 9)) for _ in range(2))
    loss = policy_loss(Loss(), Reference(coefficient=0.1, estimator=estimator))
    losses, metrics = loss(tokens(logp, reference))
    plain, _ = policy_loss(Loss())(tokens(logp, reference))
    kl = FORMULAS[estimator](np.exp(logp.numpy()), np.exp(reference.numpy()))
    np.testing.assert_allclose(
        losses - plain, 0 * kl if estimator == "k1" else 0.1 * kl, rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(metrics["kl_reference"], kl, rtol=1e-9)
    assert tuple(metrics) == metric_names(loss)
