"""Attention of a packed row by a mask over all of it, in float64: what the kernels must
agree with.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.core.models.attention import segments


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: Sequence[int],
    chunk: int | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[tokens, heads, head_dim] in and out. sinks [heads]: a column of scores that is
    left out of the sum, as in transformers' modeling_gpt_oss.py.
    """
    sequence = torch.repeat_interleave(torch.tensor(boundaries).diff())
    place = torch.arange(len(q))
    position = place - torch.tensor(boundaries)[sequence]
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    if chunk:
        seen &= (position // chunk)[:, None] == position // chunk
    if window:
        seen &= place[:, None] - place < window
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5).masked_fill(
        ~seen, -torch.inf
    )
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def row(
    boundaries: Sequence[int], heads: int, groups: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """Random queries, keys, values and upstream gradient of a row."""
    random = torch.Generator().manual_seed(0)
    shapes = [(boundaries[-1], n, head_dim) for n in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def values_and_gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output, and the gradients of q, k and v, and of sinks if they come after the
    upstream gradient, on the CPU in float64.
    """
    inputs = [t.detach().clone().requires_grad_() for t in (*tensors[:3], *tensors[4:])]
    out = attend(*inputs)
    out.backward(tensors[3])
    return [t.detach().double().cpu() for t in (out, *(t.grad for t in inputs))]


def exact(
    tensors: Sequence[Tensor],
    boundaries: Sequence[int],
    chunk: int | None = None,
    window: int | None = None,
) -> list[Tensor]:
    """`values_and_gradients` of the dense way."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return dense(q, k, v, boundaries, chunk, window, sinks)

    return values_and_gradients(attend, [t.double().cpu() for t in tensors])


def on_ranks(
    ranks: Sequence[Callable[..., Tensor]], boundaries: Sequence[int]
) -> Callable[..., Tensor]:
    """Attention of the whole row by context-parallel ranks, each its part, one after
    the other.
    """

    def whole(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        mine = [
            segments(boundaries, None, len(ranks), rank).queries.to(q.device)
            for rank in range(len(ranks))
        ]
        gathered = torch.cat(mine)
        k = k[gathered]
        v = v[gathered]
        outputs = [
            attend(q[places], k, v, None, *sinks)
            for attend, places in zip(ranks, mine, strict=True)
        ]
        return torch.cat(outputs)[torch.argsort(gathered)]

    return whole


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of each kind of tensor being 1. One that is 0 but for roundings, as a
    lone token's gradients are, is measured as if its largest were .01.
    """
    return max(
        (a - b).abs().max().item() / max(b.abs().max().item(), 1e-2)
        for a, b in itertools.zip_longest(found, expected)
    )
