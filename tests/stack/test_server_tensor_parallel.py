"""A server of two tensor-parallel ranks, as the 17Bx16 needs: log-probs, then weights
by handles to a learner's memory, over a process group (gloo and the stand-in for NCCL),
and from disk. The learner has two ranks, too, with a part of each tensor, or each with
a copy of the model, of which it sends half.
"""

import asyncio
from collections.abc import Iterator

import pytest

from megarl.core.base.architecture import in_directory
from tests.pessimistic_nccl import NAME as PESSIMISTIC_NCCL
from tests.stack.conftest import Stack, running, two_models
from tests.stack.publish_world import BROKEN, NO_MEMORY, NUDGED, SAME, UNMADE, publish_from
from tests.stack.test_server_families import CASES, ENDLESS, LLAMA4, assert_serves
from tests.tiny import (
    tiny_deepseek_v3,
    tiny_gpt_oss,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_qwen3_5_moe,
)

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.timeout(900)]


COPIES = "model.tensor_parallel=1"
"""Makes two data-parallel copies of a learner's two ranks. A server of two ranks gets
half of the weights from each.
"""
MODELS = {
    "llama4": (tiny_llama4, LLAMA4 | {"num_key_value_heads": 2}),
    "deepseek_v3": (tiny_deepseek_v3, CASES["deepseek_v3"].overrides),
    "minimax_m2": (tiny_minimax_m2, {"intermediate_size": 64}),
    "gpt_oss": (tiny_gpt_oss, {"intermediate_size": 64}),
    "qwen3_5_moe": (
        tiny_qwen3_5_moe,
        {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        "llama4",
        *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "llama4"),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("tensor_parallel")
    make, overrides = MODELS[request.param]
    models = two_models(directory, make, **ENDLESS, **overrides)
    with running(
        directory,
        models,
        resources={"server_tensor_parallel": 2, "learner_ranks": 2, "colocate": True},
        model={"tensor_parallel": 2},
        weights={"transport": "cuda_ipc"},
        serving={"memory_fraction": 0.5},
    ) as stack:
        yield stack


async def test_two_ranks_serve_what_is_published(served: Stack) -> None:
    await assert_serves(served, "a")
    used = served.server.cpu_seconds()
    await asyncio.sleep(1.0)
    assert served.server.cpu_seconds() - used < 0.5, "an idle rank spins"
    by_group = ["weights.transport=process_group", "resources.colocate=false"]
    publications = [
        ("b", [], ""),
        ("a", by_group, "gloo"),
        ("b", ["weights.transport=disk"], ""),
        ("a", by_group, PESSIMISTIC_NCCL),
        ("b", [*by_group, COPIES], PESSIMISTIC_NCCL),
        ("a", [*by_group, COPIES, "model.expert_parallel=2"], "gloo"),
    ]
    if not in_directory(served.directory / "a").biases:  # megatron does not divide experts' biases
        publications += [("b", [*by_group, COPIES, "model.expert_tensor_parallel=2"], "gloo")]
    found = await asyncio.to_thread(publish_from, served, 2, 0, publications)
    await assert_serves(served, publications[-1][0])
    assert [error for error, *_ in found] == [""] * len(found)
    by_name = {
        name: checksum
        for (name, *_), (_, checksum, _) in zip(publications[:2], found[:2], strict=True)
    }
    assert by_name["a"] != by_name["b"]
    assert [checksum for _, checksum, _ in found] == [by_name[name] for name, *_ in publications]
    (sent,) = {size for *_, size in found[3:]}
    assert sent == found[1][2]


async def test_when_one_source_fails_all_send_again(served: Stack) -> None:
    overrides = [
        "weights.transport=process_group",
        "weights.full_every=9",
        "resources.colocate=false",
        COPIES,
    ]
    plan = [(name, overrides, "gloo") for name in ("a", NUDGED, BROKEN, UNMADE, SAME)]
    found = await asyncio.to_thread(publish_from, served, 2, 20, plan)
    (_, _, whole), (_, before, changes), (_, after, again), (unmade, *_), everything = found
    assert [error for error, *_ in found] == ["", "", "", unmade, ""]
    assert unmade.endswith(f"the learner could not make what it sends: {NO_MEMORY}")
    # Once a group is broken, it is unknown which changes a server has added.
    assert changes < 0.1 * whole
    assert again == whole
    assert before != after
    assert everything == ("", after, whole)


@pytest.mark.parametrize(
    ("transport", "layout"),
    [
        ("process_group", []),
        pytest.param("process_group", [COPIES], marks=pytest.mark.slow),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("cuda_ipc", "disk")),
    ],
)
async def test_deltas_reach_both_ranks(served: Stack, transport: str, layout: list[str]) -> None:
    """Experts, fused and turned tensors too.
    Everything, sent again, changes nothing.
    """
    overrides = [f"weights.transport={transport}", "weights.full_every=9", *layout]
    if transport == "process_group":
        overrides.append("resources.colocate=false")
    plan = [(name, overrides, "gloo") for name in ("a", NUDGED, NUDGED, SAME)]
    found = await asyncio.to_thread(publish_from, served, 2, 10, plan)
    assert [error for error, *_ in found] == [""] * 4
    first, second, third, again = (checksum for _, checksum, _ in found)
    assert len({first, second, third}) == 3
    assert again == third
    whole, *deltas, whole_again = (size for *_, size in found)
    assert whole == whole_again
    assert all(size < 0.1 * whole for size in deltas)
