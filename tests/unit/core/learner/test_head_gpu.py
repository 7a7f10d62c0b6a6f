"""The head on a GPU: Triton's kernels and cuBLAS's products against float64, and its
memory against the plain way's.
"""

import pytest
import torch

from megarl.core.models.head import logprobs_and_entropy
from tests.plain_head import SHAPES, differences, exact, found, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_float64_to_1e_6(shape: str) -> None:
    case = make_case(0, **SHAPES[shape]).to("cuda")
    off = differences(found(case, chunk=(64, 700)), exact(case))
    assert max(off.values()) <= 1e-6, off


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_bf16(precision: torch.dtype) -> None:
    case = make_case(0, rows=200, width=256, vocabulary=5000, padding=3, dtype=torch.bfloat16).to(
        "cuda"
    )
    off = differences(found(case, precision=precision, chunk=(64, 700)), exact(case))
    wide = precision is torch.float32
    assert max(off["logprobs"], off["entropy"]) <= (1e-6 if wide else 0.01), off
    assert max(off["of_hidden"], off["of_weight"]) <= (2**-8 if wide else 2**-5), off


def test_memory_is_below_a_tenth_of_the_plain_way() -> None:
    """4,096 tokens of an 8B model's vocabulary and width: the peak of forward and
    backward, inputs apart.
    """
    random = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4096, 4096, device="cuda", generator=random).bfloat16()
    weight = (torch.randn(128256, 4096, device="cuda", generator=random) / 64).bfloat16()
    labels = torch.randint(0, 128256, (4096,), device="cuda", generator=random)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def plain() -> None:
        log_p = torch.log_softmax(hidden.float() @ weight.float().T, -1)
        logprobs = log_p.gather(-1, labels[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        (logprobs.sum() + entropy.sum()).backward()

    def ours() -> None:
        logprobs, entropy = logprobs_and_entropy(hidden, weight, labels, vocab_size=128256)
        (logprobs.sum() + entropy.sum()).backward()

    peaks = []
    for step in (plain, ours):
        hidden.grad = weight.grad = None
        hidden.requires_grad_()
        weight.requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0] / 10, peaks
