"""A real server of each family: log-probs against transformers, publication from disk,
and what it is served from.

A server serves one architecture and takes seconds to start, so all tests of a family
share one.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.base.architecture import in_directory
from megarl.core.base.hf_tensors import expected_shapes
from megarl.core.base.messages import Publish
from megarl.core.client.client import ServerClient
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.sampling.sampler import routed_model
from megarl.core.sync.publisher import Publisher
from megarl.core.sync.served import place
from tests.stack.conftest import POSITIONS, Stack, running, two_models, under_way
from tests.stack.publish_world import nudge, publish_from
from tests.stack.test_publication import PROMPT, kept_cache_scores
from tests.tiny import (
    CARD_YARN,
    MOONLIGHT,
    PLAIN_ROPE,
    YARN,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_5_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)
from tests.tiny_scores import difference, scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.timeout(900)]

VOCABULARY = 130


@dataclass(frozen=True)
class Case:
    """routers: how the names of transformers' routers end."""

    make: Callable[..., Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    routers: str = ""


ENDLESS = {
    "eos_token_id": None,
    "bos_token_id": None,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCABULARY,
}
STRETCHED = CARD_YARN | {"original_max_position_embeddings": POSITIONS // 4}
LLAMA4 = {"interleave_moe_layer_step": 2, "moe_layers": [1, 3]}
THREE_ROWS = PLAIN_ROPE | {
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
"""Positions in a row each of text, height and width, as of released Qwen3.5."""
CASES = {
    "qwen2": Case(  # SGLang's heads have hidden_size / num_attention_heads
        tiny_qwen2, {"head_dim": 8, "rope_parameters": STRETCHED}
    ),
    "qwen3": Case(
        tiny_qwen3,
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": STRETCHED},
    ),
    "qwen3_moe": Case(
        tiny_qwen3_moe,
        {"num_experts": 8, "moe_intermediate_size": 32, "rope_parameters": STRETCHED},
        "mlp.gate",
    ),
    "glm4_moe": Case(tiny_glm4_moe, {"moe_intermediate_size": 32}, "mlp.gate"),
    "glm4_moe_lite": Case(tiny_glm4_moe_lite, {"moe_intermediate_size": 32}, "mlp.gate"),
    "deepseek_v3": Case(
        tiny_deepseek_v3,
        {
            "moe_intermediate_size": 32,
            "rope_parameters": YARN | {"original_max_position_embeddings": POSITIONS // 8},
        },
        "mlp.gate",
    ),
    "moonlight": Case(
        tiny_deepseek_v3,
        MOONLIGHT | {"moe_intermediate_size": 32, "rope_parameters": PLAIN_ROPE},
        "mlp.gate",
    ),
    "minimax_m2": Case(tiny_minimax_m2, {"intermediate_size": 32}, "mlp.gate"),
    "gpt_oss": Case(tiny_gpt_oss, {"intermediate_size": 32}, "mlp.router"),
    "llama4": Case(tiny_llama4, LLAMA4, "feed_forward.router"),
    "llama4_multimodal": Case(tiny_llama4_multimodal, LLAMA4, "feed_forward.router"),
    "qwen3_5": Case(tiny_qwen3_5, {"linear_num_value_heads": 4}),
    "qwen3_5_multimodal": Case(tiny_qwen3_5_multimodal, {"rope_parameters": THREE_ROWS}),
    "qwen3_5_moe": Case(tiny_qwen3_5_moe, {"moe_intermediate_size": 32}, "mlp.gate"),
    "qwen3_5_moe_multimodal": Case(
        tiny_qwen3_5_moe_multimodal,
        {"moe_intermediate_size": 32, "rope_parameters": THREE_ROWS},
        "mlp.gate",
    ),
    # A base and a share of rotation that are not SGLang's own for this model.
    "qwen3_next": Case(
        tiny_qwen3_next,
        {
            "moe_intermediate_size": 32,
            "rope_parameters": PLAIN_ROPE | {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        "mlp.gate",
    ),
}


BALANCED = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "moonlight", "minimax_m2")
DELTA = tuple(name for name in CASES if name.startswith(("qwen3_5", "qwen3_next")))
SLOW = (
    "glm4_moe",
    "glm4_moe_lite",
    "moonlight",
    "minimax_m2",
    "qwen3_5",
    "qwen3_5_multimodal",
    "qwen3_5_moe",
    "qwen3_next",
)
"""What these have, deepseek_v3, qwen3_5_moe_multimodal or another has, too, except
MiniMax-M2's norms.
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    model = {
        "path": str(directory / "a"),
        "dtype": "fp32",
        "moe": {"routing_replay": bool(case.routers)},
    }
    with running(
        directory, two_models(directory, case.make, **ENDLESS, **case.overrides), model=model
    ) as stack:
        yield stack


def random_prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCABULARY, length, dtype=np.int32)


async def assert_serves(stack: Stack, name: str) -> None:
    """The server's log-probs are those of transformers' model; prompts and completions
    cross the borders of chunks of 16.
    """
    prompts = [random_prompt(n) for n in (1, 7, 16, 17, 90)]
    async with stack.client() as client:
        done = await asyncio.gather(*(client.generate(p, 60, cache_salt=name) for p in prompts))
    for prompt, generation in zip(prompts, done, strict=True):
        (all_scores,) = scores(stack.models[name], [np.concatenate([prompt, generation.tokens])])
        np.testing.assert_allclose(generation.logprobs, all_scores[len(prompt) - 1 :], atol=1e-5)


async def test_logprobs_are_transformers_also_after_weights_from_disk(served: Stack) -> None:
    await assert_serves(served, "a")
    async with served.client() as client:
        before, _ = await client.checksums()
        await client.load(str(served.directory / "b"), 1)
        await assert_serves(served, "b")
        assert (await client.checksums())[0] != before


@torch.no_grad()
def experts_of(model: Any, routers: str, tokens: np.ndarray, chosen: int) -> np.ndarray:
    """What the routers of transformers' model choose: [tokens, layers with experts,
    chosen], in order of number.
    """
    tables: list[torch.Tensor] = []

    def choose(router: Any, inputs: tuple[torch.Tensor, ...], outputs: Any) -> None:
        logits = torch.nn.functional.linear(
            inputs[0].reshape(-1, inputs[0].shape[-1]), router.weight
        )
        biased = len(inputs) > 1 or any(
            getattr(router, name, None) is not None for name in ("e_score_correction_bias", "bias")
        )
        best = outputs[2] if biased else logits.topk(chosen).indices
        tables.append(best.sort().values)

    hooks = [
        m.register_forward_hook(choose)
        for name, m in model.named_modules()
        if name.endswith(routers)
    ]
    model(torch.from_numpy(tokens.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(tables, 1).numpy()


async def test_the_server_says_which_experts_it_chose(
    served: Stack, request: pytest.FixtureRequest
) -> None:
    """All tokens but the last, over two requests of which the second goes on from the
    first.
    """
    routers = CASES[request.node.callspec.params["served"]].routers
    routed = routed_model(served.recipe)
    if not routers:
        assert routed is None
        return
    assert routed is not None
    prompt = random_prompt(30)
    async with served.client() as client:
        await client.load(str(served.directory / "a"), 2)
        first = await client.generate(prompt, 20, routing_from=0)
        tables = [routed.routed_experts(first.routing)]
        longer = np.concatenate([prompt, first.tokens, random_prompt(5)])
        second = await client.generate(longer, 20, routing_from=len(tables[0]))
    routing = routed.routing([*tables, routed.routed_experts(second.routing)])
    tokens = np.concatenate([longer, second.tokens])
    assert routing.table.dtype == np.uint8
    expected = experts_of(served.models["a"], routers, tokens, routed.experts_per_token)[:-1]
    np.testing.assert_array_equal(np.sort(routing.table, -1), expected)


async def test_a_retracted_request_says_which_experts_sampled_its_tokens(
    served: Stack, request: pytest.FixtureRequest
) -> None:
    """It is computed again with the weights of model b, by which its tokens so far were
    not sampled.
    """
    routers = CASES[request.node.callspec.params["served"]].routers
    routed = routed_model(served.recipe)
    if routed is None:
        return
    prompt = random_prompt(30)
    began = asyncio.Event()
    async with served.client() as client:
        await client.load(str(served.directory / "a"), 3)
        sampling = client.generate(
            prompt, 400, cache_salt="retracted", routing_from=0, started=began.set
        )
        task = asyncio.create_task(sampling)
        await asyncio.wait_for(began.wait(), 60)
        await client.pause("retract")
        await client.load(str(served.directory / "b"), 4)
        await client.resume()
        generation = await task
    tokens = np.concatenate([prompt, generation.tokens])
    sampled = next(span.end for span in generation.spans if span.version == 3)
    assert 0 < sampled < 400
    rows = len(prompt) + sampled - 1
    table = np.sort(routed.routing([routed.routed_experts(generation.routing)]).table, -1)
    by = {
        name: experts_of(served.models[name], routers, tokens, routed.experts_per_token)[:-1]
        for name in "ab"
    }
    np.testing.assert_array_equal(table[:rows], by["a"][:rows])
    assert (by["a"][:rows] != by["b"][:rows]).any()


def test_a_server_has_no_parameter_that_is_not_published(
    served: Stack, request: pytest.FixtureRequest
) -> None:
    """Of another one no checksum would be compared, and it would keep its first value.
    Of delta networks only: others have buffers that a checksum is told of.
    """
    if request.node.callspec.params["served"] not in DELTA:
        return
    model = in_directory(served.directory / "a")
    published = set()
    for name, shape in expected_shapes(model).items():
        published.add(place(name, torch.empty(shape), model).name)
    held = served.ask(lambda client: client.checksums()).by_rank[0]
    made_at_the_start = (".gemma_weight", ".axis_map", ".cos_sin_cache")
    assert {name for name in held if not name.endswith(made_at_the_start)} == published


async def test_states_are_kept_where_a_request_has_ended(
    served: Stack, request: pytest.FixtureRequest
) -> None:
    """On a CPU: a turn finds all of the turn before it but the last token; the same
    prompt again finds nothing, nor does one with the same beginning.
    """
    if request.node.callspec.params["served"] not in DELTA:
        return
    prompt = random_prompt(300)
    async with served.client() as client:
        await client.load(str(served.directory / "a"), 5)
        cached = []
        for _ in range(2):
            first = await client.generate(prompt, 40, cache_salt="turns")
            cached.append(first.cached)
        other_end = np.concatenate([prompt[:200], random_prompt(30)])
        cached.append((await client.generate(other_end, 5, cache_salt="turns")).cached)
        turn = np.concatenate([prompt, first.tokens, random_prompt(30)])
        second = await client.generate(turn, 40, cache_salt="turns")
    assert cached == [0, 0, 0]
    assert second.cached == len(prompt) + len(first.tokens) - 1
    (all_scores,) = scores(served.models["a"], [np.concatenate([turn, second.tokens])])
    np.testing.assert_allclose(second.logprobs, all_scores[len(turn) - 1 :], atol=1e-5)


LAYOUTS = [["model.tensor_parallel=2"], ["model.pipeline_parallel=2"]]
EXPERT_LAYOUTS = [[*layout, "model.expert_parallel=2"] for layout in LAYOUTS]
DIVIDED = {"qwen2": LAYOUTS} | dict.fromkeys(
    ("qwen3_moe", "llama4_multimodal", "gpt_oss", "glm4_moe", "moonlight"), EXPERT_LAYOUTS
)
DIVIDED |= {name: EXPERT_LAYOUTS if "moe" in name or "next" in name else LAYOUTS for name in DELTA}
"""Others are tested otherwise: Llama, dense models without biases, Llama 4 without its
vision tower.
"""


async def test_divided_learners_publish_the_whole_model(
    served: Stack, request: pytest.FixtureRequest
) -> None:
    """Experts, stages and shards (a Qwen2's biases too) that no rank has all of: the
    server then has the same bits as from the directory.
    """
    if (family := request.node.callspec.params["served"]) not in DIVIDED:
        return
    from_disk = {}
    async with served.client() as client:
        for name in ("a", "b", "a"):
            await client.load(str(served.directory / name), 3)
            from_disk[name], _ = await client.checksums()
    assert from_disk["a"] != from_disk["b"]
    publications = list(zip(["b", "a"], DIVIDED[family], ["gloo", "gloo"], strict=True))
    found = await asyncio.to_thread(publish_from, served, 4, 4, publications)
    for (name, *_), (error, checksum, size) in zip(publications, found, strict=True):
        assert (error, checksum) == ("", from_disk[name])
        assert size == language_bytes(served.models[name])
    await assert_serves(served, "a")


def language_bytes(model: Any) -> int:
    """Return the bytes of the parameters and routers' biases of transformers' model,
    without a vision tower.
    """
    towers = (
        "model.visual",
        "vision_model",
        "model.vision_model",
        "multi_modal_projector",
        "model.multi_modal_projector",
    )
    biases = sum(
        buffer.nbytes for name, buffer in model.named_buffers() if name.endswith("correction_bias")
    )
    return biases + sum(
        p.nbytes for name, p in model.named_parameters() if not name.startswith(towers)
    )


async def test_tensors_arrive_one_by_one_while_it_generates(
    served: Stack, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """SGLang's loader of DeepSeek-V3 wants two tensors in one call, that of gpt-oss
    whole stacks of experts; loading fills what DeepSeek-V3's attention computes with in
    place. A request that goes on over the publication has log-probs of the old weights
    before the swap and of the new ones after it.
    """
    if request.node.callspec.params["served"] not in (*BALANCED, *DELTA, "gpt_oss"):
        return
    recipe = served.recipe.model_copy(
        update={"weights": served.recipe.weights.model_copy(update={"full_every": 3})}
    )
    parallel.start(recipe.model, seed=0, timeout_s=60)
    try:
        chunks = build.build(recipe.model, served.directory / "a")
        family = family_of(served.directory / "a")
        publisher = Publisher(recipe, served.endpoints, chunks, family)
        publisher._transport._bucket_bytes = 1  # type: ignore[attr-defined]

        def publish(version: int) -> str:
            published = publisher.publish(
                Publish(version=version, servers=(served.server.address,)), "test"
            )
            assert published is not None
            (result,) = published.results
            assert result.error == ""
            return result.checksum

        hf.load(chunks, family, served.directory / "a")
        await asyncio.to_thread(publish, 20)
        async with served.client() as client:
            running = await under_way(client, PROMPT, 900)
            hf.load(chunks, family, served.directory / "b")
            await asyncio.to_thread(publish, 21)
            generation = await running
        old, new = generation.spans
        assert (old.version, new.version) == (20, 21)
        models = served.models
        expected = kept_cache_scores(models["a"], models["b"], PROMPT, generation.tokens, new.start)
        np.testing.assert_allclose(generation.logprobs, expected, atol=2e-5)
        await assert_serves(served, "b")

        nudge(chunks, 22)
        delta = await asyncio.to_thread(publish, 22)  # as differences
        hf.save(chunks, family, served.directory / "b", tmp_path / "nudged")
        nudged = type(models["b"]).from_pretrained(tmp_path / "nudged", attn_implementation="eager")
        assert (
            await asyncio.to_thread(difference, served.server.address.url, served.endpoints, nudged)
            < 1e-5
        )
        publisher = Publisher(recipe, served.endpoints, chunks, family)
        assert await asyncio.to_thread(publish, 23) == delta
        disk = recipe.model_copy(
            update={"weights": recipe.weights.model_copy(update={"transport": "disk"})}
        )
        publisher = Publisher(disk, served.endpoints, chunks, family)
        assert await asyncio.to_thread(publish, 24) == delta
    finally:
        parallel.stop()


@pytest.mark.slow
def test_a_released_bf16_directory_keeps_its_fp32_tensors(tmp_path: Path) -> None:
    """A_log and the norms of delta networks: on the server, and as they are published
    by a learner in bf16.
    """
    case = CASES["qwen3_5_moe_multimodal"]
    models = two_models(tmp_path, case.make, dtype=torch.bfloat16, **ENDLESS, **case.overrides)
    model = {"path": str(tmp_path / "a"), "dtype": "bf16"}
    with running(tmp_path, models, model=model) as stack:
        from_disk = {}
        for name in "ba":
            stack.ask(partial(ServerClient.load, path=str(tmp_path / name), version=3))
            from_disk[name] = stack.ask(lambda client: client.checksums()).combined
        plan: list[tuple[str, list[str], str]] = [(name, [], "gloo") for name in "bab"]
        found = publish_from(stack, 1, 4, plan)
        for (name, *_), (error, checksum, _) in zip(plan, found, strict=True):
            assert (error, checksum) == ("", from_disk[name])
        sequences = [random_prompt(n) for n in (60, 70, 80, 90)]
        starts = [1] * len(sequences)
        served_scores = stack.ask(lambda client: client.score(sequences, starts, "bf16"))
    exact = scores(models["b"].float(), sequences)
    off = np.concatenate([s.logprobs - e for s, e in zip(served_scores, exact, strict=True)])
    print(f"log-probs in bf16 are off by {abs(off).mean():.1e}, mean")
    assert abs(off).mean() < 0.1
