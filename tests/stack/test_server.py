"""The real server through the client: log-probs against transformers, streaming,
sampling, errors.
"""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.client.client import ServerClient, ServerLost, ServerRefused, ServerSaid
from megarl.core.client.relay import RelayedAnswer, RelayedCall
from tests.stack.conftest import Stack, under_way
from tests.tiny_scores import scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.usefixtures("serves_a")]

PROMPT = np.arange(5, 25, dtype=np.int32)


def completion_scores(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    (all_scores,) = scores(model, [np.concatenate([prompt, tokens])])
    return all_scores[len(prompt) - 1 :]


def post(stack: Stack, path: str, body: dict[str, Any], key: str) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        stack.server.address.url + path, json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        said: bytes = reply.read()
    return said


def idle(stack: Stack) -> bool:
    """Whether no request runs: SGLang refuses to drop its cached prefixes while one
    does.
    """
    try:
        post(stack, "/flush_cache", {}, stack.endpoints.admin_key)
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return False
    return True


async def test_logprobs_are_transformers(stack: Stack) -> None:
    prompts = [PROMPT[:1], PROMPT[:7], np.tile(PROMPT, 10)]
    async with stack.client() as client:
        done = await asyncio.gather(*(client.generate(p, 60) for p in prompts))
    for prompt, generation in zip(prompts, done, strict=True):
        assert generation.tokens.dtype == np.int32
        assert generation.logprobs.dtype == np.float32
        reference = completion_scores(stack.models["a"], prompt, generation.tokens)
        np.testing.assert_allclose(generation.logprobs, reference, atol=1e-5)
        assert [span[1:] for span in generation.spans] == [(0, len(generation.tokens))]


async def test_streamed_is_what_comes_in_one_piece(stack: Stack) -> None:
    async with stack.client() as client:
        streamed = await client.generate(PROMPT, 100, temperature=0.0)
    body = {
        "input_ids": PROMPT.tolist(),
        "sampling_params": {"max_new_tokens": 100, "temperature": 0.0},
        "return_logprob": True,
    }
    whole = json.loads(
        await asyncio.to_thread(post, stack, "/generate", body, stack.endpoints.api_key)
    )
    meta = whole["meta_info"]
    assert streamed.tokens.tolist() == whole["output_ids"]
    np.testing.assert_allclose(
        streamed.logprobs, [entry[0] for entry in meta["output_token_logprobs"]], atol=1e-5
    )
    assert streamed.spans == tuple(
        (int(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"]
    )
    assert streamed.finish == meta["finish_reason"]["type"]


async def test_a_stop_token_is_kept_and_ends_it(stack: Stack) -> None:
    async with stack.client() as client:
        free = await client.generate(PROMPT, 30, temperature=0.0)
        stop = int(free.tokens[10])
        first = free.tokens.tolist().index(stop)
        stopped = await client.generate(PROMPT, 30, temperature=0.0, stop_token_ids=[stop])
    assert free.finish == "length"
    assert stopped.finish == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert len(stopped.logprobs) == len(stopped.tokens)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.7, 0.8)])
async def test_logprobs_are_of_the_distribution_that_was_sampled_from(
    stack: Stack, temperature: float, top_p: float
) -> None:
    async with stack.client() as client:
        generation = await client.generate(PROMPT, 60, temperature=temperature, top_p=top_p)
    sequence = torch.from_numpy(np.concatenate([PROMPT, generation.tokens]).astype(np.int64))
    with torch.no_grad():
        logits = (
            stack.models["a"](sequence[None]).logits[0, len(PROMPT) - 1 : -1].double() / temperature
        )
    probabilities = logits.softmax(-1)
    order = probabilities.sort(-1, descending=True)
    before = order.values.cumsum(-1) - order.values
    allowed = []
    # The server's fp32 sums decide whether a token whose predecessors sum to top_p is
    # kept.
    for edge in (top_p - 1e-6, top_p + 1e-6):
        nucleus = torch.zeros_like(probabilities).scatter(
            1, order.indices, order.values * (before <= edge)
        )
        allowed.append(
            (nucleus / nucleus.sum(-1, keepdim=True))
            .log()
            .gather(1, sequence[len(PROMPT) :, None])[:, 0]
        )
    distances = np.abs(torch.stack(allowed).numpy() - generation.logprobs)
    assert distances.min(0).max() <= 2e-5, distances


