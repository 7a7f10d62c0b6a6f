"""passes.py as Triton kernels: one pass over a chunk's memory where torch makes ten.

cuBLAS computes the chunk itself. A kernel that also computed the product would save
this pass, about a tenth of the product's time at 8B shapes by bytes and FLOP; it would
gain only if its product came that close to cuBLAS's speed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Columns that a program holds in registers at a time."""
WARPS = 8


def reduce(logits: Tensor, labels: Tensor, statistics: Tensor, temperature: float) -> None:
    """Do what passes.reduce does, with a program per row."""
    rows, columns = logits.shape
    shape = (columns, logits.stride(0), temperature)
    _reduce[(rows,)](logits, labels, *statistics, *shape, BLOCK=BLOCK, num_warps=WARPS)


def gradient(
    logits: Tensor,
    labels: Tensor,
    totals: Tensor,
    upstream: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Do what passes.gradient does, with a program per row and block of columns."""
    rows, columns = logits.shape
    d = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    shape = (columns, logits.stride(0), temperature)
    blocks = (rows, triton.cdiv(columns, BLOCK))
    _gradient[blocks](logits, d, labels, *totals, *upstream, *shape, BLOCK=BLOCK, num_warps=WARPS)
    return d


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    logits, labels, top, total, spread, label, columns, stride, temperature, BLOCK: tl.constexpr
):
    """Add a chunk's columns to the statistics of the program's row, in place
    (passes.reduce). All arguments up to `label` are pointers. stride: elements from one
    row of the logits to the next.
    """
    row = tl.program_id(0)
    y = tl.load(labels + row)
    highest = tl.load(top + row)
    sum_e = tl.load(total + row)
    sum_ez = tl.load(spread + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        shift = (highest - higher) / temperature
        z = tl.where(inside, (x - higher) / temperature, 0.0)
        e = tl.where(inside, tl.exp(z), 0.0)
        sum_ez = tl.exp(shift) * (sum_ez + shift * sum_e) + tl.sum(e * z, 0)
        sum_e = tl.exp(shift) * sum_e + tl.sum(e, 0)
        highest = higher
    tl.store(top + row, highest)
    tl.store(total + row, sum_e)
    tl.store(spread + row, sum_ez)
    if (y >= 0) & (y < columns):
        tl.store(label + row, tl.load(logits + row * stride + y).to(tl.float32))


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    gradient,
    labels,
    top,
    log_total,
    entropy,
    of_logprob,
    of_entropy,
    columns,
    stride,
    temperature,
    BLOCK: tl.constexpr,
):
    """Write the program's part of the gradient, BLOCK columns of a row
    (passes.gradient). All arguments up to `of_entropy` are pointers. of_logprob,
    of_entropy: the loss's gradients with respect to these. stride: elements from one
    row to the next, of logits and gradient.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    log_p = (x - tl.load(top + row)) / temperature - tl.load(log_total + row)
    is_label = tl.where(column == tl.load(labels + row), 1.0, 0.0)
    p = tl.exp(log_p)
    along_logprob = tl.load(of_logprob + row) * (is_label - p)
    along_entropy = tl.load(of_entropy + row) * p * (log_p + tl.load(entropy + row))
    d = (along_logprob - along_entropy) / temperature
    place = gradient + row * stride + column
    tl.store(place, d.to(gradient.dtype.element_ty), mask=inside)
