"""Deltas: whatever the bits, old + delta = new; what is damaged is refused; and they
are as small as counting says.
"""

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.core.sync import delta
from megarl.core.sync.delta import DTYPES, INTEGERS, LARGE, SUFFIX, add, decode, encode, load

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 9), max_size=3) | st.tuples(st.integers(0, 5000))
shares = st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0])


def random_bits(shape: list[int], dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """Any bits, also those of NaN."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=draw, dtype=torch.uint8)
    return raw.view(-1).view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def given_back(old: Tensor, new: Tensor) -> Tensor:
    held = old.clone()
    add(held, decode(encode(old, new)))
    return held


@given(shapes, dtypes, shares, seeds)
def test_old_and_delta_are_new(
    shape: list[int], dtype: torch.dtype, share: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = random_bits(shape, dtype, draw)
    other = random_bits(shape, dtype, draw)
    new = torch.where(torch.rand(other.shape, generator=draw) < share, other, old)
    assert torch.equal(bits(given_back(old, new)), bits(new))


@given(dtypes, st.integers(1, 400), st.integers(-3, 3), seeds)
def test_small_changes(dtype: torch.dtype, size: int, by: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(size, generator=draw).to(dtype)
    kind = INTEGERS[dtype.itemsize]
    new = (old.view(kind) + (by * (torch.rand(size, generator=draw) < 0.1)).to(kind)).view(dtype)
    assert torch.equal(bits(given_back(old, new)), bits(new))


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.itemsize > 1]
)  # FP8 has no infinity, and one NaN
def test_numbers_that_are_not(dtype: torch.dtype) -> None:
    kind = INTEGERS[dtype.itemsize]
    infinite = torch.tensor(math.inf, dtype=dtype).view(kind)
    payloads = (infinite + torch.tensor([0, 1, 2, 77], dtype=kind)).view(dtype)
    assert payloads[1:].isnan().all()
    old = torch.cat([torch.tensor([0.0, -0.0, 1.0, math.nan], dtype=dtype), payloads])
    new = torch.cat([torch.tensor([-0.0, 0.0, math.nan, 1.0], dtype=dtype), payloads.flip(0)])
    assert torch.equal(bits(given_back(old, new)), bits(new))
    assert torch.equal(bits(given_back(new, old)), bits(old))
    assert not decode(encode(new, new)).view(kind).any()


@pytest.mark.parametrize(
    "gap", [LARGE - 2, LARGE - 1, LARGE, LARGE + 1, 2 * LARGE - 1, 2 * LARGE, 70_000]
)
@pytest.mark.parametrize("by", [-128, -127, 126, 127, 128, 129, 32_767, -32_768])
def test_numbers_about_a_byte(gap: int, by: int) -> None:
    old = torch.zeros(3 * gap + 5, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[gap :: gap + 1] = by
    assert torch.equal(bits(given_back(old, new)), bits(new))


@given(st.integers(0, 100), st.integers(0, 3), seeds)
def test_pieces_of_a_long_tensor(size: int, share: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    old, other = (random_bits([size], torch.bfloat16, draw) for _ in "ab")
    new = torch.where(torch.rand(size, generator=draw) < share / 3, other, old)
    with pytest.MonkeyPatch.context() as patch:
        whole = encode(old, new)
        patch.setattr(delta, "PIECE", 16)
        assert torch.equal(encode(old, new), whole)


def test_views_at_any_place() -> None:
    memory = torch.arange(1000).short().view(torch.bfloat16)
    old = memory[1:801].view(20, 40)
    new = memory[3:803].view(40, 20).T
    assert torch.equal(bits(given_back(old, new)), bits(new))


def test_parts_and_turned_ones() -> None:
    """A difference is loaded like the tensor itself: slices and transposes of it change
    the same slices and transposes.
    """
    draw = torch.Generator().manual_seed(0)
    old, new = (random_bits([6, 10], torch.bfloat16, draw) for _ in "ab")
    difference = decode(encode(old, new))
    held = old.T.contiguous()
    add(held[:, 2:5], difference.T[:, 2:5])
    assert torch.equal(bits(held[:, 2:5]), bits(new.T[:, 2:5]))
    assert torch.equal(bits(held[:, :2]), bits(old.T[:, :2]))


class Fused(Module):
    """Holds two tensors one after the other, turned, as a rank of two: the second half
    of each one's rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.both = Parameter(torch.zeros(5, 12, dtype=torch.bfloat16), requires_grad=False)
        self.scratch = torch.ones(3)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.scratch.copy_(torch.full((3,), 7.0))  # no parameter
            first = 6 * (name == "up")
            self.both.data[:, first : first + 6] = tensor[6:].T


def test_a_loader_adds_deltas_where_it_copies_tensors() -> None:
    draw = torch.Generator().manual_seed(0)
    old, new = (
        {name: random_bits([12, 5], torch.bfloat16, draw) for name in ("gate", "up")} for _ in "ab"
    )
    model = Fused()
    whole = Fused()
    load(model, model.load_weights, old.items())
    load(whole, whole.load_weights, new.items())
    assert not torch.equal(bits(model.both), bits(whole.both))
    load(
        model,
        model.load_weights,
        [("gate", new["gate"]), ("up" + SUFFIX, encode(old["up"], new["up"]))],
    )
    assert torch.equal(bits(model.both), bits(whole.both))
    assert model.scratch.eq(7).all()


def test_damage_is_found_unless_it_changes_nothing() -> None:
    """The last bits before the checksum mean nothing."""
    draw = torch.Generator().manual_seed(0)
    old = torch.zeros(300).bfloat16()
    new = torch.randn(300, generator=draw).bfloat16()
    code = encode(old, new)
    found = 0
    for place in range(len(code)):
        damaged = code.clone()
        damaged[place] ^= 16
        try:
            assert torch.equal(bits(decode(damaged)), bits(decode(code)))
        except RuntimeError as error:
            found += "a delta is damaged" in str(error)
    assert len(code) - 3 <= found <= len(code)
    with pytest.raises(RuntimeError, match="damaged"):
        decode(code[:-3])


def test_size() -> None:
    """One value in a hundred changed by one: within 10 % of the entropy of which (a
    Bernoulli choice each) and how (a bit).
    """
    draw = torch.Generator().manual_seed(0)
    size = 1 << 20
    share = 0.01
    old = torch.randn(size, generator=draw).bfloat16()
    chosen = torch.rand(size, generator=draw) < share
    up = torch.randint(0, 2, (size,), generator=draw)
    new = (old.view(torch.int16) + (chosen * (2 * up - 1)).short()).view(torch.bfloat16)
    p = chosen.float().mean().item()
    entropy = size * (-p * math.log2(p) - (1 - p) * math.log2(1 - p) + p) / 8
    code = len(encode(old, new))
    assert entropy < code < 1.1 * entropy
