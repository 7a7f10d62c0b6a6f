"""Matrix products of a low precision whose sums stay in another, and megatron's weight gradients by them."""

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def product(a: Tensor, b: Tensor, precision: torch.dtype) -> Tensor:
    """Multiply a [m, k] by b [k, n], of one type, to `precision`: float32, or the type of both, to which sums are rounded."""
    if a.dtype == precision:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=precision)
    return a.to(precision) @ b.to(precision)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] times b [k, n], of one type, to `into` [m, n] float32."""
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))


def add_gradients_in_fp32() -> None:
    """Have megatron's own linear layers add weight gradients to FP32 sums by `add_product`, as Transformer Engine's do, instead
    of rounding each micro-batch's to the weight's type first. The extension that megatron asks for is one of NVIDIA Apex.
    """
    added = SimpleNamespace(wgrad_gemm_accum_fp32=lambda inputs, d, total: add_product(total, d.T, inputs))
    layers.fused_weight_gradient_mlp_cuda = added
    layers._grad_accum_fusion_available = True
