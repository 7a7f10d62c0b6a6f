"""What the controller learns of servers between requests: their load, and that one
whose tokens come is alive.
"""

import asyncio
import math
import socket
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.core import recipe as recipes
from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.core.client import client as client_module
from megarl.core.client.client import ServerClient, ServerLost
from megarl.core.client.membership import ServerLoad
from megarl.core.client.relay import OK, ServerAnswer
from megarl.core.controller import servers as module
from megarl.core.controller.metrics import Meter
from megarl.core.controller.servers import Servers
from megarl.core.sampling.places import Places
from megarl.run.process import free_ports
from tests.unit.core.sampling.test_places import anywhere


def servers_of(count: int, url: str = "") -> Servers:
    """Clean ones, of which nobody is at the address unless that of the
    first is given.
    """
    recipe = recipes.from_tree(
        {"run": {"name": "r"}, "model": {"path": "m"}, "serving": {"max_running_requests": 64}}
    )
    urls = [url or "http://127.0.0.1:1", *(f"http://127.0.0.1:{n + 1}" for n in range(1, count))]
    endpoints = Endpoints(
        session="s",
        controller="",
        servers=tuple(urls),
        api_key="u",
        admin_key="a",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    servers = Servers(recipe, endpoints, lambda: None)
    for n in servers.clients:
        servers.membership.answered(n)
        servers.membership.publish([n], 0, "a")
        servers.membership.published(n, 0, "a", "")
    return servers


@pytest.mark.parametrize("lends", [False, True])
def test_a_server_that_puts_requests_back_gets_fewer(
    lends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a learner that shares its GPU has told it to. A server that does not tell
    its load keeps its places.
    """
    monkeypatch.setattr(module, "LOAD_S", 0.01)
    asked: list[int] = []

    async def load(self: ServerClient) -> ServerLoad:
        asked.append(self.address.id)
        if self.address.id == 2:
            raise self.error("ask for its load", "nothing")
        return ServerLoad(0.5, 0)

    monkeypatch.setattr(ServerClient, "current_load", load)

    async def scenario() -> list[int]:
        servers = servers_of(3)
        servers._lends_memory = lends
        places = servers.places
        places.refresh()
        for _ in range(3 * 64):
            await places.take((1, 0, 0), anywhere)
        for client in (servers.clients[1], servers.clients[2]):
            client.retractions = 1
        observing = asyncio.create_task(servers.observe())
        while asked.count(1) < 3:
            await asyncio.sleep(0.01)
        observing.cancel()
        return [use.limit for use in places.use.values()]

    assert asyncio.run(scenario()) == [64, 64 if lends else 48, 64]


def test_a_relay_leaves_while_it_asks_for_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not answered by then are asked directly, and it itself, too."""
    monkeypatch.setattr(module, "LOAD_S", 0.01)
    asked: set[int] = set()

    async def scenario() -> None:
        servers = servers_of(40)

        async def relay(self: ServerClient, *_: object) -> None:
            servers.clients.pop(self.address.id, None)

        async def exchange(self: ServerClient, _: object) -> ServerAnswer:
            asked.add(self.address.id)
            return ServerAnswer(OK, '{"loads": [{"token_usage": 0.5, "num_waiting_reqs": 0}]}')

        monkeypatch.setattr(ServerClient, "relay", relay)
        monkeypatch.setattr(ServerClient, "exchange", exchange)
        observing = asyncio.create_task(servers.observe())
        while 0 in servers.clients or len(asked) < 40:
            await asyncio.sleep(0.01)
            assert not observing.done()
        observing.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_server_whose_tokens_come_is_not_asked_for_its_health(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POLL_AFTER_MISS_S", 0.01)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    asked: list[int] = []

    async def scenario(heard: float) -> str:
        servers = servers_of(1)
        servers.clients[0].heard = heard

        async def health() -> bool:
            asked.append(0)
            return False

        client: Any = servers.clients[0]
        client.health = health
        watching = asyncio.create_task(servers.watch(0))
        await asyncio.sleep(0.3)
        while heard < 0 and servers.membership.members[0].state == "clean":
            await asyncio.sleep(0.01)
        watching.cancel()
        return servers.membership.members[0].state

    assert asyncio.run(scenario(time.monotonic() + 60)) == "clean"
    assert not asked
    assert asyncio.run(scenario(-math.inf)) == "lost"
    assert asked


def test_requests_on_a_machine_that_is_gone_end_with_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says nothing more and ends no connection. Back at the same address it is asked
    again.
    """
    monkeypatch.setattr(module, "POLL_AFTER_MISS_S", 0.01)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(client_module, "HEALTH_LIMIT_S", 0.5)
    chunk = (
        b'data: {"output_ids": [5], "meta_info": {"output_token_logprobs": [[-0.5, 5,'
        b" null]]%s}}\n\n"
    )
    gone = asyncio.Event()
    sent = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            reply = web.StreamResponse()
            await reply.prepare(request)
            if sent.is_set():
                await reply.write(chunk % b', "finish_reason": {"type": "stop"}')
                return reply
            await reply.write(chunk % b"")
            sent.set()
            await asyncio.sleep(60)
        if gone.is_set():
            await asyncio.sleep(60)
        return web.json_response(None)

    async def scenario() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        servers = servers_of(1, f"http://127.0.0.1:{port}")
        member = servers.membership.members[0]
        client = servers.clients[0]
        request = asyncio.create_task(client.generate([1, 2], 9))
        await sent.wait()
        gone.set()
        client.heard = -math.inf
        watching = asyncio.create_task(servers.watch(0))
        with pytest.raises(ServerLost) as lost:
            await asyncio.wait_for(request, 20)
        assert lost.value.tokens.tolist() == [5]
        assert member.state == "lost"
        gone.clear()
        while member.state != "unknown":
            await asyncio.sleep(0.01)
        assert (await client.generate([1, 2], 9)).finish == "stop"
        watching.cancel()
        await servers.close()
        await runner.cleanup()

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_request_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.1)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            servers = servers_of(1, f"http://127.0.0.1:{deaf.getsockname()[1]}")
            request = asyncio.create_task(
                servers.clients[0].generate(np.zeros(1 << 23, np.int32), 1)
            )
            await asyncio.sleep(0.5)
            await asyncio.wait_for(servers.close(), 10)
            request.cancel()

    asyncio.run(scenario())


def test_the_share_from_the_cache_is_of_what_could_be_there() -> None:
    async def scenario() -> None:
        places = Places(servers_of(2).membership, 4)
        meter = Meter(places)
        assert "cached_prompt_share" not in meter.step()
        places.use[0].reusable, places.use[0].cached, places.use[1].reusable = 300, 250, 100
        places.use[1].limit = 2
        row = SimpleNamespace(**meter.step())
        assert (row.cached_prompt_share, row.server_places_mean) == (250 / 400, 3)
        places.use[0].reusable += 10
        assert meter.step()["cached_prompt_share"] == 0, "of this step alone"

    asyncio.run(scenario())
