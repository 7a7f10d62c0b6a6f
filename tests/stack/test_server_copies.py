"""A server of two GPUs with two copies of the attention (serving.attention_copies), one
on each: log-probs, the experts that it chose, groups, calls that reach both copies,
weights by every transport, and a copy that dies.
"""

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from megarl.core.client.client import Generation, ServerClient, ServerLost
from megarl.core.sampling.sampler import routed_model
from tests.stack.conftest import Stack, running, two_models
from tests.stack.publish_world import NUDGED, publish_from
from tests.stack.test_publication import kept_cache_scores
from tests.stack.test_server_families import (
    CASES,
    ENDLESS,
    assert_serves,
    experts_of,
    random_prompt,
)

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.timeout(900)]

COPIES = 2
GROUPS = ("first", "second")
"""Two groups that begin on an idle server go to different copies."""


@pytest.fixture(
    scope="module", params=["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.slow)]
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("copies")
    with running(
        directory,
        two_models(directory, case.make, **ENDLESS, **case.overrides),
        resources={"server_tensor_parallel": COPIES, "learner_ranks": 2, "colocate": True},
        model={"tensor_parallel": 2, "moe": {"routing_replay": True}},
        weights={"transport": "cuda_ipc"},
        serving={
            "memory_fraction": 0.5,
            "attention_copies": COPIES,
            "expert_parallel": request.param == "glm4_moe",
        },
    ) as stack:
        yield stack


async def running_requests(client: ServerClient) -> list[int]:
    """Return the requests of each copy."""
    reply = await client._call("ask for its load", "/v1/loads", key=client._api_key)
    return [load["num_running_reqs"] for load in reply["loads"]]


async def one_on_each(
    client: ServerClient, tokens: int, salt: str, routing_from: int | None = None
) -> list[asyncio.Task[Generation]]:
    """Begin a request on each copy, and return them once both are running."""
    tasks = []
    for group in GROUPS:
        began = asyncio.Event()
        generation = client.generate(
            random_prompt(30),
            tokens,
            cache_salt=salt,
            group=f"{group} of {salt}",
            routing_from=routing_from,
            started=began.set,
        )
        tasks.append(asyncio.create_task(generation))
        await asyncio.wait_for(began.wait(), 60)
    assert await running_requests(client) == [1, 1]
    return tasks


async def test_log_probs_and_chosen_experts(served: Stack, request: pytest.FixtureRequest) -> None:
    await assert_serves(served, "a")
    routed = routed_model(served.recipe)
    assert routed is not None
    routers = CASES[request.node.callspec.params["served"]].routers
    async with served.client() as client:
        generations = await asyncio.gather(*await one_on_each(client, 60, "experts", 0))
    for generation in generations:
        table = routed.routing([routed.routed_experts(generation.routing)]).table
        tokens = np.concatenate([random_prompt(30), generation.tokens])
        chosen = experts_of(served.models["a"], routers, tokens, routed.experts_per_token)
        np.testing.assert_array_equal(np.sort(table, -1), chosen[:-1])


async def test_a_group_stays_where_its_prompt_is_cached(served: Stack) -> None:
    prompts = {f"group {n}": random_prompt(40 + n) for n in range(5)}
    async with served.client() as client:

        async def cached(group: str) -> int:
            generation = await client.generate(prompts[group], 5, cache_salt="groups", group=group)
            return generation.cached

        assert await asyncio.gather(*map(cached, prompts)) == [0] * 5
        # In another order, in which the copies would come round otherwise.
        again = [await cached(group) for group in ("group 1", "group 1", "group 4", "group 0")]
        assert again == [40, 40, 43, 39]
        assert (await client.current_load()).waiting == 0


async def test_calls_reach_both_copies(served: Stack) -> None:
    async with served.client() as client:
        tasks = await one_on_each(client, 1200, "calls")
        await client.pause("in_place")
        await asyncio.sleep(0.5)  # for tokens that were under way
        heard = client.heard
        await asyncio.sleep(0.5)
        assert client.heard == heard
        await client.resume()
        await asyncio.sleep(0.5)
        assert await running_requests(client) == [1, 1]
        await client.pause("retract")
        await client.release_memory()
        await client.resume_memory()
        await client.resume()
        while await running_requests(client) != [1, 1]:
            await asyncio.sleep(0.05)
        await client.abort_all()
        for task in tasks:
            with pytest.raises(ServerLost) as lost:
                await task
            assert len(lost.value.tokens)
    await assert_serves(served, "a")


async def test_publications_in_flight(served: Stack) -> None:
    """While requests are running on both copies, by every transport."""
    by_group = ["weights.transport=process_group", "resources.colocate=false"]
    deltas = [*by_group, "weights.full_every=9"]
    publications = [
        ("b", deltas, "gloo"),
        (NUDGED, deltas, "gloo"),
        ("a", [], ""),
        ("b", ["weights.transport=disk"], ""),
    ]
    async with served.client() as client:
        publishing = asyncio.create_task(
            asyncio.to_thread(publish_from, served, 2, 0, publications)
        )

        async def ask(group: str) -> list[Generation]:
            generations: list[Generation] = []
            while not publishing.done():
                salt = f"{group}/{len(generations)}"
                generations.append(
                    await client.generate(random_prompt(30), 200, cache_salt=salt, group=group)
                )
            return generations

        by_copy = await asyncio.gather(*map(ask, GROUPS))
        found = await publishing
    assert [error for error, *_ in found] == [""] * len(found)
    b, nudged, a, b_by_disk = [checksum for _, checksum, _ in found]
    whole, changes, *_ = [size for *_, size in found]
    assert len({a, b, nudged}) == 3
    assert b_by_disk == b
    assert changes < 0.1 * whole
    await assert_serves(served, "b")
    for generations in by_copy:
        assert_continued(served, generations)


def assert_continued(served: Stack, generations: list[Generation]) -> None:
    """One began with model a and went on with version 0, of model b: it has the
    log-probs of a, and then those of b over a's keys and values.
    """
    crossed = [g for g in generations if [span.version for span in g.spans[:2]] == [-1, 0]]
    assert len(crossed) == 1
    tokens, logprobs, spans, *_ = crossed[0]
    _, start, end = spans[1]
    a, b = served.models.values()
    expected = kept_cache_scores(a, b, random_prompt(30), tokens[:end], start)
    np.testing.assert_allclose(logprobs[:end], expected, atol=2e-5)


def listening(served: Stack) -> dict[int, list[int]]:
    """Return the TCP ports on which each process of the server listens, if on any."""
    main = psutil.Process(served.server.process.pid)
    ports = {
        process.pid: [c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"]
        for process in (main, *main.children(recursive=True))
    }
    return {pid: open_ports for pid, open_ports in ports.items() if open_ports}


def test_no_process_hears_requests_over_tcp(served: Stack) -> None:
    """But the one that handles HTTP, whose gate asks for a key. Ranks listen for each
    other; the process that distributes requests does not.
    """
    ports = listening(served)
    url = served.server.address.url
    assert ports.pop(served.server.process.pid) == [int(url.rpartition(":")[2])]
    assert len(ports) == COPIES


def test_a_copy_that_dies_ends_the_server(served: Stack) -> None:
    """The last test of this server."""
    *_, rank = sorted(listening(served).keys() - {served.server.process.pid})
    os.kill(rank, signal.SIGKILL)
    served.server.process.wait(timeout=60)
