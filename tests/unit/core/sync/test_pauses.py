"""When servers are paused: after the transfer,
or before it if they have several GPUs.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.base.messages import Publish, ServerAddress
from megarl.core.client.client import HeldChecksums
from megarl.core.recipe import Recipe, from_tree
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.transport import Sent

pytestmark = pytest.mark.usefixtures("one_rank")


class Asked:
    """A fleet of one server; `calls`: what it was asked, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.servers = {0: self}
        self.version = 1

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, object]]:
        async def asked(*_: object) -> object:
            self.calls.append(name)
            return HeldChecksums("whole", ({},)) if name.endswith("checksums") else None

        return asked

    def call_each(
        self, ids: Iterable[int], call: Callable[[Any], Any]
    ) -> tuple[dict[int, object], dict[int, str]]:
        return {i: asyncio.run(call(self.servers[i])) for i in ids}, {}

    def transport(self, staged: bool) -> Any:
        def send(*_: object) -> Sent:
            self.calls.append("send")
            return Sent({}, {}, 0)

        return SimpleNamespace(staged=staged, send=send)


def recipe(transport: str, gpus: int) -> Recipe:
    return from_tree(
        {"weights": {"transport": transport}, "resources": {"server_tensor_parallel": gpus}}
    )


@pytest.mark.parametrize(
    ("transport", "gpus", "calls"),
    [
        ("process_group", 1, ["send", "staged_checksums", "pause", "swap", "resume"]),
        ("process_group", 4, ["pause", "send", "staged_checksums", "swap", "resume"]),
        ("disk", 1, ["pause", "send", "checksums", "resume"]),
        ("disk", 4, ["pause", "send", "checksums", "resume"]),
    ],
)
def test_no_weights_are_sent_beside_sums_over_a_servers_gpus(
    transport: str, gpus: int, calls: list[str]
) -> None:
    """NCCL may hang if operations of two groups are under way on a GPU."""
    publisher: Any = Publisher.__new__(Publisher)
    fleet = Asked()
    r = recipe(transport, gpus)
    publisher._wakes = False
    publisher._meanwhile = r.generates_meanwhile
    publisher._transport = fleet.transport(r.stages_weights)
    publisher._last = SimpleNamespace(expected=lambda _: None, arrived=lambda *_: None)
    command = Publish(version=1, servers=(ServerAddress(id=0, url="", tensor_parallel=gpus),))
    published = publisher._publish(fleet, command, "learner")
    assert fleet.calls == calls
    assert published is not None
    assert published.results[0].error == ""
    assert published.staged is (calls[0] == "send")
