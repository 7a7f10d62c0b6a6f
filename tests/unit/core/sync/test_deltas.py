"""Which servers can use a delta, and what is sent then."""

import torch

from megarl.core.sync.delta import SUFFIX
from megarl.core.sync.sent_deltas import LastSent


def published(last: LastSent, version: int, ids: tuple[int, ...], checksum: str = "") -> bool:
    """Publish; whether everything was sent."""
    last.sends_all = last.expected(ids) is None
    last.arrived(version, dict.fromkeys(ids, checksum or f"sum {version}"))
    return last.sends_all


def test_everything_is_sent_in_one_of_so_many() -> None:
    last = LastSent(3)
    assert [published(last, version, (0, 1)) for version in range(1, 8)] == [
        True,
        False,
        False,
    ] * 2 + [True]
    assert [published(LastSent(1), version, (0,)) for version in (1, 2)] == [True, True]


def test_who_holds_an_older_version_or_none_needs_everything() -> None:
    last = LastSent(100)
    published(last, 1, (0, 1))
    assert last.expected((0, 1)) == {0: "sum 1", 1: "sum 1"}
    assert last.expected((0, 2)) is None, "joined late"
    assert not published(last, 2, (0,)), "1 is held back for an evaluation"
    assert last.expected((0, 1)) is None
    assert published(last, 2, (1,)), "brought to the version that was sent last"
    assert last.expected((0, 1)) == {0: "sum 2", 1: "sum 2"}
    last.sends_all = False
    last.arrived(3, {0: "sum 3"})  # it failed on 1
    assert last.expected((0,)) is not None
    assert last.expected((1,)) is None


def test_small_deltas_are_sent_and_large_ones_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(4096, generator=draw).bfloat16() for _ in "ab")
    few = one.clone()
    few[::100] = 0
    last = LastSent(2)
    (whole,) = last.changed(iter([("w", one)]))
    assert whole[1] is one
    last.sends_all = False
    for tensor, name in (
        (few, "w" + SUFFIX),
        (few, "w" + SUFFIX),
        (other, "w"),
        (torch.zeros(4096).bfloat16(), "w"),
    ):
        ((sent, value),) = last.changed(iter([("w", tensor)]))
        assert sent == name
        assert (value is tensor) == (name == "w")


def test_nothing_is_kept_unless_deltas_are_sent() -> None:
    last = LastSent(1)
    tensor = torch.ones(3)
    assert list(last.changed(iter([("w", tensor)]))) == [("w", tensor)]
    assert not last._values
