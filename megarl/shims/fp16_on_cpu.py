"""fp16 matrix products and attention on a CPU, for learner and server; with a GPU, this
module does nothing.

A CPU without fp16 units computes them 5 to 20 times slower than FP32. A product of two
fp16 numbers is exact in FP32, so converting both factors to FP32, multiplying, and
rounding the sums to fp16 once gives the result of a tensor core, up to the order of the
sum. Attention is computed in FP32 as a whole: its probabilities stay FP32; a GPU's
kernels round them to fp16 for the second product. Everything else (norms, activations,
sums of micro-batches, communication) is torch's own fp16.
"""

from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

_library: torch.library.Library | None = None


def install() -> None:
    """Replace torch's CPU kernels of these operations in this process. Idempotent."""
    global _library
    if _library is not None or torch.cuda.is_available():
        return
    _library = torch.library.Library("aten", "IMPL")
    for name in (*PRODUCTS, ATTENTION, f"{ATTENTION}_backward"):
        _library.impl(name, _in_fp32(name), "CPU", with_keyset=True, allow_override=True)


def _in_fp32(name: str) -> Callable[..., object]:
    """Wrap torch's kernel so that fp16 tensors are converted to FP32, and its results
    rounded to fp16.
    """
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keys: object, *args: object, **options: object) -> object:
        """Run the kernel, in FP32 if any argument is an fp16 tensor. keys: the
        dispatcher's, which the kernel needs.
        """
        if not any(map(_is_fp16, args)):
            return kernel.call_boxed(keys, *args, **options)
        fp32_options = {key: _converted(value) for key, value in options.items()}
        result = kernel.call_boxed(keys, *map(_converted, args), **fp32_options)
        if isinstance(result, Tensor):
            return result.half()
        if name == ATTENTION:
            # The log-sum-exp, which the backward pass gets again, is FP32 in torch's
            # kernel, too.
            output, logsumexp = result
            return output.half(), logsumexp
        return tuple(gradient.half() for gradient in result)

    return call


def _is_fp16(value: object) -> TypeGuard[Tensor]:
    """Return whether an argument is an fp16 tensor."""
    return isinstance(value, Tensor) and value.dtype == torch.float16


def _converted(value: object) -> object:
    """Return an argument in FP32 if it is an fp16 tensor, else as it is."""
    return value.float() if _is_fp16(value) else value
