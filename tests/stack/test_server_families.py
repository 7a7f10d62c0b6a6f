"""A real server of each family: log-probs against transformers, publication from disk, and what it is served from.

A server serves one architecture and takes seconds to start, so all tests of a family share one.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from megarl.weights.admin import Server
from tests.stack.conftest import POSITIONS, Stack, running, two_models
from tests.tiny import tiny_llama4, tiny_llama4_multimodal, tiny_qwen3, tiny_qwen3_moe
from tests.tiny_scores import scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio]

VOCABULARY = 130


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    overrides: dict[str, Any] = field(default_factory=dict)


ENDLESS = {"eos_token_id": None, "bos_token_id": None, "max_position_embeddings": POSITIONS, "vocab_size": VOCABULARY}
LLAMA4 = {"interleave_moe_layer_step": 2, "moe_layers": [1, 3]}
CASES = {
    "qwen3": Case(tiny_qwen3, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3_moe": Case(tiny_qwen3_moe, {"num_experts": 8, "moe_intermediate_size": 32}),
    "llama4": Case(tiny_llama4, LLAMA4),
    "llama4_multimodal": Case(tiny_llama4_multimodal, LLAMA4),
}


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    with running(directory, two_models(directory, case.make, **ENDLESS, **case.overrides)) as stack:
        yield stack


def random_prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCABULARY, length, dtype=np.int32)


async def assert_serves(stack: Stack, name: str) -> None:
    """The server's log-probs are those of transformers' model; prompts and completions cross the borders of chunks of 16."""
    prompts = [random_prompt(n) for n in (1, 7, 16, 17, 90)]
    async with stack.client() as client:
        done = await asyncio.gather(*(client.generate(p, 60, cache_salt=name) for p in prompts))
    for prompt, generation in zip(prompts, done, strict=True):
        (all_scores,) = scores(stack.models[name], [np.concatenate([prompt, generation.tokens])])
        np.testing.assert_allclose(generation.logprobs, all_scores[len(prompt) - 1 :], atol=1e-5)


async def test_logprobs_are_transformers_also_after_weights_from_disk(served: Stack) -> None:
    await assert_serves(served, "a")
    server = Server(served.server.address, 1, served.endpoints.api_key, served.endpoints.admin_key, 60)
    before, _ = await asyncio.to_thread(server.checksums)
    await asyncio.to_thread(server.load, str(served.directory / "b"), True)
    await assert_serves(served, "b")
    assert (await asyncio.to_thread(server.checksums))[0] != before
