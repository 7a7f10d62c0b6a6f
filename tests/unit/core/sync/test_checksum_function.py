"""The checksum of weights: its formula written down a second time, that pieces add up
to the whole, and what it finds.
"""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.core.sync import checksum as sums
from megarl.core.sync.checksum import COLUMNS, LENGTH, checksum, checksum_on, written

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32]
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
sizes = st.one_of(
    st.integers(1, 40), st.integers(1, 3 * COLUMNS), st.just(COLUMNS), st.just(2 * COLUMNS + 1)
)
"""Bytes of a tensor, about."""


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def of_type(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Make tensors of any bits, also those of NaN:
    [elements], in about `size` bytes.
    """
    return random_bytes(max(1, size // dtype.itemsize) * dtype.itemsize, seed).view(dtype)


def value(tensor: Tensor, start: int = 0) -> int:
    return int(checksum(tensor, start))


def same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def by_definition(data: bytes) -> int:
    """In Python's integers."""
    numbers = np.frombuffer(data, "i1").tolist()
    columns, rows = (np.random.PCG64(seed).random_raw(COLUMNS) | np.uint64(1) for seed in (1, 2))
    weights = (int(columns[i % COLUMNS]) * int(rows[i // COLUMNS]) for i in range(len(numbers)))
    return (len(data) * LENGTH + sum(x * w for x, w in zip(numbers, weights, strict=True))) % 2**64


@pytest.mark.parametrize("size", [0, 1, 3, COLUMNS - 1, COLUMNS, COLUMNS + 1, 19 * COLUMNS + 6])
def test_it_is_the_sum_that_is_written_down(size: int) -> None:
    data = random_bytes(size, size)
    assert written(value(data)) == f"{by_definition(data.numpy().tobytes()):016x}"


def test_a_checksum_is_the_same_tomorrow() -> None:
    """Learner and server may have different releases of torch and numpy."""
    assert written(value(torch.arange(100_000, dtype=torch.int32))) == "83a4b4ba30fc5340"


@given(sizes, dtypes, seeds, st.randoms(use_true_random=False))
def test_pieces_of_any_size_add_up_in_any_order(
    size: int, dtype: torch.dtype, seed: int, random: Random
) -> None:
    whole = of_type(size, dtype, seed)
    cuts = sorted({0, len(whole), *(random.randint(0, len(whole)) for _ in range(4))})
    pieces = [(whole[a:b], a * dtype.itemsize) for a, b in itertools.pairwise(cuts)]
    random.shuffle(pieces)
    assert written(sum(value(piece, start) for piece, start in pieces)) == written(value(whole))


@given(sizes, dtypes, seeds, st.integers(1, 3), st.integers(0, 2**31))
def test_changed_bits_are_found(
    size: int, dtype: torch.dtype, seed: int, bits: int, where: int
) -> None:
    """One always; of two and three, none that was tried escaped."""
    tensor = of_type(size, dtype, seed)
    changed = tensor.clone().view(torch.uint8)
    for bit in {int(b) for b in np.random.default_rng(where).integers(0, 8 * len(changed), bits)}:
        changed[bit // 8] ^= 1 << bit % 8
    assert value(changed.view(dtype)) != value(tensor)


@given(st.integers(2, 3 * COLUMNS), seeds)
def test_two_values_that_changed_their_signs_are_found(values: int, seed: int) -> None:
    """The hardest change: of the highest bits of bytes, which in a product modulo 2^64
    the fewest others follow.
    """
    tensor = of_type(values * 4, torch.float32, seed)
    chosen = torch.from_numpy(np.random.default_rng(seed).permutation(values)[:2])
    changed = tensor.view(torch.int32).clone()
    changed[chosen] ^= -(2**31)
    assert value(changed) != value(tensor)


@given(st.integers(2, 64), st.integers(1, 700), dtypes, seeds)
def test_swapped_rows_are_found(rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    tensor = of_type(rows * width * dtype.itemsize, dtype, seed).view(rows, width)
    one, other = np.random.default_rng(seed).permutation(rows)[:2]
    swapped = tensor.clone()
    swapped[[one, other]] = tensor[[other, one]]
    assert (value(swapped) == value(tensor)) == same(tensor[one], tensor[other])


@given(
    st.integers(1, 2 * COLUMNS),
    dtypes,
    seeds,
    st.integers(0, 2 * COLUMNS),
    st.integers(1, 2 * COLUMNS),
)
def test_a_wrong_place_is_found(
    size: int, dtype: torch.dtype, seed: int, start: int, off: int
) -> None:
    tensor = of_type(size, dtype, seed)
    assert value(tensor, start + off) != value(tensor, start)


@given(sizes, dtypes, seeds, st.integers(1, COLUMNS))
def test_what_is_lost_or_repeated_is_found(
    size: int, dtype: torch.dtype, seed: int, part: int
) -> None:
    tensor = of_type(size, dtype, seed)
    part = part % len(tensor) + 1
    lost = tensor[:-part]
    repeated = torch.cat([tensor, tensor[-part:]])
    shifted = torch.cat([tensor[:part], tensor])[: len(tensor)]
    for other in (lost, tensor[part:], repeated, shifted):
        assert (value(other) == value(tensor)) == same(other, tensor)


@given(st.integers(0, 3 * COLUMNS), st.integers(1, COLUMNS))
def test_lost_zeros_are_found(size: int, lost: int) -> None:
    assert value(torch.zeros(size, dtype=torch.uint8)) != value(
        torch.zeros(size + lost, dtype=torch.uint8)
    )


@given(sizes, dtypes, seeds)
def test_only_the_bytes_count(size: int, dtype: torch.dtype, seed: int) -> None:
    """Neither the strides nor the place in memory, which may be any."""
    tensor = of_type(size, dtype, seed)
    inside = torch.cat([tensor[:1], tensor])[1:]
    spread = torch.stack([tensor, tensor], -1)[:, 0]
    assert value(tensor) == value(inside) == value(spread) == value(tensor.view(torch.uint8))


@pytest.mark.parametrize("size", [0, 7, 2 * COLUMNS, 5 * COLUMNS + 6])
def test_pieces_brought_to_a_device_add_up(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sums, "PIECE", 2 * COLUMNS)
    data = of_type(size, torch.bfloat16, 1) if size else torch.empty(0, dtype=torch.bfloat16)
    assert int(checksum_on(torch.device("cpu"), data)) == value(data)
    turned = of_type(6 * COLUMNS, torch.float32, 2).view(-1, 12).T
    assert int(checksum_on(torch.device("cpu"), turned)) == value(turned)
