"""Products of bf16 numbers with FP32 sums on a CPU, by its matrix instructions where
it has them.

On a CPU torch has no product of bf16 inputs with an FP32 result, so the inputs are
converted to FP32. oneDNN may round the inputs of an FP32 product to bf16 and multiply
them by the CPU's bf16 matrix instructions (AMX), which sum in FP32. That rounding
changes nothing in numbers that were bf16 before: only the order of the sum differs, and
numbers below 1e-38 count as 0. Without these instructions oneDNN would imitate them
more slowly than FP32, so nothing is switched on there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch
from torch import Tensor

HEAD_COLUMNS = 4096
"""Columns of a head (rows of its weight) that are converted to FP32 at a time: they fit
into the CPU's cache.
"""

_one_at_a_time = RLock()


@cache
def has_instructions() -> bool:
    """Return whether oneDNN multiplies FP32 numbers as bf16 ones on this CPU.

    It does so with AMX only, not with AVX512-BF16 (brgemm_matmul.cpp asks for
    avx512_core_amx).
    """
    return bool(torch.cpu.get_capabilities().get("amx_bf16", False))


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply FP32 matrices whose numbers are all bf16 ones by the CPU's bf16
    instructions.

    The switch is the whole process's: threads take turns, and what it was before is
    restored, also after an error. A product of other FP32 numbers that another thread
    computes meanwhile would be rounded; no role of megarl has such a thread.
    """
    if not has_instructions():
        yield
        return
    with _one_at_a_time:
        previous = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = previous


def head_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the FP32 logits [n, V] of hidden [n, h] and a head's weight [V, h], both
    bf16. No FP32 copy of the whole weight is made, which for a small batch would take
    longer than the product.
    """
    hidden_fp32 = hidden.float()
    logits = hidden_fp32.new_empty(len(hidden), len(weight))
    with exact_products():
        for start in range(0, len(weight), HEAD_COLUMNS):
            part = slice(start, start + HEAD_COLUMNS)
            logits[:, part] = hidden_fp32 @ weight[part].float().T
    return logits
