"""Publication to the real server: in flight, exact version labels, checksums, disk,
many ranks, errors.
"""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.base.messages import Publish, Published
from megarl.core.client.client import ServerClient, ServerSaid
from megarl.core.client.fleet import Fleet
from megarl.core.models.families import Family, Weight
from megarl.core.sync import process_group
from megarl.core.sync.broadcast import BroadcastGroup
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import buckets
from tests.pessimistic_nccl import NAME as PESSIMISTIC_NCCL
from tests.stack.conftest import Stack, assert_arrived, client_of, stack_recipe, under_way
from tests.tiny_scores import scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio]

PROMPT = np.arange(5, 25, dtype=np.int32)


@torch.no_grad()
def kept_cache_scores(
    old: Any, new: Any, prompt: np.ndarray, tokens: np.ndarray, switch: int
) -> np.ndarray:
    """Log-probs when `switch` tokens come from `old` and the rest from `new` over the
    cache that `old` left behind.
    """
    sequence = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    before = len(prompt) + switch - 1  # positions whose keys and values are old
    first = old(sequence[None, :before], use_cache=True)
    second = new(sequence[None, before:], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits[0], second.logits[0]]).float()
    logprobs = torch.log_softmax(logits[:-1], -1).gather(1, sequence[1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :].numpy()


def publish(
    stack: Stack, learner: Any, name: str, version: int, publisher: Publisher | None = None
) -> Published:
    chunks, family = learner(name)
    publisher = publisher or Publisher(stack.recipe, stack.endpoints, chunks, family)
    command = Publish(version=version, servers=(stack.server.address,))
    published = publisher.publish(command, "test")
    assert published is not None
    return published


@pytest.mark.parametrize("backend", ["gloo", PESSIMISTIC_NCCL])
async def test_a_running_request_goes_on_over_a_publication(
    stack: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(process_group, "backend", lambda: backend)
    chunks, family = learner("a")
    publisher = Publisher(stack.recipe, stack.endpoints, chunks, family)
    first = assert_arrived(publish(stack, learner, "a", 1, publisher))
    async with stack.client() as client:
        tasks = await asyncio.gather(*(under_way(client, PROMPT, 900, str(n)) for n in range(3)))
        published = await asyncio.to_thread(publish, stack, learner, "b", 2, publisher)
        assert await asyncio.to_thread(stack.difference, "b") < 1e-4
        done = await asyncio.gather(*tasks)
        again = await asyncio.to_thread(publish, stack, learner, "a", 3, publisher)
    second = assert_arrived(published)
    assert first == assert_arrived(again) != second
    assert published.bytes_sent == sum(p.nbytes for p in stack.models["b"].parameters())
    for generation in done:
        assert generation.finish == "length"
        old, new = generation.spans
        assert (old.version, old.start, new.version, new.end) == (1, 0, 2, 900)
        assert 0 < old.end == new.start < 900
        reference = kept_cache_scores(
            stack.models["a"], stack.models["b"], PROMPT, generation.tokens, new.start
        )
        np.testing.assert_allclose(generation.logprobs, reference, atol=2e-5)


async def test_requests_that_begin_as_weights_change_are_labelled_right(
    stack: Stack, learner: Any
) -> None:
    """Some requests have their first token under way; the scheduler takes it in after
    the pause.
    """
    chunks, family = learner("a")
    publisher = Publisher(stack.recipe, stack.endpoints, chunks, family)
    seen: set[int] = set()
    async with stack.client() as client:
        for version in range(50, 70, 2):
            if {0, 1} <= seen:
                break
            assert_arrived(
                await asyncio.to_thread(publish, stack, learner, "a", version, publisher)
            )
            tasks: list[Any] = []
            publishing = asyncio.create_task(
                asyncio.to_thread(publish, stack, learner, "b", version + 1, publisher)
            )
            while not publishing.done():
                salt = f"{version}/{len(tasks)}"
                tasks.append(asyncio.create_task(client.generate(PROMPT, 6, cache_salt=salt)))
                await asyncio.sleep(0.004)
            assert_arrived(await publishing)
            for generation in await asyncio.gather(*tasks):
                new = [span for span in generation.spans if span.version == version + 1]
                switch = new[0].start if new else len(generation.tokens)
                seen.add(switch)
                old_model = stack.models["a"]
                new_model = stack.models["b"]
                if switch in (0, len(generation.tokens)):
                    (whole,) = scores(
                        old_model if switch else new_model,
                        [np.concatenate([PROMPT, generation.tokens])],
                    )
                    reference = whole[len(PROMPT) - 1 :]
                else:
                    reference = kept_cache_scores(
                        old_model, new_model, PROMPT, generation.tokens, switch
                    )
                np.testing.assert_allclose(generation.logprobs, reference, atol=2e-5)
    assert {0, 1} <= seen


def test_disk_brings_the_same_weights_as_the_group(stack: Stack, learner: Any) -> None:
    by_group = assert_arrived(publish(stack, learner, "b", 10))
    chunks, family = learner("a")
    recipe = stack_recipe(stack.directory, weights={"transport": "disk", "timeout_s": 20})
    publisher = Publisher(recipe, stack.endpoints, chunks, family)
    sums = [
        assert_arrived(publish(stack, learner, n, v, publisher))
        for n, v in (("a", 11), ("b", 12), ("a", 13))
    ]
    assert sums == [sums[0], by_group, sums[0]]
    assert stack.difference("a") < 1e-4
    kept = sorted(p.name for p in (stack.directory / "run" / "weights").iterdir())
    assert kept == ["v12", "v13"]


def test_weights_that_a_server_did_not_take_are_noticed(
    stack: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor is changed behind the checksums' back, on its way to the server."""
    assert_arrived(publish(stack, learner, "b", 19))
    chunks, family = learner("a")

    def first_doubled(tensors: Iterable[tuple[str, torch.Tensor]], *sizes: Any) -> Iterator[Any]:
        names = iter(tensors)
        name, tensor = next(names)
        return buckets(itertools.chain([(name, 2 * tensor)], names), *sizes)

    monkeypatch.setattr(process_group, "buckets", first_doubled)
    publisher = Publisher(stack.recipe, stack.endpoints, chunks, family)
    (result,) = publish(stack, learner, "a", 20, publisher).results
    assert "checksum: 1 differ" in result.error
    assert stack.ask(lambda client: client.served_version()) == 19
    assert stack.difference("b") < 1e-4, "the old version stays, whole"
    monkeypatch.undo()
    assert_arrived(publish(stack, learner, "a", 21))


def test_a_directory_that_a_server_does_not_load_is_noticed(
    stack: Stack, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers that it has, and has loaded another."""
    chunks, family = learner("b")
    load = ServerClient.load

    async def load_another(self: ServerClient, path: str, version: int) -> None:
        await load(self, str(stack.directory / "a"), version)

    monkeypatch.setattr(ServerClient, "load", load_another)
    recipe = stack_recipe(stack.directory, weights={"transport": "disk", "timeout_s": 20})
    publisher = Publisher(recipe, stack.endpoints, chunks, family)
    (result,) = publish(stack, learner, "b", 22, publisher).results
    assert "version 22 to server 0: checksum: " in result.error
    monkeypatch.undo()
    assert_arrived(publish(stack, learner, "b", 23, publisher))


async def test_an_update_left_open_by_a_lost_learner_does_not_hinder_the_next(
    stack: Stack, learner: Any
) -> None:
    async with stack.client() as client:
        await client.pause("in_place")
        await client.begin_update()
        assert_arrived(await asyncio.to_thread(publish, stack, learner, "a", 31))
        assert (await client.generate(PROMPT, 5)).spans[0].version == 31


async def test_what_was_checked_is_what_is_served_and_a_copy_that_was_left_is_dropped(
    stack: Stack, learner: Any
) -> None:
    """A learner that is lost while it sends leaves its group and its copy; the server
    serves on, and the next begins anew.
    """
    before = assert_arrived(await asyncio.to_thread(publish, stack, learner, "a", 34))
    chunks, family = learner("b")
    weights = ServedWeights(chunks, family, fp8=False)
    transport = process_group.ProcessGroupTransport(weights, LastSent(1), 100_000, 20, 1)
    real = BroadcastGroup.send
    sent = itertools.count()

    def lost(self: BroadcastGroup, *what: Any) -> Any:
        if next(sent) == 2:
            raise KeyboardInterrupt
        return real(self, *what)

    async with stack.client() as client:
        request = asyncio.create_task(client.generate(PROMPT, 900))
        with (
            pytest.MonkeyPatch.context() as patch,
            closing(Fleet([client_of(stack.server, stack.endpoints)], 35)) as fleet,
        ):
            patch.setattr(BroadcastGroup, "send", lost)
            with pytest.raises(KeyboardInterrupt):
                await asyncio.to_thread(transport.send, fleet, [0], 35)
        with pytest.raises(ServerSaid, match="version 35 is not staged with its checksums"):
            await client.swap(35)
        with pytest.raises(
            ServerSaid, match="version 36 comes as differences from 33, and this server has 34"
        ):
            await client.stage(36, base=33)
        assert [(s.version, s.end) for s in (await request).spans] == [(34, 900)]
        assert (await client.checksums())[0] == before
        after = assert_arrived(await asyncio.to_thread(publish, stack, learner, "b", 37))
        assert (
            after == (await client.checksums())[0] == (await client.staged_checksums())[0] != before
        )


async def test_an_error_on_the_learners_side_leaves_no_server_paused(
    stack: Stack, learner: Any
) -> None:
    chunks, family = learner("a")

    class Broken(Family):
        """A family whose names end in the middle."""

        def weight(self, name: str) -> Weight:
            if "layers.2" in name:
                raise RuntimeError("no such weight")
            return family.weight(name)

    publisher = Publisher(stack.recipe, stack.endpoints, chunks, Broken(**vars(family)))
    command = Publish(version=40, servers=(stack.server.address,))
    with pytest.raises(RuntimeError, match="no such weight"):
        await asyncio.to_thread(publisher.publish, command, "test")
    async with stack.client() as client:
        await asyncio.wait_for(client.generate(PROMPT, 5), 20)
    assert_arrived(await asyncio.to_thread(publish, stack, learner, "a", 41))
