"""Pack a step's sequences into micro-batches for every data-parallel rank, balanced by
cost. Pure functions of lengths.

    lengths ─► as few rounds as longest-first filling needs ─► bins, filled by tokens or by cost, whichever trains faster
            ─► sorted by cost: each round has a similar micro-batch for every rank ─► the costliest to the least loaded rank

A sequence has a cost per token (matrices) and per pair of positions (attention), so
16,000 tokens in one sequence take longer than in eight. Ranks wait for each other once
per step if they only sum gradients, and in each micro-batch if they exchange tokens for
experts; rounds of similar micro-batches suit both.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.base.architecture import Architecture


@dataclass(frozen=True)
class Cost:
    """Cost of a sequence, in any unit."""

    token: float = 1.0  # per token
    pair: float = 0.0  # per pair of positions, in layers with full attention
    local_pair: float = (
        0.0  # per pair in layers that attend within chunks or, if `window` is not 0, windows
    )
    chunk: int = 1
    window: int = 0

    def of(self, tokens: int) -> float:
        whole, rest = divmod(tokens, self.chunk)
        local = whole * self.chunk**2 + rest**2
        if self.window:
            local = tokens**2 - max(tokens - self.window, 0) ** 2
        return self.token * tokens + (self.pair * tokens**2 + self.local_pair * local) / 2

    def attention(self, tokens: int) -> float:
        """Return the part that is not linear in tokens."""
        return self.of(tokens) - self.token * tokens


BY_TOKENS = Cost()

LAYER_PASSES = 3
HEAD_PASSES = 4
"""Cost of forward and backward in units of a forward pass: backward costs two, and the
head recomputes its logits.
"""


def cost_of(model: Architecture) -> Cost:
    """Return the cost of training in floating-point operations, in all layers and the
    head. A forward pass takes 2 for each parameter that a token is multiplied with and,
    per pair of positions, 2 for each element of a query and of a value (PaLM, arXiv
    2204.02311, appendix B).
    """
    pair = LAYER_PASSES * 2 * (model.query + model.attended)
    return Cost(
        token=LAYER_PASSES * 2 * model.body_parameters
        + HEAD_PASSES * 2 * model.embedding_parameters,
        pair=pair * (model.layers - model.local_layers),
        local_pair=pair * model.local_layers,
        chunk=model.attention_chunk or 1,
        window=model.window or 0,
    )


Packed = list[list[list[int]]]
"""[data-parallel rank][micro-batch][sequence index]"""


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    data_parallel: int,
    cost: Cost = BY_TOKENS,
    one_size: bool = False,
) -> Packed:
    """Pack sequences into micro-batches of at most `max_tokens` tokens, the same number
    for every rank. A longer sequence gets its own. Micro-batches, fewer than
    `data_parallel`, are empty only if sequences run out. one_size: all are padded to
    the fullest, because pipeline stages exchange tensors of one size; so a longer
    sequence makes room in all of them.
    """
    if one_size:
        max_tokens = max(max_tokens, max(lengths, default=0))
    order = sorted(
        range(len(lengths)), key=lambda i: -lengths[i]
    )  # stable: equal lengths stay in order
    alone = [[i] for i in order if lengths[i] > max_tokens]
    rest = order[len(alone) :]
    tokens = sum(lengths[i] for i in rest)
    rounds = -(-(len(alone) + -(-tokens // max_tokens)) // data_parallel)
    while (
        filled := _by_tokens(lengths, rest, rounds * data_parallel - len(alone), max_tokens)
    ) is None:
        rounds += 1
    costs = [cost.of(n) for n in lengths]
    # Micro-batches of one size differ only in the cost of attention.
    apart = [cost.attention(n) for n in lengths] if one_size else costs
    candidates = [_deal(alone + filled, apart, data_parallel)]
    if (
        cost != BY_TOKENS
        and (filled := _by_cost(lengths, rest, len(filled), max_tokens, costs)) is not None
    ):
        candidates.append(_deal(alone + filled, apart, data_parallel))
    return min(candidates, key=lambda packed: step_cost(packed, lengths, cost, one_size))


def sizes_to_try(longest: int, most: int) -> list[int]:
    """Return the sizes in tokens, ascending, that `learner.microbatch_tokens: auto`
    tries: a quarter and a half of the longest sequence, to extrapolate from; its
    length; then four sizes per doubling, up to `most` and 16 times its length.
    """
    more = {longest * quarter * 2**octave // 4 for octave in range(5) for quarter in (4, 5, 6, 7)}
    parts = {max(1, longest // 4), max(1, longest // 2), longest}
    return sorted(parts | {n for n in more if n <= min(most, 16 * longest)})


def step_cost(packed: Packed, lengths: Sequence[int], cost: Cost, one_size: bool = False) -> float:
    """Sum the cost of all rounds, each as long as its costliest micro-batch."""
    fullest = max((sum(lengths[i] for i in m) for rank in packed for m in rank), default=0)

    def load(microbatch: list[int]) -> float:
        if one_size:
            return cost.token * fullest + sum(cost.attention(lengths[i]) for i in microbatch)
        return sum(cost.of(lengths[i]) for i in microbatch)

    return sum(max(map(load, microbatches)) for microbatches in zip(*packed, strict=True))


def _by_tokens(
    lengths: Sequence[int], order: list[int], bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each sequence, in this order, into the bin with the fewest tokens; return
    None if one does not fit.
    """
    contents: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, b) for b in range(bins)]
    for i in order:
        load, b = loads[0]
        if load + lengths[i] > max_tokens:
            return None
        heapq.heapreplace(loads, (load + lengths[i], b))
        contents[b].append(i)
    return contents


def _by_cost(
    lengths: Sequence[int], order: list[int], bins: int, max_tokens: int, costs: Sequence[float]
) -> list[list[int]] | None:
    """Put each sequence, in this order, into the cheapest bin that has room; return
    None if one fits nowhere.
    """
    contents: list[list[int]] = [[] for _ in range(bins)]
    tokens = np.zeros(bins, np.int64)
    so_far = np.zeros(bins)
    for i in order:
        possible = np.where(tokens + lengths[i] <= max_tokens, so_far, np.inf)
        b = int(possible.argmin())
        if possible[b] == np.inf:
            return None
        tokens[b] += lengths[i]
        so_far[b] += costs[i]
        contents[b].append(i)
    return contents


def _deal(microbatches: list[list[int]], costs: Sequence[float], data_parallel: int) -> Packed:
    """Give all ranks micro-batches of similar cost in each round, the costliest to the
    rank with the least cost so far.
    """
    loaded = sorted(
        ((sum(costs[i] for i in m), m) for m in microbatches), key=lambda pair: -pair[0]
    )
    ranks: Packed = [[] for _ in range(data_parallel)]
    totals = [0.0] * data_parallel
    for start in range(0, len(loaded), data_parallel):
        hungriest_first = sorted(range(data_parallel), key=lambda r: totals[r])
        for rank, (load, microbatch) in zip(
            hungriest_first, loaded[start : start + data_parallel], strict=True
        ):
            ranks[rank].append(microbatch)
            totals[rank] += load
    return ranks
