"""What a layer's attention does besides causal softmax attention, and the arithmetic of it. Llama 4 has all of it:

    three layers of four     rotate ─► L2 norm of q and k ─► attention within chunks of 8192 positions
    every fourth             no rotation ─► q times a temperature that grows with the position ─► attention to all before

Queries and keys are rotated at their true positions before they meet, so attention within chunks is plain causal attention
over shorter sequences: the boundaries of a packed row are divided further at multiples of the chunk (`within_chunks`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerAttention:
    """rotary: rotate q and k. chunk: positions see those of their own chunk only; None: all before. l2_epsilon: normalise q and
    k after rotation; None: do not. temperature: (floor, scale), see `temperatures`; None: 1."""

    rotary: bool = True
    chunk: int | None = None
    l2_epsilon: float | None = None
    temperature: tuple[int, float] | None = None


def within_chunks(boundaries: Sequence[int], chunk: int) -> list[int]:
    """Boundaries of the parts of sequences [boundaries[i], boundaries[i+1]) that are `chunk` long, the last of each shorter."""
    parts = [at for a, b in itertools.pairwise(boundaries) for at in range(a, b, chunk)]
    return [*parts, boundaries[-1]]


def positions_of(boundaries: Sequence[int]) -> Tensor:
    """0 … n-1 for each sequence of n tokens, end to end."""
    starts = torch.tensor(boundaries[:-1])
    lengths = torch.tensor(boundaries).diff()
    return torch.arange(int(lengths.sum())) + boundaries[0] - torch.repeat_interleave(starts, lengths)


def l2_norm(x: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32 (as transformers' Llama4TextL2Norm)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def temperatures(positions: Tensor, floor: int, scale: float) -> Tensor:
    """1 + scale * log(1 + floor((position + 1) / floor)) float32: 1 for the first floor - 1 positions (arXiv 2501.19399)."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0
