"""A real server that reads the learner's memory, by handles to /dev/shm here as by CUDA
IPC on a GPU, and lends its own.
"""

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.base import device
from megarl.core.base.messages import Publish, Published
from megarl.core.learner.offload import Offload
from megarl.core.models.families import Family, Weight
from megarl.core.sync.cuda_ipc import CudaIpcTransport
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from tests.stack.conftest import Stack, running, under_way
from tests.tiny_scores import scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio]

BUCKET_BYTES = 100_000
PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.fixture(scope="module")
def sharing(models: tuple[Path, dict[str, Any]]) -> Iterator[Stack]:
    with running(
        *models,
        run={"name": "sharing", "dir": str(models[0])},
        resources={"colocate": True},
        pipeline={"k": 0},
        weights={"transport": "cuda_ipc", "timeout_s": 20, "bucket_mb": 1},
        serving={"memory_fraction": 0.5},
    ) as stack:
        yield stack


def publisher(stack: Stack, learner: Any, name: str) -> Publisher:
    return with_small_buckets(stack, *learner(name))


def with_small_buckets(
    stack: Stack, chunks: Any, family: Family, timeout_s: float = 20
) -> Publisher:
    """Eight or more of them: the tiny model would fit in one of the smallest that a
    recipe can have.
    """
    weights = stack.recipe.weights.model_copy(update={"timeout_s": timeout_s})
    by = Publisher(
        stack.recipe.model_copy(update={"weights": weights}), stack.endpoints, chunks, family
    )
    by._transport = CudaIpcTransport(
        ServedWeights(chunks, family, fp8=False), LastSent(1), BUCKET_BYTES
    )
    return by


def publish(stack: Stack, by: Publisher, name: str, version: int) -> Published:
    command = Publish(version=version, servers=(stack.server.address,))
    published = by.publish(command, "test")
    assert published is not None
    return published


async def test_weights_arrive_whole_while_a_request_goes_on(sharing: Stack, learner: Any) -> None:
    by = publisher(sharing, learner, "a")
    async with sharing.client() as client:
        first = await asyncio.to_thread(publish, sharing, by, "a", 1)
        task = await under_way(client, PROMPT, 900)
        learner("b")
        second = await asyncio.to_thread(publish, sharing, by, "b", 2)
        assert await asyncio.to_thread(sharing.difference, "b") <= 1e-5
        done = await task
    for published in (first, second):
        (result,) = published.results
        assert result.error == ""
    assert first.results[0].checksum != second.results[0].checksum
    assert (
        second.bytes_sent
        == sum(p.nbytes for p in sharing.models["b"].parameters())
        > 7 * BUCKET_BYTES
    )
    old, new = done.spans
    assert (old.version, new.version, new.end) == (1, 2, 900)
    (reference,) = scores(sharing.models["a"], [np.concatenate([PROMPT, done.tokens])])
    off = np.abs(done.logprobs - reference[len(PROMPT) - 1 :])
    assert off[: old.end].max() <= 2e-5
    assert np.median(off[new.start :]) > 0.01, "other weights, over the keys and values of `a`"


def test_it_brings_the_same_weights_as_disk(sharing: Stack, learner: Any) -> None:
    (handed,) = publish(sharing, publisher(sharing, learner, "b"), "b", 3).results
    sharing.ask(lambda client: client.load(str(sharing.directory / "b"), 4))
    assert handed.checksum == sharing.ask(lambda client: client.checksums())[0]


async def test_memory_is_lent_for_a_step_and_requests_go_on_after_it(
    sharing: Stack, learner: Any
) -> None:
    by = publisher(sharing, learner, "a")
    offload = Offload(sharing.recipe, sharing.endpoints)
    async with sharing.client() as client:
        await asyncio.to_thread(publish, sharing, by, "a", 10)
        task = await under_way(client, PROMPT, 900)
        with offload.released(10):
            await client.release_memory()  # said twice
            used = sharing.server.cpu_seconds()
            await asyncio.sleep(0.5)
            assert sharing.server.cpu_seconds() - used < 0.25, (
                "it spins on a core that the learner could use"
            )
            assert not task.done()
            assert await client.health()
        done = await asyncio.wait_for(task, 60)
    (reference,) = scores(sharing.models["a"], [np.concatenate([PROMPT, done.tokens])])
    assert [span.version for span in done.spans] == [10]
    np.testing.assert_allclose(done.logprobs, reference[len(PROMPT) - 1 :], atol=2e-5)


async def test_what_a_lost_learner_has_borrowed_comes_back_with_the_next_publication(
    sharing: Stack, learner: Any
) -> None:
    released = Offload(sharing.recipe, sharing.endpoints).released(10)
    released.__enter__()
    async with sharing.client() as client:
        assert await client.health()
    (result,) = (
        await asyncio.to_thread(publish, sharing, publisher(sharing, learner, "b"), "b", 11)
    ).results
    assert result.error == ""
    assert await asyncio.to_thread(sharing.difference, "b") <= 1e-5
    async with sharing.client() as client:
        await client.resume_memory()  # said twice
        assert (await client.generate(PROMPT, 5)).spans[0].version == 11


def test_a_server_elsewhere_is_handed_nothing(
    sharing: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = publisher(sharing, learner, "a")
    monkeypatch.setattr(device, "of_rank", lambda: device.DeviceIdentity("another"))
    (result,) = publish(sharing, by, "a", 20).results
    assert "server 0" in result.error
    assert "not on the learner's machine" in result.error
    assert "weights.transport=process_group" in result.error
    monkeypatch.undo()
    assert publish(sharing, by, "a", 21).results[0].error == ""


def test_handles_want_the_admin_key(sharing: Stack) -> None:
    def said(key: str) -> int:
        connection = http.client.HTTPConnection(
            sharing.server.address.url.removeprefix("http://"), timeout=20
        )
        body = json.dumps({"serialized_named_tensors": [""]})
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", "/update_weights_from_tensor", body, headers)
        return connection.getresponse().status

    assert [said("nobody"), said(sharing.endpoints.api_key)] == [401, 401]


def at_layer(family: Family, action: Callable[[], Any]) -> Family:
    """The family, which does it once, when a weight of layer 2 is asked for."""
    left = [action]

    class Interrupted(Family):
        def weight(self, name: str) -> Weight:
            if "layers.2" in name and left:
                left.pop()()
            return family.weight(name)

    return Interrupted(**vars(family))


def test_a_server_that_stands_still_costs_its_limit(sharing: Stack, learner: Any) -> None:
    chunks, family = learner("a")
    group = sharing.server.process.pid
    stands = at_layer(family, lambda: os.killpg(group, signal.SIGSTOP))
    began = time.monotonic()
    try:
        (result,) = publish(
            sharing, with_small_buckets(sharing, chunks, stands, timeout_s=3), "a", 30
        ).results
    finally:
        os.killpg(group, signal.SIGCONT)
    assert "hand over: no answer within 3 s (weights.timeout_s)" in result.error
    assert time.monotonic() - began < 60
    assert publish(sharing, publisher(sharing, learner, "a"), "a", 31).results[0].error == ""


def test_a_server_that_dies_in_between_is_named(sharing: Stack, learner: Any) -> None:
    """The last test of this server."""
    chunks, family = learner("a")
    dies = at_layer(family, sharing.server.stop)
    (result,) = publish(sharing, with_small_buckets(sharing, chunks, dies), "a", 40).results
    assert "publishing version 40 to server 0" in result.error
    assert "hand over" in result.error
