"""The gated delta rule and the causal convolution before it, over a packed row: nothing
crosses from one sequence to the next.

    state [key, value] of each head and sequence, at first 0; for each token in turn
        state ← exp(g) state                          it decays, g <= 0
        state ← state + beta k (v - kᵀ state)ᵀ        what k stands for moves towards v
        output = qᵀ state

(arXiv 2412.06464.) Token by token this would be one small product after another. The
same numbers come from chunks of 64 tokens: within a chunk, one triangular system gives
what its tokens write; between chunks, the state is carried. Each sequence has chunks of
its own, the last one shorter. The chunks with the same number in their sequences are
computed together, so a step handles all sequences that are long enough, the longest
first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.core.base.delta_layers import CHUNK
from megarl.core.models.attention import positions_of


class Chunks(NamedTuple):
    """The chunks of a packed row, first those with number 0 in their sequences."""

    tokens: Tensor  # [chunks, CHUNK] int64: position in the row, 0 where there is none
    is_token: Tensor  # [chunks, CHUNK] bool
    steps: tuple[int, ...]  # number of chunks in each step; never rises
    positions: Tensor  # [tokens of the row] int64: each one's place in its sequence
    boundaries: Tensor  # [sequences + 1] int64: where each begins, and the row's end


def chunks_of(boundaries: Sequence[int], device: torch.device) -> Chunks:
    """Return the chunks of sequences [boundaries[i], boundaries[i+1])."""
    ends = torch.tensor(boundaries)
    lengths, order = ends.diff().sort(descending=True, stable=True)
    starts = ends[:-1][order]
    places = torch.arange(CHUNK)
    tokens = []
    is_token = []
    steps = []
    for first in range(0, int(lengths[0]), CHUNK):
        count = int((lengths > first).sum())
        in_sequence = first + places
        exists = in_sequence < lengths[:count, None]
        tokens.append((starts[:count, None] + in_sequence) * exists)
        is_token.append(exists)
        steps.append(count)
    return Chunks(
        tokens=torch.cat(tokens).to(device),
        is_token=torch.cat(is_token).to(device),
        steps=tuple(steps),
        positions=positions_of(boundaries).to(device),
        boundaries=ends.to(device),
    )


def convolve(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return for each token the weighted sum of its own and the tokens before it in its
    sequence, in float32. x [tokens, channels]; weight [channels, taps], the own token's
    last; positions [tokens], of each in its sequence.
    """
    x = x.float()
    last_tap, *earlier_taps = weight.float().unbind(-1)[::-1]
    total = x * last_tap
    for back, tap in enumerate(earlier_taps, 1):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        is_same_sequence = (positions >= back)[:, None]
        total = total + torch.where(is_same_sequence, shifted, 0.0) * tap
    return total


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Tensor:
    """Return the outputs [tokens, heads, value]. q, k [tokens, heads, key]; v [tokens,
    heads, value]; g, beta [tokens, heads]; all float32. The caller has scaled q.
    """
    is_token = chunks.is_token[:, None, :]  # [chunks, 1, CHUNK]

    def in_chunks(x: Tensor) -> Tensor:
        """Return x of each chunk's tokens [chunks, heads, CHUNK, …]. Where there is no
        token it is 0: nothing is written, and nothing decays.
        """
        x = x[chunks.tokens].transpose(1, 2)
        return torch.where(is_token if x.dim() == 3 else is_token[..., None], x, 0.0)

    q, k, v, g, beta = (in_chunks(x) for x in (q, k, v, g, beta))
    outputs = _carried(_within_chunks(q, k, v, g, beta), chunks.steps)
    by_token = outputs.transpose(1, 2)[chunks.is_token]
    row = by_token.new_zeros(len(chunks.positions), *by_token.shape[1:])
    return row.index_put((chunks.tokens[chunks.is_token],), by_token)


class _WithinChunks(NamedTuple):
    """What chunks [chunks, heads, CHUNK, …] contribute, whatever the state before them
    is. A token writes `values - reads state`.
    """

    values: Tensor  # [.., value]
    reads: Tensor  # [.., key]
    queries: Tensor  # [.., key]: q, as it meets the state before the chunk
    scores: Tensor  # [.., CHUNK]: of q with k of the chunk's tokens
    keys: Tensor  # [.., key]: k, as it is in the state after the chunk
    share: Tensor  # [chunks, heads, 1, 1]: of the state before the chunk, left after it


def _within_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _WithinChunks:
    """Return what follows from each chunk alone. q, k, v [chunks, heads, CHUNK, …]; g,
    beta [chunks, heads, CHUNK]
    """
    decay = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = decay[..., :, None] - decay[..., None, :]
    between = between.masked_fill(later, -torch.inf).exp()
    since_start = decay.exp()[..., None]
    to_end = (decay[..., -1:] - decay).exp()[..., None]
    # What a token writes depends on what the earlier ones of its chunk have written.
    weighted_k = k * beta[..., None]
    system = (weighted_k @ k.mT) * between
    sides = torch.cat([v * beta[..., None], weighted_k * since_start], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _WithinChunks(
        values=values,
        reads=reads,
        queries=q * since_start,
        scores=(q @ k.mT) * between,
        keys=k * to_end,
        share=since_start[..., -1:, :],
    )


def _carried(parts: _WithinChunks, steps: Sequence[int]) -> Tensor:
    """Return the outputs [chunks, heads, CHUNK, value], with each sequence's state
    carried from chunk to chunk. steps: number of chunks in each.
    """
    divided = (part.split(list(steps)) for part in parts)
    outputs: list[Tensor] = []
    state = parts.values.new_zeros(())
    for step in zip(*divided, strict=True):
        values, reads, queries, scores, keys, share = step
        if not outputs:
            state = values.new_zeros(*values.shape[:2], reads.shape[-1], values.shape[-1])
        state = state[: len(values)]
        written = values - reads @ state
        outputs.append(queries @ state + scores @ written)
        state = state * share + keys.mT @ written
    return torch.cat(outputs)
