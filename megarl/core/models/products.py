"""Matrix products of low-precision inputs that accumulate in a higher precision, and
megatron's weight gradients by them.
"""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.nn import Module

from megarl.shims import bf16_on_cpu


def product(a: Tensor, b: Tensor, precision: torch.dtype) -> Tensor:
    """Multiply a [m, k] by b [k, n], of one type. precision: of the result; float32, or
    the inputs' type.
    """
    if a.dtype == precision:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=precision)
    with _sums_of_exact_products(a.dtype):
        return a.to(precision) @ b.to(precision)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [m, k] times b [k, n], of one type, to `into` [m, n] float32."""
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        with _sums_of_exact_products(a.dtype):
            into.addmm_(a.to(into.dtype), b.to(into.dtype))


def _sums_of_exact_products(inputs: torch.dtype) -> AbstractContextManager[None]:
    """On a CPU, let FP32 copies of bf16 numbers be multiplied by its bf16 instructions,
    which would round those of fp16.
    """
    if inputs == torch.bfloat16:
        return bf16_on_cpu.exact_products()
    return nullcontext()


def add_gradients_in_fp32(chunk: Module) -> None:
    """Make linear layers add weight gradients to DDP's FP32 sums, without rounding each
    micro-batch's to the weight's type (benchmarks/gradients.py has the cost).
    Transformer Engine's can; for megatron's own this replaces NVIDIA Apex.
    """

    def accumulate(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        add_product(total, gradient.T, inputs)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    flags = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")  # megatron's, TE's
    for module in chunk.modules():
        for flag in flags:
            if hasattr(module, flag):
                setattr(module, flag, True)
