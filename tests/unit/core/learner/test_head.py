"""The head in chunks against the formula over all logits in float64: values, gradients,
what is skipped, what is never made.
"""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.learner.network import selected_logprobs
from megarl.core.models import head
from megarl.core.models.head import logprobs_and_entropy
from tests.plain_head import (
    CASES,
    CHUNKS,
    SHAPES,
    TERMS,
    Case,
    differences,
    exact,
    found,
    make_case,
)


@given(CASES, CHUNKS)
def test_any_shape_in_any_chunks(case: Case, chunk: tuple[int, int]) -> None:
    off = differences(found(case, chunk=chunk), exact(case))
    assert all(off[name] <= 1e-6 for name in TERMS), off


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_float64(shape: str) -> None:
    for seed in range(3):
        case = make_case(seed, **SHAPES[shape])
        off = differences(found(case, chunk=(64, 700)), exact(case))
        assert max(off.values()) <= 2e-6, (
            off
        )  # the roundings of FP32's sums: 1.2e-6 by the products of CPUs with AMX


def test_logits_far_apart() -> None:
    """A certain token, an impossible label: nothing overflows, and log-probs are exact
    to FP32.
    """
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    weight = torch.tensor([[300.0, -300.0], [0.0, 0.0], [-300.0, 300.0], [0.0, 299.0]])
    case = Case(hidden, weight, torch.tensor([0, 0, 2]), torch.ones(2, 3), 4, 0.5)
    mine = found(case, chunk=(2, 1))
    expected = exact(case)
    assert mine.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), rel=1e-6)
    assert mine.entropy.tolist() == pytest.approx(expected.entropy.tolist(), abs=1e-6)
    assert max(differences(mine, expected).values()) <= 1e-6


def test_one_token_of_vocabulary_is_certain() -> None:
    case = make_case(0, rows=3, width=4, vocabulary=1, padding=2)
    mine = found(case)
    assert (mine.logprobs.tolist(), mine.entropy.tolist()) == ([0.0] * 3, [0.0] * 3)
    assert not mine.of_hidden.any()
    assert not mine.of_weight.any()


