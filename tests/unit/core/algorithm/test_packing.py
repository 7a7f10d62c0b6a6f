"""Sequences into micro-batches: every one once, balanced, as few as longest-first
filling finds.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.algorithm.packing import BY_TOKENS, Cost, pack, step_cost

LENGTHS = st.lists(st.integers(1, 150), max_size=60)
COSTS = st.builds(
    Cost, st.floats(0.5, 2), st.floats(0, 0.1), st.floats(0, 0.1), st.integers(1, 100)
)


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    max_tokens=st.integers(1, 200),
    ranks=st.integers(1, 5),
    cost=COSTS,
    one_size=st.booleans(),
)
def test_packing(
    lengths: list[int], max_tokens: int, ranks: int, cost: Cost, one_size: bool
) -> None:
    packed = pack(lengths, max_tokens, ranks, cost, one_size)
    assert packed == pack(lengths, max_tokens, ranks, cost, one_size)
    if one_size:  # what all are padded to, all may be filled to
        max_tokens = max(max_tokens, max(lengths, default=0))
    assert len(packed) == ranks
    assert len({len(rank) for rank in packed}) == 1
    microbatches = [m for rank in packed for m in rank]
    assert sorted(i for m in microbatches for i in m) == list(range(len(lengths)))
    fitting = [m for m in microbatches if all(lengths[i] <= max_tokens for i in m)]
    assert all(sum(lengths[i] for i in m) <= max_tokens for m in fitting)
    assert all(len(m) == 1 for m in microbatches if m not in fitting)
    assert sum(1 for m in microbatches if not m) < ranks
    # no two micro-batches would fit into one: at most twice as many as must be, and
    # those that fill the round
    tokens = sum(lengths[i] for m in fitting for i in m)
    fewest = len(microbatches) - len(fitting) + math.ceil(tokens / max_tokens)
    assert len(microbatches) <= 2 * fewest + ranks
    by_tokens = pack(lengths, max_tokens, ranks, BY_TOKENS, one_size)
    assert len(packed[0]) == len(by_tokens[0])


def costs_of(packed: Any, lengths: list[int], cost: Cost) -> list[list[float]]:
    return [[sum(cost.of(lengths[i]) for i in m) for m in rank] for rank in packed]


@settings(deadline=None)
@given(
    lengths=LENGTHS.filter(bool),
    max_tokens=st.integers(1, 200),
    ranks=st.integers(1, 5),
    cost=COSTS,
)
def test_ranks_and_rounds_are_balanced_by_cost(
    lengths: list[int], max_tokens: int, ranks: int, cost: Cost
) -> None:
    packed = costs_of(pack(lengths, max_tokens, ranks, cost), lengths, cost)
    rounds = list(zip(*packed, strict=True))
    assert all(min(one) >= max(after) - 1e-9 for one, after in itertools.pairwise(rounds)), (
        "not alike"
    )
    costliest = max(max(one) for one in rounds)
    totals = [sum(rank) for rank in packed]
    assert max(totals) - min(totals) <= costliest + 1e-9
    # ranks that wait for each other in every round lose no more than one micro-batch in
    # all
    assert (
        step_cost(pack(lengths, max_tokens, ranks, cost), lengths, cost)
        <= np.mean(totals) + costliest + 1e-9
    )


@given(lengths=LENGTHS, max_tokens=st.integers(150, 300), ranks=st.integers(1, 5))
def test_by_tokens_no_two_micro_batches_differ_by_more_than_the_longest_sequence(
    lengths: list[int], max_tokens: int, ranks: int
) -> None:
    loads = [
        load
        for rank in costs_of(pack(lengths, max_tokens, ranks), lengths, BY_TOKENS)
        for load in rank
    ]
    assert not loads or max(loads) - min(loads) <= max(lengths)


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
def test_loss_does_not_depend_on_packing(lengths: list[int], ranks: int) -> None:
    values = np.random.default_rng(1).normal(size=len(lengths))
    whole = math.fsum(values)
    packed = pack(lengths, 64, ranks, Cost(pair=0.1))
    parts = [sum(values[i] for m in rank for i in m) for rank in packed]
    assert math.fsum(parts) == pytest.approx(whole, abs=1e-9)


def test_attention_weighs_where_lengths_differ() -> None:
    """One of 300 tokens costs as much as 40 of 40: as many tokens on both ranks would
    be a third more work for its rank.
    """
    lengths = [300] + [10] * 30 + [40] * 60
    cost = Cost(pair=0.1)
    by_cost, by_tokens = (
        [sum(rank) for rank in costs_of(pack(lengths, 4000, 2, c), lengths, cost)]
        for c in (cost, BY_TOKENS)
    )
    assert max(by_cost) / np.mean(by_cost) < 1.02
    assert max(by_tokens) / np.mean(by_tokens) > 1.3


def test_where_all_have_the_longest_sequences_size_they_are_filled_to_it() -> None:
    """Stages would pass on 21 micro-batches of 1,000 tokens,
    20 of them mostly filler.
    """
    lengths = [1000] + [100] * 40
    assert len(pack(lengths, 200, 1, one_size=True)[0]) == 5
    assert len(pack(lengths, 200, 1)[0]) == 21


@settings(deadline=None)
@given(tokens=st.integers(1, 100), chunk=st.integers(1, 40))
def test_cost_is_half_of_the_pairs_of_positions(tokens: int, chunk: int) -> None:
    """Counted one by one: each position and those before it in its chunk, half of one
    for itself.
    """
    position = np.arange(tokens)
    before = position[None, :] < position[:, None]
    near = before & (position[None, :] // chunk == position[:, None] // chunk)
    assert Cost(0.0, 1.0).of(tokens) == before.sum() + tokens / 2
    assert Cost(0.0, 0.0, 1.0, chunk).of(tokens) == near.sum() + tokens / 2
    assert Cost(2.0, 1.0).of(tokens) - Cost(2.0, 1.0).attention(tokens) == 2 * tokens


@settings(deadline=None)
@given(
    lengths=LENGTHS.filter(bool),
    max_tokens=st.integers(150, 300),
    ranks=st.integers(1, 5),
    cost=COSTS,
)
def test_never_slower_than_filled_by_tokens(
    lengths: list[int], max_tokens: int, ranks: int, cost: Cost
) -> None:
    """Where stages pass on one size, too: dealt by attention, either filling."""
    for one_size in (False, True):
        by_tokens = pack(lengths, max_tokens, ranks, BY_TOKENS)
        ours = step_cost(pack(lengths, max_tokens, ranks, cost, one_size), lengths, cost, one_size)
        assert ours <= step_cost(by_tokens, lengths, cost, one_size) * (1 + 1e-9)
