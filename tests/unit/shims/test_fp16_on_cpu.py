"""fp16 products on a CPU are FP32 sums, rounded once; the gradients of attention are
those of FP32 to fp16's rounding.
"""

import pytest
import torch
import torch.nn.functional as F

from megarl.shims import fp16_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="nothing is replaced where there is a GPU"
)


@pytest.fixture(autouse=True)
def installed() -> None:
    fp16_on_cpu.install()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def test_products_are_rounded_once() -> None:
    """Forward and backward of a linear map, each result the nearest fp16 number to the
    FP32 sum.
    """
    x = numbers(3, 40, 256).requires_grad_()
    weight = numbers(64, 256, seed=1).requires_grad_()
    upstream = numbers(3, 40, 64, seed=2)
    found = F.linear(x, weight)
    found.backward(upstream)
    rows = x.detach().flatten(0, 1).float()
    of_rows = upstream.flatten(0, 1).float()
    assert torch.equal(found.flatten(0, 1), (rows @ weight.detach().float().T).half())
    assert x.grad is not None
    assert weight.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), (of_rows @ weight.detach().float()).half())
    assert torch.equal(weight.grad, (of_rows.T @ rows).half())


def test_other_types_are_left_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a = numbers(5, 7).to(dtype)
        b = numbers(7, 3, seed=1).to(dtype)
        assert (a @ b).dtype == dtype
        torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), atol=0.1, rtol=0.02)


def test_what_is_too_large_becomes_infinite() -> None:
    assert torch.isinf(torch.full((1, 4), 200.0).half() @ torch.full((4, 1), 200.0).half()).all()


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal: bool) -> None:
    found = []
    for dtype in (torch.float16, torch.float32):
        q, k, v = (numbers(2, 4, 33, 16, seed=i).to(dtype).requires_grad_() for i in range(3))
        mask = None if causal else torch.ones(33, 33, dtype=torch.bool).tril(5)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        found.append([out.detach(), *(t.grad for t in (q, k, v))])
    for half, full in zip(*found, strict=True):
        assert half is not None
        assert full is not None
        assert float((half.float() - full).norm() / full.norm()) <= 2e-3