def test_padding_of_the_vocabulary_is_never_looked_at() -> None:
    """make_case's padding is NaN."""
    mine = found(make_case(0, rows=9, width=8, vocabulary=11, padding=6))
    assert all(
        t.isfinite().all() for t in (mine.logprobs, mine.entropy, mine.of_hidden, mine.of_weight)
    )
    assert not mine.of_weight[11:].any()


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_gradient_is_added_to_what_is_there(tied: bool) -> None:
    """Over micro-batches, as DDP wants it. What autograd gets is dropped and takes no
    memory; DDP adds it where the embedding's part is in it, so there it is that part
    alone. DDP's hook runs once.
    """
    case = make_case(3, rows=6, width=5, vocabulary=9)
    weight = case.weight.requires_grad_()
    ran = []
    weight.main_grad = torch.zeros(9, 5)
    weight.zero_out_wgrad = tied
    weight.register_post_accumulate_grad_hook(lambda _: ran.append(True))
    for _ in range(2):
        weight.grad = None
        logprobs, entropy = logprobs_and_entropy(case.hidden, weight, case.labels, vocab_size=9)
        embedded = weight[:3].sum() if tied else 0.0
        ((torch.stack([logprobs, entropy]) * case.upstream).sum() + embedded).backward()
    expected = 2 * exact(case).of_weight
    assert (weight.main_grad - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert len(ran) == 2
    if tied:
        assert (weight.grad[:3].unique().tolist(), weight.grad[3:].any()) == ([1.0], False)
    else:
        assert weight.grad.data_ptr() == weight.data_ptr()
    assert weight.grad_added_to_main_grad is True


def test_nothing_is_kept_where_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK", (3, 4))
    case = make_case(1, rows=7, width=5, vocabulary=9)
    logprobs, entropy = logprobs_and_entropy(case.hidden, case.weight, case.labels, vocab_size=9)
    assert not logprobs.requires_grad
    assert (logprobs - exact(case).logprobs).abs().max() <= 1e-6
    assert (entropy - exact(case).entropy).abs().max() <= 1e-6


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(
                    self.largest, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_tokens_times_vocabulary_is_made(dtype: torch.dtype) -> None:
    """For 1 Mi logits, forward and backward, nothing is larger than a chunk of 4,096 or
    the weight of 32 Ki.
    """
    case = make_case(0, rows=256, width=8, vocabulary=4096, dtype=dtype)
    with Sizes() as sizes:
        found(case, chunk=(32, 128))
    assert sizes.largest == case.weight.numel()
    with Sizes() as whole:
        found(case, chunk=(256, 4096))
    assert whole.largest == 256 * 4096  # so backward is seen too: it makes the same chunks
    with Sizes() as plain:
        exact(case)
    assert plain.largest == 256 * 4096


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_bf16(precision: torch.dtype) -> None:
    """FP32 logits of bf16 numbers are exact to FP32; rounded to bf16 they are not.
    Gradients are those of bf16 training.
    """
    case = make_case(0, rows=200, width=256, vocabulary=5000, dtype=torch.bfloat16)
    mine = found(case, precision=precision, chunk=(64, 700))
    expected = exact(case)
    off = differences(mine, expected)
    wide = precision is torch.float32
    assert (off["logprobs"] <= 1e-6) == wide
    assert (off["entropy"] <= 1e-6) == wide
    assert (mine.logprobs - expected.logprobs).abs().max() <= (1e-5 if wide else 0.03)
    assert mine.of_hidden.dtype == torch.bfloat16
    assert mine.of_weight.dtype == torch.float32
    assert max(off["of_hidden"], off["of_weight"]) <= (2**-8 if wide else 2**-5), off


def test_rounded_logits_are_those_of_a_bf16_linear_layer() -> None:
    case = make_case(2, rows=40, width=32, vocabulary=300, dtype=torch.bfloat16)
    logits = torch.nn.functional.linear(case.hidden, case.weight)
    assert logits.dtype == torch.bfloat16
    expected = torch.log_softmax(logits.double(), -1).gather(-1, case.labels[:, None])[:, 0]
    mine = found(case, precision=torch.bfloat16).logprobs
    assert (mine - expected).abs().max() <= 2e-6


def test_masked_tokens_meet_no_arithmetic(one_rank: None) -> None:
    """NaN in every hidden state that is not asked for: prompt tokens, padding, masked
    segments.
    """
    case = make_case(5, rows=4, width=8, vocabulary=13)
    at = torch.tensor([2, 3, 7, 11])
    states = torch.full((6, 2, 8), math.nan)
    states.view(12, 8)[at] = case.hidden
    states.requires_grad_()
    weight = case.weight.requires_grad_()
    weight.main_grad = torch.zeros(13, 8)
    from megatron.core import parallel_state

    logprobs, entropy = selected_logprobs(
        hidden_states=states,
        output_layer=SimpleNamespace(
            weight=weight,
            sequence_parallel=False,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        ),
        output_weight=None,
        context=cast(Any, SimpleNamespace(positions=at, labels=case.labels)),
        vocab_size=13,
        temperature=1.0,
        precision=torch.float32,
    )
    (torch.stack([logprobs, entropy]) * case.upstream).sum().backward()
    expected = exact(case)
    assert (logprobs - expected.logprobs).abs().max() <= 1e-6
    assert (
        weight.main_grad - expected.of_weight
    ).abs().max() <= 1e-6 * expected.of_weight.abs().max()
    assert states.grad is not None
    found_gradient = states.grad.view(12, 8)
    assert (
        found_gradient[at] - expected.of_hidden
    ).abs().max() <= 1e-6 * expected.of_hidden.abs().max()
    assert not found_gradient[[i for i in range(12) if i not in at]].any()
