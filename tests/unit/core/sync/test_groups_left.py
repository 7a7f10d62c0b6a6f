"""A server that is left out of a publication still has the group of the one before: it
is told at its next.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.sync.process_group import ProcessGroupTransport, _Attempt

pytestmark = pytest.mark.usefixtures("one_rank")


class Told:
    """A fleet of these servers; `left`: (server, group) of each goodbye."""

    def __init__(self, *ids: int) -> None:
        self.left: list[tuple[int, str]] = []
        self.servers = {i: self.server(i) for i in ids}

    def server(self, i: int) -> Any:
        return SimpleNamespace(
            address=SimpleNamespace(id=i),
            leave_group=lambda name: self.left.append((i, name)),
            stage=lambda version, base=None: None,
            served_version=lambda: 1,
        )

    def call_each(
        self, ids: Iterable[int], call: Callable[[Any], object]
    ) -> tuple[dict[int, object], dict[int, str]]:
        return {i: call(self.servers[i]) for i in ids}, {}


def test_each_server_leaves_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    transport: Any = ProcessGroupTransport.__new__(ProcessGroupTransport)
    transport._source = True
    transport._group = None
    transport._members = ()
    transport._versions = {}
    transport._untold = {}
    formed = 0
    transport._last = SimpleNamespace(base=None)

    def send_all(fleet: Any, ids: tuple[int, ...]) -> _Attempt:
        nonlocal formed
        if transport._members != ids:
            transport._leave(fleet)
            formed += 1
            transport._group = SimpleNamespace(name=f"g{formed}", close=lambda: None)
            transport._members = ids
        return _Attempt()

    monkeypatch.setattr(transport, "_send_all", send_all)
    left: list[list[tuple[int, str]]] = []
    for ids in ((0,), (1,), (0, 1), (0, 1), (2,), (0,), (0, 1, 2)):
        fleet = Told(*ids)
        transport.send(fleet, ids, 1)
        left.append(fleet.left)
    assert left == [
        [],
        [],
        [(0, "g1"), (1, "g2")],
        [],
        [],
        [(0, "g3")],
        [(1, "g3"), (2, "g4"), (0, "g5")],
    ]
