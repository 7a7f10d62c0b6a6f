"""FP8 blocks on a GPU: the bits of a CPU, which servers and learner compare; SGLang's
product against the stand-in's.
"""

import pytest
import torch

from megarl.core.sync.block_fp8 import BLOCK, quantise
from tests.fp8_stand_in import product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


@pytest.mark.parametrize("scale", [0.02, 1e-7, 300.0])
def test_the_bits_are_those_of_a_cpu(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = (torch.randn(4300, 1000, generator=draw) * scale).bfloat16()
    here = quantise(weight)
    there = quantise(weight.cuda())
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))
    assert torch.equal(here.scales, there.scales.cpu())


def test_sglangs_product_is_the_stand_ins() -> None:
    """Its own rounding of activations and its sums, by the kernel that takes FP32
    scales on any GPU.
    """
    pytest.importorskip("sgl_kernel", reason="SGLang's kernels are not installed")
    from sglang.srt.layers.quantization.fp8_utils import triton_w8a8_block_fp8_linear

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(33, 512, generator=draw).bfloat16().cuda()
    values, scales = quantise((torch.randn(384, 512, generator=draw) / 512**0.5).bfloat16().cuda())
    found = triton_w8a8_block_fp8_linear(x, values, [BLOCK, BLOCK], scales).float()
    wanted = product(x, values, scales).float()
    assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    assert (found - wanted).abs().mean() <= 2**-9 * wanted.abs().mean()
