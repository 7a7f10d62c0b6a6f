"""A server of two ranks, each with half of the experts (serving.expert_parallel):
log-probs, the experts that it chose, and weights by every transport. The learner has
two ranks, too.
"""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from megarl.core.models import family_of
from megarl.core.sampling.sampler import routed_model
from megarl.core.sync.served import RankParameter
from megarl.core.sync.transport import SentChecksums, differing_experts
from tests.pessimistic_nccl import NAME as PESSIMISTIC_NCCL
from tests.stack.conftest import Stack, running, two_models
from tests.stack.publish_world import NUDGED, publish_from
from tests.stack.test_server_families import (
    CASES,
    ENDLESS,
    assert_serves,
    experts_of,
    random_prompt,
)

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.timeout(900)]

RANKS = 2
WIDTH = 64
"""One of an expert: on a CPU SGLang pads others, whose checksums are then unknown."""
SLOW = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe", "qwen3_next")
DIVIDED = ["model.tensor_parallel=1", "model.expert_parallel=2"]
"""A learner whose ranks have half of the experts each, and a copy of all else."""


@pytest.fixture(
    scope="module",
    params=["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    case = CASES[request.param]
    directory = tmp_path_factory.mktemp("experts")
    overrides = ENDLESS | case.overrides | {"moe_intermediate_size": WIDTH}
    with running(
        directory,
        two_models(directory, case.make, **overrides),
        resources={"server_tensor_parallel": RANKS, "learner_ranks": RANKS, "colocate": True},
        model={"tensor_parallel": RANKS, "moe": {"routing_replay": True}},
        weights={"transport": "cuda_ipc"},
        serving={"memory_fraction": 0.5, "expert_parallel": True},
    ) as stack:
        yield stack


async def test_log_probs_and_chosen_experts(served: Stack, request: pytest.FixtureRequest) -> None:
    await assert_serves(served, "a")
    routed = routed_model(served.recipe)
    assert routed is not None
    prompt = random_prompt(30)
    async with served.client() as client:
        generation = await client.generate(prompt, 20, routing_from=0)
    table = routed.routing([routed.routed_experts(generation.routing)]).table
    tokens = np.concatenate([prompt, generation.tokens])
    routers = CASES[request.node.callspec.params["served"]].routers
    chosen = experts_of(served.models["a"], routers, tokens, routed.experts_per_token)
    np.testing.assert_array_equal(np.sort(table, -1), chosen[:-1])


async def test_every_transport_reaches_the_rank_of_each_expert(served: Stack) -> None:
    by_group = ["weights.transport=process_group", "resources.colocate=false"]
    deltas = [*by_group, "weights.full_every=9"]
    publications = [
        ("b", [], ""),
        ("a", [*by_group, *DIVIDED], PESSIMISTIC_NCCL),
        ("b", ["weights.transport=disk"], ""),
        ("a", deltas, "gloo"),
        (NUDGED, deltas, "gloo"),
    ]
    found = await asyncio.to_thread(publish_from, served, RANKS, 0, publications)
    assert [error for error, *_ in found] == [""] * len(found)
    b, a, b_by_disk, a_by_gloo, nudged = [checksum for _, checksum, _ in found]
    assert len({a, b, nudged}) == 3
    assert (a_by_gloo, b_by_disk) == (a, b)
    whole, changes = (size for *_, size in found[3:])
    assert changes < 0.1 * whole
    async with served.client() as client:
        await client.load(str(served.directory / "b"), 20)
        assert (await client.checksums()).combined == b
    await assert_serves(served, "b")


async def test_the_learner_knows_what_each_rank_must_hold(served: Stack) -> None:
    """By the tensors that it sends; two experts in each other's place are noticed."""
    directory = served.directory / "a"
    async with served.client() as client:
        await client.load(str(directory), 21)
        held = await client.checksums()
    sent = load_file(directory / "model.safetensors")

    def differing(tensors: dict[str, Tensor]) -> list[str]:
        sums = SentChecksums(family_of(directory).architecture, RANKS)
        list(sums.watch(tensors.items()))
        expected = sums.expected_experts()
        names = {name for name in held.by_rank[0] if ".experts." in name}
        assert expected.keys() == {
            RankParameter(rank, name) for rank in range(RANKS) for name in names
        }
        return differing_experts(expected, held.by_rank)

    assert differing(sent) == []
    first, *_, last = sorted(
        name for name in sent if ".experts." in name and name.endswith("down_proj.weight")
    )
    exchanged = sent | {first: sent[last], last: sent[first]}
    wrong = differing(exchanged)
    assert [name.rpartition(" ")[2] for name in wrong] == ["0", "1"]
