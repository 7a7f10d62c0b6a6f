"""The vocabulary-parallel log-probs and entropy against float64 log_softmax and finite differences, one rank."""

import pytest
import torch

from megarl.learner.logprobs import logprobs_and_entropy


def reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits.double() / temperature, -1)
    return logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_values_are_those_of_log_softmax_in_float64(temperature: float, scale: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 301) * scale, torch.randint(0, 301, (50,))
    logp, entropy = logprobs_and_entropy(logits, labels, 301, temperature)
    expected, expected_entropy = reference(logits, labels, temperature)
    assert (logp - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert (entropy - expected_entropy).abs().max() <= 1e-5


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient() -> None:
    torch.manual_seed(1)
    logits, labels = torch.randn(7, 16, requires_grad=True), torch.randint(0, 11, (7,))
    logp, entropy = logprobs_and_entropy(logits, labels, vocab_size=11)
    expected, expected_entropy = reference(logits[:, :11], labels, 1.0)
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-6)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert logits.grad[:, 11:].abs().max() == 0
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("output", ["logp", "entropy", "both"])
def test_gradients_are_those_of_finite_differences(output: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (5,))

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        logp, entropy = logprobs_and_entropy(x, labels, vocab_size=7, temperature=0.7)
        return {"logp": logp, "entropy": entropy, "both": (logp, entropy)}[output]

    assert torch.autograd.gradcheck(f, (logits,), atol=1e-7)


def test_logits_stay_as_they_were() -> None:
    logits = torch.randn(3, 8)
    before = logits.clone()
    logprobs_and_entropy(logits, torch.tensor([0, 1, 2]), 5, 0.5)
    assert torch.equal(logits, before)
