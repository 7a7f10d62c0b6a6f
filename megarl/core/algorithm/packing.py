"""Pack a step's sequences into micro-batches for every data-parallel rank, balanced by
cost. Pure functions of lengths.

    lengths ─► as few rounds as longest-first filling needs
            ─► bins, filled by tokens or by cost, whichever trains faster
            ─► sorted by cost: each round has a similar micro-batch for every rank
            ─► the costliest to the least loaded rank

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
    # Per pair in layers that attend within chunks or, if `window` is not 0, windows.
    local_pair: float = 0.0
    chunk: int = 1
    window: int = 0

    def of(self, tokens: int) -> float:
        """Return the cost of a sequence of so many tokens. A token attends to those
        before it, so a sequence has half as many pairs as the square of its length; in
        a window, less those that are farther apart.
        """
        if self.window:
            local_square = tokens**2 - max(tokens - self.window, 0) ** 2
        else:
            full_chunks, remainder = divmod(tokens, self.chunk)
            local_square = full_chunks * self.chunk**2 + remainder**2
        of_squares = self.pair * tokens**2 + self.local_pair * local_square
        return self.token * tokens + of_squares / 2

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
    2204.02311, appendix B). Delta networks cost the same for each token.
    """
    pair = LAYER_PASSES * 2 * (model.query + model.attended)
    layers = LAYER_PASSES * 2 * model.body_parameters
    if model.delta:
        layers += LAYER_PASSES * len(model.delta_layers) * model.delta.rule_flops
    head = HEAD_PASSES * 2 * model.embedding_parameters
    return Cost(
        token=layers + head,
        pair=pair * (model.attention_layers - model.local_layers),
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
    for every rank. A longer sequence gets its own. If sequences run out, fewer than
    `data_parallel` micro-batches are empty. one_size: all are padded to the fullest,
    because pipeline stages exchange tensors of one size; so a longer sequence makes
    room in all of them.
    """
    if one_size:
        max_tokens = max(max_tokens, max(lengths, default=0))
    # Stable: equal lengths stay in order.
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    oversized = [[i] for i in longest_first if lengths[i] > max_tokens]
    others = longest_first[len(oversized) :]
    filled = _fewest_bins(lengths, others, max_tokens, len(oversized), data_parallel)
    costs = [cost.of(n) for n in lengths]
    differing_costs = costs
    if one_size:  # micro-batches of one size differ only in the cost of attention
        differing_costs = [cost.attention(n) for n in lengths]
    by_tokens = _deal(oversized + filled, differing_costs, data_parallel)
    if cost == BY_TOKENS:
        return by_tokens
    filled_by_cost = _by_cost(lengths, others, len(filled), max_tokens, costs)
    if filled_by_cost is None:
        return by_tokens
    by_cost = _deal(oversized + filled_by_cost, differing_costs, data_parallel)
    return min(by_tokens, by_cost, key=lambda packed: step_cost(packed, lengths, cost, one_size))


def _fewest_bins(
    lengths: Sequence[int], order: list[int], max_tokens: int, oversized: int, data_parallel: int
) -> list[list[int]]:
    """Return as few bins as the sequences need, so that with the `oversized` ones every
    rank has the same number.
    """
    tokens = sum(lengths[i] for i in order)
    bins_needed = oversized + _ceiling(tokens, max_tokens)
    rounds = _ceiling(bins_needed, data_parallel)
    while True:
        filled = _by_tokens(lengths, order, rounds * data_parallel - oversized, max_tokens)
        if filled is not None:
            return filled
        rounds += 1


def sizes_to_try(longest: int, limit: int) -> list[int]:
    """Return the sizes in tokens, ascending, that `learner.microbatch_tokens: auto`
    tries: a quarter and a half of the longest sequence, to extrapolate from; its
    length; then four sizes per doubling, up to `limit` and 16 times its length.
    """
    sizes = {max(1, longest // 4), max(1, longest // 2), longest}
    limit = min(limit, 16 * longest)
    for octave in range(5):
        for quarters in (4, 5, 6, 7):
            size = longest * quarters * 2**octave // 4
            if size <= limit:
                sizes.add(size)
    return sorted(sizes)


def step_cost(packed: Packed, lengths: Sequence[int], cost: Cost, one_size: bool = False) -> float:
    """Sum the cost of all rounds, each as long as its costliest micro-batch."""
    fullest = 0
    for microbatches in packed:
        for members in microbatches:
            fullest = max(fullest, sum(lengths[i] for i in members))

    def load(members: list[int]) -> float:
        """Return the cost of a micro-batch, with its padding to the fullest."""
        if one_size:
            attention = sum(cost.attention(lengths[i]) for i in members)
            return cost.token * fullest + attention
        return sum(cost.of(lengths[i]) for i in members)

    return sum(max(map(load, microbatches)) for microbatches in zip(*packed, strict=True))


def _by_tokens(
    lengths: Sequence[int], order: list[int], bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each sequence, in this order, into the bin with the fewest tokens; return
    None if one does not fit.
    """
    contents: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, b) for b in range(bins)]  # a heap of tokens and bins
    for i in order:
        tokens, b = loads[0]
        tokens += lengths[i]
        if tokens > max_tokens:
            return None
        heapq.heapreplace(loads, (tokens, b))
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
    loads = np.zeros(bins)
    for i in order:
        possible_loads = np.where(tokens + lengths[i] <= max_tokens, loads, np.inf)
        b = int(possible_loads.argmin())
        if possible_loads[b] == np.inf:
            return None
        tokens[b] += lengths[i]
        loads[b] += costs[i]
        contents[b].append(i)
    return contents


def _deal(microbatches: list[list[int]], costs: Sequence[float], data_parallel: int) -> Packed:
    """Give all ranks micro-batches of similar cost in each round, the costliest to the
    rank with the least cost so far.
    """
    loads: list[float] = []
    for members in microbatches:
        loads.append(sum(costs[i] for i in members))
    costliest_first = sorted(range(len(microbatches)), key=lambda m: -loads[m])
    ranks: Packed = [[] for _ in range(data_parallel)]
    totals = [0.0] * data_parallel
    for start in range(0, len(costliest_first), data_parallel):
        dealt = costliest_first[start : start + data_parallel]
        least_loaded_first = sorted(range(data_parallel), key=lambda rank: totals[rank])
        for rank, m in zip(least_loaded_first, dealt, strict=True):
            ranks[rank].append(microbatches[m])
            totals[rank] += loads[m]
    return ranks


def _ceiling(n: int, divisor: int) -> int:
    """Return n / divisor, rounded up."""
    return -(-n // divisor)