async def test_scores_are_transformers_also_behind_a_cached_prefix(stack: Stack) -> None:
    """All of it first, which fills the cache; then, with the same salt, only what
    stands behind 12 and 30 tokens.
    """
    sequences = [np.tile(PROMPT, 2), np.concatenate([np.tile(PROMPT, 2)[:35], PROMPT])]
    references = scores(stack.models["a"], sequences)
    async with stack.client() as client:
        for firsts in ((1, 1), (12, 30), (12, 30), (1, 39)):
            found = await client.score(sequences, firsts, "salt")
            for each, reference, first in zip(found, references, firsts, strict=True):
                assert each.logprobs.dtype == np.float32
                np.testing.assert_allclose(each.logprobs, reference[first - 1 :], atol=1e-5)
                assert np.isnan(each.against).all()
        (one,) = await client.score(sequences[:1], [5], "another salt", against=7)
        everywhere = [
            np.append(sequences[0][:at], np.int32(7)) for at in range(5, len(sequences[0]))
        ]
        expected = [each[-1] for each in scores(stack.models["a"], everywhere)]
        np.testing.assert_allclose(one.against, expected, atol=1e-5)
        with pytest.raises(ServerRefused, match="400"):
            await client.score([np.ones(3000, np.int32)], [1], "salt")


async def test_a_request_that_cannot_be_is_refused(stack: Stack) -> None:
    async with stack.client() as client:
        with pytest.raises(ServerRefused, match="400"):
            await client.generate(np.ones(3000, np.int32), 5)


async def test_the_longest_input_leaves_the_last_positions_free(stack: Stack) -> None:
    context = (
        stack.recipe.length.context_tokens + len(stack.recipe.length.interruption) + KEPT_FROM_INPUT
    )
    longest = np.ones(context - KEPT_FROM_INPUT, np.int32)
    async with stack.client() as client:
        await client.generate(longest, 1)
        await client.score([longest], [1], "salt")
        for call in (
            client.generate(np.append(longest, 1), 1),
            client.generate(longest, KEPT_FROM_INPUT + 1),
        ):
            with pytest.raises(ServerRefused, match="400"):
                await call


async def test_keys_are_asked_for(stack: Stack) -> None:
    async with ServerClient(stack.server.address, "wrong", "wrong", 30) as client:
        with pytest.raises(ServerRefused, match="401"):
            await client.generate(PROMPT, 5)
    async with ServerClient(stack.server.address, "user-key", "user-key", 30) as client:
        with pytest.raises(ServerSaid, match="continue: 401"):
            await client.resume()
    assert "admin-key" not in stack.server.log.read_text()


async def test_its_load_its_cache_and_its_relay(stack: Stack) -> None:
    begun = list[int]()
    heard = list[RelayedAnswer]()
    url = stack.server.address.url

    def hear(answer: RelayedAnswer) -> None:
        heard.append(answer)

    async with stack.client() as client:
        prompt = np.arange(64, dtype=np.int32)
        first = await client.generate(
            prompt, 20, cache_salt="load", ignore_eos=True, started=lambda: begun.append(1)
        )
        second = await client.generate(
            np.concatenate([prompt, first.tokens]), 5, cache_salt="load", ignore_eos=True
        )
        assert (first.cached, second.cached) == (
            0,
            64 + 20 - 1,
        ), "the last token's keys and values were not computed"
        assert begun
        async with asyncio.timeout(30):  # SGLang says it a little after a request's end
            while await client.current_load() != (0.0, 0):
                await asyncio.sleep(0.1)
        many = [
            asyncio.create_task(client.generate(prompt, 1200, ignore_eos=True)) for _ in range(36)
        ]
        # 36 of 1,264 tokens do not fit into 16,384: SGLang lets some wait, and says so
        # a little later
        async with asyncio.timeout(60):
            while not (load := await client.current_load()).waiting:
                await asyncio.sleep(0.1)
        assert 0 < load.usage <= 1
        await client.relay(
            RelayedCall("/v1/loads", "", [url, url], 10), stack.endpoints.api_key, hear
        )
        assert sorted(p for answer in heard for p in answer.positions) == [0, 1]
        assert {answer.status for answer in heard} == {200}
        await client.abort_all()
        await asyncio.gather(*many, return_exceptions=True)


async def test_an_aborted_request_keeps_what_had_arrived(stack: Stack) -> None:
    async with stack.client() as client:
        task = await under_way(client, PROMPT, 1400)
        await client.abort_all()
        with pytest.raises(ServerLost, match="abort") as caught:
            await task
        assert await client.health()
    assert await asyncio.to_thread(idle, stack)
    lost = caught.value
    assert 0 < len(lost.tokens) < 1400
    reference = completion_scores(stack.models["a"], PROMPT, lost.tokens)
    np.testing.assert_allclose(lost.logprobs, reference, atol=1e-5)


async def test_a_cancelled_request_ends_on_the_server(stack: Stack) -> None:
    async with stack.client() as client:
        task = await under_way(client, PROMPT, 1400)
        task.cancel()
        for _ in range(600):
            if await asyncio.to_thread(idle, stack):
                return
            await asyncio.sleep(0.1)
    pytest.fail("the cancelled request still runs")


def test_its_log_says_what_it_runs_with(stack: Stack) -> None:
    (line,) = [line for line in stack.server.log.read_text().splitlines() if "server_args=" in line]
    assert "'enable_fp32_lm_head': True" in line
    assert "'disable_overlap_schedule': False" in line
