"""Calls through the gates of some servers: the same results and errors as without,
whatever happens to a relay.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.core.client import fleet as module
from megarl.core.client import relay
from megarl.core.client.client import ServerClient
from megarl.core.client.fleet import Fleet, collect
from megarl.core.client.relay import RelayLost
from megarl.core.engine.proxy import Gate
from megarl.core.sync.transport import open_fleet
from megarl.run.process import free_ports

SERVERS = 11
"""In groups of four: servers 0, 4 and 8 are the relays."""
LIMIT_S = 60.0


class StandIns:
    """Servers that are a real gate before an application that notes each call, in a
    thread.

    heard: (server, path, body) in order; relayed: how many calls each server has passed
    on; says: what a server does not answer with 200 and its number: a status,
    "silence", or "death", which ends the connection.
    """

    def __init__(self) -> None:
        self.ports = free_ports(SERVERS)
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in self.ports)
        self.heard: list[tuple[int, str, bytes]] = []
        self.relayed: Counter[int] = Counter()
        self.says: dict[tuple[int, str], int | str] = {}
        self.endpoints = Endpoints(
            session="s",
            controller="",
            servers=self.urls,
            api_key="user",
            admin_key="admin",
            link=LinkKeys.new(),
            rendezvous_port=1,
        )
        self.gates: list[Gate] = []
        self.servers = [
            uvicorn.Server(
                uvicorn.Config(self.app(n), port=port, lifespan="off", log_level="error")
            )
            for n, port in enumerate(self.ports)
        ]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()), daemon=True)
        self.thread.start()

    def app(self, number: int) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"]
            self.heard.append((number, path, await Request(scope, receive).body()))
            said = self.says.get((number, path), 200)
            if said == "silence":
                await asyncio.sleep(60)
            status = said if isinstance(said, int) else 200
            body = (
                {"message": "no"}
                if status != 200
                else {"weight_version": str(number), "message": ""}
            )
            await JSONResponse(body, status)(scope, receive, send)

        gate = Gate(answer, self.endpoints, handles=False, vocabulary=8)
        self.gates.append(gate)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/relay":
                self.relayed[number] += 1
                if end := self.says.get((number, "/relay")):
                    await asyncio.sleep(0.2 if end == "death" else 60)
                    return await send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": [(b"content-length", b"9")],
                        }
                    )
            await gate(scope, receive, send)

        return counted

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for server in self.servers:
                tasks.create_task(server._serve())
        for gate in self.gates:
            if gate._session is not None:
                await gate._session.close()

    def stop(self) -> None:
        for server in self.servers:
            server.should_exit = server.force_exit = True
        self.thread.join(10)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIns]:
    monkeypatch.setattr(module, "DIRECT", 2)
    monkeypatch.setattr(module, "RELAYED", 4)
    servers = StandIns()
    for url in servers.urls:
        asyncio.run(_up(url))
    servers.heard.clear()
    yield servers
    servers.stop()


async def _up(url: str) -> None:
    async with ServerClient(ServerAddress(id=0, url=url), "user", "admin", LIMIT_S) as client:
        while not await client.health():
            await asyncio.sleep(0.02)


def fleet_of(
    servers: StandIns, urls: dict[int, str] | None = None, limit_s: float = LIMIT_S
) -> Fleet:
    addresses = dict(enumerate(servers.urls)) | (urls or {})
    return Fleet(
        [
            ServerClient(ServerAddress(id=i, url=u), "user", "admin", limit_s)
            for i, u in addresses.items()
        ],
        7,
    )


def paths(servers: StandIns) -> Counter[tuple[int, str]]:
    return Counter((number, path) for number, path, _ in servers.heard)


def test_each_server_hears_each_call_once_and_its_own_answer_is_told(stand_ins: StandIns) -> None:
    with closing(fleet_of(stand_ins)) as fleet:
        assert fleet.call_each(fleet.servers, lambda s: s.pause("in_place")) == (
            dict.fromkeys(range(SERVERS)),
            {},
        )
        versions, errors = fleet.call_each([0, 1, 5, 6, 10], lambda s: s.served_version())
        assert (versions, errors) == ({i: i for i in (0, 1, 5, 6, 10)}, {})
    assert stand_ins.relayed == {
        0: 2,
        4: 1,
        5: 1,
        8: 1,
    }, "one call a group; server 10, alone in its group, is called itself"
    expected = [(i, "/pause_generation") for i in range(SERVERS)] + [
        (i, "/model_info") for i in (0, 1, 5, 6, 10)
    ]
    assert paths(stand_ins) == Counter(expected)
    assert {body for _, path, body in stand_ins.heard if path == "/pause_generation"} == {
        b'{"mode":"in_place"}'
    }


def test_each_server_gets_its_own_question(stand_ins: StandIns) -> None:
    with closing(fleet_of(stand_ins)) as fleet:
        errors = fleet.call_each(
            fleet.servers, lambda s: s.join_group("g", "127.0.0.1", 1, s.address.id, 12, "gloo")
        )[1]
    assert errors == {}
    asked = {number: msgspec.json.decode(body)["names"][0] for number, _, body in stand_ins.heard}
    assert {number: msgspec.json.decode(names)["first"] for number, names in asked.items()} == {
        i: i for i in range(SERVERS)
    }


def test_errors_are_told_at_once(stand_ins: StandIns) -> None:
    stand_ins.says = {(1, "/pause_generation"): 500, (2, "/pause_generation"): "silence"}
    with closing(fleet_of(stand_ins)) as fleet:
        calls = fleet.start(fleet.servers, lambda s: s.pause("in_place"))
        until = time.monotonic() + LIMIT_S / 2
        while not calls.errors and time.monotonic() < until:
            time.sleep(0.01)
        assert list(calls.errors) == [1]
        assert 2 not in calls.results


def test_errors_name_their_servers(stand_ins: StandIns) -> None:
    stand_ins.says = {
        (1, "/pause_generation"): 500,
        (2, "/pause_generation"): "silence",
        (4, "/pause_generation"): 500,
    }
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    with closing(fleet_of(stand_ins, {9: nobody}, limit_s=3.0)) as fleet:
        results, errors = fleet.call_each(fleet.servers, lambda s: s.pause("in_place"))
    assert sorted(results) == [0, 3, 5, 6, 7, 8, 10]
    told = {i: str(error) for i, error in errors.items()}
    assert told[1] == f"publishing version 7 to server 1 ({stand_ins.urls[1]}): pause: 500: no"
    assert (
        told[2]
        == f"publishing version 7 to server 2 ({stand_ins.urls[2]}): pause: no answer within 3 s"
        " (weights.timeout_s)"
    )
    assert told[4].endswith("500: no")
    assert told[9].startswith(
        f"publishing version 7 to server 9 ({nobody}): pause: ClientConnectorError"
    )


@pytest.mark.parametrize("end", ["death", "silence"])
def test_servers_of_a_lost_relay_are_called_directly(
    stand_ins: StandIns, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.says = {(4, "/relay"): end}
    limit_s = LIMIT_S
    if end == "silence":
        limit_s = 2.0
        monkeypatch.setattr(relay, "GRACE_S", 1.0)
    with closing(fleet_of(stand_ins, limit_s=limit_s)) as fleet:
        for _ in range(2):
            results, errors = fleet.call_each(fleet.servers, lambda s: s.pause("in_place"))
            assert (sorted(results), errors) == ([*range(SERVERS)], {})
    assert stand_ins.relayed[4] == 1, "it is not tried again"
    assert set(paths(stand_ins).values()) == {2}


def test_a_relay_that_is_gone_fails_alone(stand_ins: StandIns) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    with closing(fleet_of(stand_ins, {0: nobody})) as fleet:
        results, errors = fleet.call_each(fleet.servers, lambda s: s.pause("in_place"))
    assert (sorted(results), list(errors)) == ([*range(1, SERVERS)], [0])


def test_joined_servers_are_called_directly(stand_ins: StandIns) -> None:
    """No gate knows of them, and would refuse a call to a group that has one."""
    for gate in stand_ins.gates:
        gate._endpoints = msgspec.structs.replace(stand_ins.endpoints, servers=stand_ins.urls[:10])

    endpoints = stand_ins.gates[0]._endpoints
    addresses = [ServerAddress(id=i, url=u) for i, u in enumerate(stand_ins.urls)]
    with closing(open_fleet(addresses, endpoints, LIMIT_S, 7)) as fleet:
        assert fleet.call_each(fleet.servers, lambda s: s.served_version()) == (
            {i: i for i in range(SERVERS)},
            {},
        )
    assert stand_ins.relayed == {0: 1, 4: 1, 8: 1}
    assert not any(gate.refused for gate in stand_ins.gates)


def test_what_must_not_be_repeated_is_not(stand_ins: StandIns) -> None:
    """A second call to receive a bucket would wait for a broadcast that never comes."""
    stand_ins.says = {(4, "/relay"): "death"}
    with closing(fleet_of(stand_ins)) as fleet:
        results, errors = collect(fleet.start(fleet.servers, lambda s: s.receive("g")))
        assert sorted(results) == [0, 1, 2, 3, 8, 9, 10]
        assert {type(error) for error in errors.values()} == {RelayLost}
        assert "receive: the relay, server 4, was lost" in str(errors[6])
        results, errors = collect(fleet.start(fleet.servers, lambda s: s.receive("g")))
        assert (sorted(results), errors) == ([*range(SERVERS)], {}), "directly, from then on"


@pytest.mark.parametrize(
    ("key", "path", "body", "others", "code"),
    [
        ("admin", "/pause_generation", "{}", (), 200),
        ("user", "/model_info", "", (), 200),
        ("", "/health", "", (), 401),
        ("other", "/model_info", "", (), 401),
        ("user", "/pause_generation", "{}", (), 401),
        ("admin", "/model_info", "", (), 401),
        ("user", "/generate", "{}", (), 404),
        ("admin", "/update_weights_from_tensor", "{}", (), 404),
        ("admin", "/relay", "{}", (), 404),
        ("admin", "/set_internal_state", "{}", (), 404),
        ("admin", "@127.0.0.1:1/pause_generation", "{}", (), 404),
        ("admin", "/pause_generation", "{}", ("http://127.0.0.1:1",), 404),
        ("admin", "/pause_generation", "{}", ("http://169.254.169.254",), 404),
    ],
)
def test_a_gate_relays_only_what_it_lets_through_and_only_to_the_run(
    stand_ins: StandIns, key: str, path: str, body: str, others: tuple[str, ...], code: int
) -> None:
    async def asked() -> int:
        call = relay.RelayedCall(path, body, [stand_ins.urls[1], *others], LIMIT_S)
        async with ServerClient(
            ServerAddress(id=0, url=stand_ins.urls[0]), "", "", LIMIT_S
        ) as client:
            return (
                await client.exchange(
                    relay.ServerQuestion("/relay", msgspec.json.encode(call), key, LIMIT_S)
                )
            ).status

    assert asyncio.run(asked()) == code
    assert [number for number, _, _ in stand_ins.heard] == ([1] if code == 200 else [])
