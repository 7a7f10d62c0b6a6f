"""Which queries of this rank meet which keys of a packed row. Kernels are told this, in place of a mask.

    the row     |0 ──────── a sequence ──────── n|0 ────── the next ────── m|
    a segment         start ───── at ━━━━ to           queries [at, to) and keys [start, to), each query up to itself

A segment is a whole sequence, or the part of one in an attention chunk (layer_attention.py). Under context parallelism it is
one of the pieces this rank has, behind the keys before it: of a sequence's 2 CP pieces rank r has the r-th from either end.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """start, at, to [segments] int64: places in the row. Their queries, one segment after the other, are this rank's tokens."""

    start: Tensor
    at: Tensor
    to: Tensor

    @property
    def queries(self) -> Tensor:
        """[queries]: place of each in the row."""
        return ranges(self.at, self.to)

    @property
    def keys(self) -> Tensor:
        """[keys]: place of each in the row; under context parallelism there are some twice, and not all."""
        return ranges(self.start, self.to)


def segments(boundaries: Sequence[int], chunk: int | None = None, cp_size: int = 1, cp_rank: int = 0) -> Segments:
    """Of sequences [boundaries[i], boundaries[i+1]), with attention within multiples of `chunk`, on one rank of cp_size."""
    parts = []
    for start, end in itertools.pairwise(boundaries):
        within = chunk or max(end - start, 1)
        for at, to in _pieces(start, end, cp_size, cp_rank):
            for first in range(start + (at - start) // within * within, to, within):
                parts.append((first, max(at, first), min(to, first + within)))
    return Segments(*torch.tensor(parts, dtype=torch.int64).view(-1, 3).unbind(1))


def ranges(starts: Tensor, ends: Tensor) -> Tensor:
    """starts[0] … ends[0]-1, starts[1] … ends[1]-1, and so on."""
    lengths = ends - starts
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - before, lengths)


def _pieces(start: int, end: int, cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """[at, to) of those that this rank has of a sequence."""
    if end == start:
        return []
    if cp_size == 1:
        return [(start, end)]
    piece = (end - start) // (2 * cp_size)
    return [(start + p * piece, start + (p + 1) * piece) for p in (cp_rank, 2 * cp_size - 1 - cp_rank)]
