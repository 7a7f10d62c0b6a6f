"""A server of two ranks on two nodes, of which the second is a network namespace behind
a cable (test_network_faults.py).

The learner that publishes is on the first one. The server listens on no other network.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.core.base.messages import ServerAddress
from megarl.core.base.process import NODE_RANK
from megarl.core.base.rundir import Endpoints, LinkKeys, Meeting, RunDir
from megarl.core.client.client import ServerLost
from megarl.core.recipe import dump
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready
from tests.processes import LIMIT_S
from tests.stack.conftest import (
    START_LIMIT_S,
    Network,
    Running,
    Stack,
    serve,
    stack_recipe,
    two_models,
    under_way,
)
from tests.stack.publish_world import NUDGED, publish_from
from tests.stack.test_network_faults import networks as networks
from tests.stack.test_network_faults import pytestmark as of_namespaces
from tests.stack.test_server_families import ENDLESS, LLAMA4, assert_serves
from tests.stack.test_server_faults import PROMPT, family_tree
from tests.tiny import tiny_llama4

pytestmark = of_namespaces


@pytest.fixture
def nodes(
    networks: list[Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Stack, Running]]:
    """The server, which its first node answers for, and its second node."""
    models = two_models(tmp_path, tiny_llama4, **ENDLESS, **LLAMA4, num_key_value_heads=2)
    resources = {"server_tensor_parallel": 2, "learner_ranks": 2}
    recipe = stack_recipe(tmp_path, resources=resources, model={"tensor_parallel": 2})
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    port, meeting = free_ports(2, networks[0].address)
    address = ServerAddress(id=0, url=f"http://{networks[0].address}:{port}", tensor_parallel=2)
    endpoints = Endpoints(
        session="test",
        controller="",
        servers=(address.url,),
        meetings={"server-0": Meeting(2, meeting)},
        api_key="user-key",
        admin_key="admin-key",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    rundir.write_endpoints(endpoints)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", networks[0].interface)  # the learner's
    running = []
    for node, network in enumerate(networks):
        monkeypatch.setenv(NODE_RANK, str(node))
        log = rundir.logs / f"node-{node}.log"
        running.append(Running(address, serve(rundir, address, log, network), log))
    monkeypatch.delenv(NODE_RANK)
    try:
        wait_ready(address.url, START_LIMIT_S, running[0].process.poll)
        yield Stack(tmp_path, recipe, endpoints, models, running[0]), running[1]
    finally:
        for server in running:
            server.stop()
            print(server.log.read_text()[-4000:])


async def test_it_serves_what_is_published_and_listens_on_the_network_alone(
    nodes: tuple[Stack, Running], networks: list[Network]
) -> None:
    served, second = nodes
    await assert_serves(served, "a")
    publications = [
        ("b", [], "gloo"),
        ("a", [], "gloo"),
        ("b", ["weights.transport=disk"], ""),
        ("a", ["weights.full_every=9"], "gloo"),
        (NUDGED, ["weights.full_every=9"], "gloo"),
        ("a", [], "gloo"),
    ]
    found = await asyncio.to_thread(publish_from, served, 2, 0, publications)
    assert [error for error, *_ in found] == [""] * len(found)
    checksums = [checksum for _, checksum, _ in found]
    assert (
        checksums[1] == checksums[3] == checksums[5] != checksums[0] == checksums[2] != checksums[4]
    )
    await assert_serves(served, "a")
    async with served.client() as client:
        request = await under_way(client, PROMPT, 1000)
        await client.abort_all()
        with pytest.raises(ServerLost, match="aborted a request"):
            await request
        await client.generate(PROMPT, 4)
    for node, network in zip((served.server, second), networks, strict=True):
        listening = {
            connection.laddr.ip
            for process in family_tree(node)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {network.address}
    (rank,) = psutil.Process(second.process.pid).children()
    rank.kill()
    assert await asyncio.to_thread(second.process.wait, LIMIT_S) == 1, (
        "which ends the server's step"
    )
