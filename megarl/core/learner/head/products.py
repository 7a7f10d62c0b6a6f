"""Matrix products with FP32 results.

A product of two bf16 numbers is exact in FP32. So a tensor core that takes bf16 and sums in FP32 gives the FP32 product of the
same numbers, up to the order of the sum, at the speed of bf16. SGLang's FP32 head on a GPU is the same product.
"""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, precision: torch.dtype) -> Tensor:
    """a [m, k] times b [k, n], of one type, to `precision`: float32, or the type of both, to which the sums are rounded."""
    if a.dtype == precision:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=precision)
    return a.to(precision) @ b.to(precision)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into [m, n] float32 += a [m, k] times b [k, n], of one type."""
    if a.dtype == into.dtype:
        into.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(a.to(into.dtype), b.to(into.dtype))
