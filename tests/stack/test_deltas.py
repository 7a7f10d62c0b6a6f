"""Deltas to a real server: what changed arrives, and whoever does not hold what it
changed from gets everything.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from megarl.core.base.messages import Publish, Published
from megarl.core.sync import delta
from megarl.core.sync import sent_deltas as deltas
from megarl.core.sync.publisher import Publisher
from tests.stack.conftest import Stack, assert_arrived
from tests.stack.publish_world import nudge

pytestmark = [pytest.mark.stack]


class Deltas:
    """A publisher of deltas to one server, and what it publishes: the weights of model
    `a`, nudged before each publication.
    """

    def __init__(self, stack: Stack, learner: Callable[[str], Any], full_every: int) -> None:
        (self.chunks, self.family) = learner("a")
        self.stack = stack
        self.every = full_every
        self.publisher = self.new()

    def new(self) -> Publisher:
        """A publisher that has published nothing."""
        recipe = self.stack.recipe
        weights = recipe.weights.model_copy(update={"full_every": self.every})
        return Publisher(
            recipe.model_copy(update={"weights": weights}),
            self.stack.endpoints,
            self.chunks,
            self.family,
        )

    def publish(self, version: int, by: Publisher | None = None) -> Published:
        published = (by or self.publisher).publish(
            Publish(version, (self.stack.server.address,)), "test"
        )
        assert published is not None
        return published

    def nudged(self, version: int) -> Published:
        nudge(self.chunks, version)
        return self.publish(version)


def test_only_what_changed_is_sent_in_all_but_one_of_so_many(stack: Stack, learner: Any) -> None:
    by = Deltas(stack, learner, 4)
    found = [by.nudged(200 + n) for n in range(9)]
    whole = found[0].bytes_sent
    assert [p.bytes_sent < 0.02 * whole for p in found] == [n % 4 > 0 for n in range(9)]
    assert len({assert_arrived(p) for p in found}) == 9
    again = by.publish(209, by.new())
    assert (again.bytes_sent, assert_arrived(again)) == (whole, assert_arrived(found[-1]))


def test_a_server_that_holds_something_else_gets_everything(
    stack: Stack, learner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    by = Deltas(stack, learner, 100)
    whole = by.nudged(220).bytes_sent
    assert by.nudged(221).bytes_sent < 0.02 * whole
    stack.ask(
        lambda server: server.load(str(stack.directory / "b"), 221)
    )  # the version that it was sent
    found = by.nudged(222)
    assert "server 0: not the weights that were sent" in caplog.text
    assert found.bytes_sent == whole
    assert assert_arrived(found)
    assert by.nudged(223).bytes_sent < 0.02 * whole


def test_everything_follows_half_a_delta(
    stack: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has added some tensors to its copy when it meets one that it cannot
    read. It keeps what it serves.
    """
    by = Deltas(stack, learner, 100)
    whole = by.nudged(230).bytes_sent
    calls = 0

    def damaged(old: Tensor, new: Tensor) -> Tensor:
        nonlocal calls
        calls += new.numel() > 5000  # smaller ones go whole
        code = delta.encode(old, new)
        if calls == 10:
            code[len(code) // 2] ^= 64
        return code

    monkeypatch.setattr(deltas, "encode", damaged)
    before = stack.ask(lambda server: server.checksums())
    (result,) = by.nudged(231).results
    assert "a delta is damaged" in result.error
    assert stack.ask(lambda server: server.checksums()) == before
    monkeypatch.undo()
    found = by.nudged(232)
    assert (found.bytes_sent, assert_arrived(found) != "") == (whole, True)


def test_a_delta_that_is_not_what_changed_is_noticed(
    stack: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = Deltas(stack, learner, 100)
    whole = by.nudged(240).bytes_sent
    monkeypatch.setattr(deltas, "encode", lambda old, new: delta.encode(new, new))
    (result,) = by.nudged(241).results
    assert "checksum: " in result.error
    monkeypatch.undo()
    assert by.nudged(242).bytes_sent == whole
