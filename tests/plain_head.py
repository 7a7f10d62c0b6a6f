"""The head as a formula: all logits at once, in float64, with autograd's gradients. The
reference for megarl's head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.core.models import head as package
from megarl.core.models.head import logprobs_and_entropy


@dataclass(frozen=True)
class Case:
    """hidden [n, h]; weight [rows, h], of which `vocabulary` are no padding; labels
    [n]; upstream [2, n]: the loss's gradient of log-prob and of entropy.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Tensor
    vocabulary: int
    temperature: float

    def to(self, device: str) -> "Case":
        return Case(
            self.hidden.to(device),
            self.weight.to(device),
            self.labels.to(device),
            self.upstream.to(device),
            self.vocabulary,
            self.temperature,
        )


@dataclass(frozen=True)
class Result:
    """magnitude: of the terms that are summed to a gradient, of hidden states and of
    the weight, at most. Terms of both signs cancel, in the formula itself (1 - p of a
    label that is all but certain) and in the sum.
    """

    logprobs: Tensor
    entropy: Tensor
    of_hidden: Tensor
    of_weight: Tensor
    magnitude: tuple[float, float] = (1.0, 1.0)


def make_case(
    seed: int,
    rows: int,
    width: int,
    vocabulary: int,
    padding: int = 0,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Logits of deviation 1 before the temperature. Padding is NaN: whatever touches it
    shows. A third of the rows have no gradient, as tokens that a loss has clipped.
    """
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary + padding, width, generator=random) / width**0.5
    weight[vocabulary:] = float("nan")
    upstream = torch.randn(2, rows, generator=random)
    upstream[:, torch.rand(rows, generator=random) < 1 / 3] = 0
    return Case(
        torch.randn(rows, width, generator=random).to(dtype),
        weight.to(dtype),
        torch.randint(0, vocabulary, (rows,), generator=random),
        upstream,
        vocabulary,
        temperature,
    )


CASES = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 24),
    width=st.integers(1, 40),
    vocabulary=st.integers(2, 150),
    padding=st.integers(0, 5),
    temperature=st.floats(0.7, 2.0),
)
CHUNKS = st.tuples(st.integers(1, 30), st.integers(1, 160))


def exact(case: Case) -> Result:
    """In float64. The gradient of padding is 0."""
    hidden = case.hidden.detach().double().requires_grad_()
    weight = case.weight[: case.vocabulary].detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.T / case.temperature, -1)
    logprobs = log_p.gather(-1, case.labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (torch.stack([logprobs, entropy]) * case.upstream).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    padding = weight.new_zeros(len(case.weight) - case.vocabulary, weight.shape[1])
    return Result(
        logprobs.detach(),
        entropy.detach(),
        hidden.grad,
        torch.cat([weight.grad, padding]),
        magnitude(case, log_p.detach()),
    )


def magnitude(case: Case, log_p: Tensor) -> tuple[float, float]:
    label = torch.zeros_like(log_p).scatter_(-1, case.labels[:, None], 1.0)
    of_logprob, of_entropy = case.upstream.abs()[:, :, None] / case.temperature
    p = log_p.exp()
    terms = of_logprob * (label + p) + of_entropy * (
        p * (log_p + (p * log_p).sum(-1, keepdim=True).neg()).abs()
    )
    return (
        (terms @ case.weight[: case.vocabulary].detach().double().abs()).max().item(),
        (terms.T @ case.hidden.detach().double().abs()).max().item(),
    )


def found(
    case: Case,
    head: Callable[..., tuple[Tensor, Tensor]] = logprobs_and_entropy,
    chunk: tuple[int, int] = package.CHUNK,
    passes: ModuleType | None = None,
    **settings: Any,
) -> Result:
    """megarl's, with the weight's gradient as DDP holds it. passes: instead of those
    for the device.
    """
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    passes_on = package.passes_on if passes is None else lambda device: passes
    with mock.patch.multiple(package, CHUNK=chunk, passes_on=passes_on):
        logprobs, entropy = head(
            hidden,
            weight,
            case.labels,
            vocab_size=case.vocabulary,
            temperature=case.temperature,
            **settings,
        )
        (torch.stack([logprobs, entropy]) * case.upstream).sum().backward()
    assert hidden.grad is not None
    return Result(logprobs.detach(), entropy.detach(), hidden.grad, weight.main_grad)


def differences(mine: Result, expected: Result) -> dict[str, float]:
    """max|d| of each: of values over the larger of 1 nat and max|expected|, of
    gradients over max|expected| and over the magnitude of their terms.
    """
    values = max(1.0, expected.logprobs.abs().max().item())
    hidden, weight = (g.abs().max().item() or 1.0 for g in (expected.of_hidden, expected.of_weight))

    def off(a: Tensor, b: Tensor) -> float:
        return (a.double() - b).abs().max().item()

    return {
        "logprobs": off(mine.logprobs, expected.logprobs) / values,
        "entropy": off(mine.entropy, expected.entropy) / values,
        "of_hidden": off(mine.of_hidden, expected.of_hidden) / hidden,
        "of_weight": off(mine.of_weight, expected.of_weight) / weight,
        "of_hidden's terms": (
            off(mine.of_hidden, expected.of_hidden) / (expected.magnitude[0] or 1.0)
        ),
        "of_weight's terms": (
            off(mine.of_weight, expected.of_weight) / (expected.magnitude[1] or 1.0)
        ),
    }


TERMS = ("logprobs", "entropy", "of_hidden's terms", "of_weight's terms")
"""What FP32 logits allow at any shape: where terms cancel, what is left of them has
their error.
"""

SHAPES: dict[str, dict[str, Any]] = {
    "padded": {"rows": 200, "width": 256, "vocabulary": 5000, "padding": 3},
    "cool": {"rows": 300, "width": 64, "vocabulary": 1031, "temperature": 0.7},
    "wide, warm": {"rows": 64, "width": 1024, "vocabulary": 3000, "padding": 8, "temperature": 1.3},
}
"""Cases large enough that nothing cancels by chance. No chunk divides them."""
