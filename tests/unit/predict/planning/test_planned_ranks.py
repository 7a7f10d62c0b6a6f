"""What `megarl plan` counts, beside what megatron allocates on ranks of learners of 16
to 256 GPUs (tests/fake_ranks.py).

Of each layout a few ranks stand for all. Ranks of one pipeline stage hold shards of the
same shapes, whatever their tensor, expert and data parallelism; the optimiser's shares
differ by padding alone, which the last rank has. So the first and the last rank are
enough, and with two stages they are one of each.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base import architecture
from megarl.core.recipe import Recipe, load
from megarl.predict.planning import memory
from tests import fake_ranks
from tests.processes import LEARNERS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[4]
ALLOWED = 0.02
EIGHT = ("scalerl-8b", "llama-3.1-8b")
SCOUT = ("scalerl-17bx16", "llama-4-scout")


def ranks(recipe: str, config: str, numbers: list[int], *overrides: str) -> list[dict[str, Any]]:
    status, said = LEARNERS.run(
        fake_ranks.main, [recipe, config, numbers, list(overrides)], ROOT, os.environ, 500
    )
    assert status == 0, said[-4000:]
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def planned(recipe: Recipe, config: str) -> dict[str, float]:
    """Bytes on the rank with most, without what is offloaded; `saved`: of its part of a
    checkpoint.
    """
    shape = architecture.read(config)

    def state(offload: float) -> memory.LearnerMemory:
        learner = recipe.learner.model_copy(update={"optimizer_offload": offload})
        return memory.learner(recipe.model_copy(update={"learner": learner}), shape, 8192, 8)

    whole = state(0.0)
    without = state(1.0).state
    return {
        "weights": without * memory.HALF / (memory.HALF + memory.FP32),
        "gradients": without * memory.FP32 / (memory.HALF + memory.FP32),
        "adamw": whole.state - without,
        "saved": (
            whole.host - (whole.state - without) - 2 * without
        ),  # 12 bytes of 6 for each parameter
        "largest_bucket": memory.largest_bucket(recipe, shape),
    }


def off(found: dict[str, Any], recipe: Recipe, config: str) -> dict[str, float]:
    """How far the plan is from this rank, as shares of the rank's bytes."""
    return {name: size / found[name] - 1 for name, size in planned(recipe, config).items()}


@pytest.mark.parametrize(
    ("name", "config", "numbers", "overrides"),
    [
        pytest.param(*EIGHT, [0, 23], [], id="8b-24", marks=pytest.mark.slow),
        pytest.param(*EIGHT, [1, 7], [], id="8b-24, others", marks=pytest.mark.slow),
        pytest.param(
            *EIGHT,
            [0, 255],
            ["resources.learner_ranks=256", "batch.prompts=128"],
            id="8b-256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *EIGHT,
            [0, 79],
            ["resources.learner_ranks=80", "batch.prompts=40"],
            id="8b-80",
            marks=pytest.mark.slow,
        ),
        pytest.param(*SCOUT, [0, 31], [], id="17bx16-32", marks=pytest.mark.slow),
        pytest.param(*SCOUT, [0, 15, 16, 31], [], id="17bx16-32, others", marks=pytest.mark.slow),
        pytest.param(
            *SCOUT,
            [0, 79],
            ["resources.learner_ranks=80", "batch.prompts=50", "model.expert_parallel=8"],
            id="17bx16-80",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *SCOUT,
            [0, 255],
            ["resources.learner_ranks=256", "batch.prompts=64"],
            id="17bx16-256",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3-8b-2nodes", "qwen3-8b", [0], [], id="qwen3-8b"),
        pytest.param(
            "qwen3-8b-2nodes", "qwen3-8b", [3], [], id="qwen3-8b, last", marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3-30b-a3b-2nodes",
            "qwen3-30b-a3b",
            [0],
            [],
            id="qwen3-30b-a3b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_holds_what_is_planned(
    name: str, config: str, numbers: list[int], overrides: list[str]
) -> None:
    """The plan is of the rank that holds most:
    of a pipeline's stages one or the other.
    """
    recipe = load(name, overrides)
    found = ranks(name, config, numbers, *overrides)
    assert [each["rank"] for each in found] == numbers
    fullest = max(found, key=lambda each: each["weights"] + each["gradients"] + each["adamw"])
    assert max(map(abs, off(fullest, recipe, config).values())) < ALLOWED, (
        fullest,
        planned(recipe, config),
    )
    for each in found:
        assert min(off(each, recipe, config).values()) > -ALLOWED
        assert each["weights"] >= memory.HALF * each["parameters"]  # and padding
    stages = recipe.model.pipeline_parallel
    published = {
        each["rank"] // (recipe.resources.learner_ranks // stages): each["published"]
        for each in found
    }
    if len(published) == stages:
        assert sum(published.values()) == pytest.approx(
            2 * architecture.read(config).parameters, rel=ALLOWED
        )


@pytest.mark.slow
def test_copies_send_equal_parts_to_servers_of_several_gpus() -> None:
    """17Bx16: two copies of two stages of four tensor-parallel ranks. Each of a
    server's four GPUs has a source.
    """
    found = ranks(*SCOUT, [4, 8, 9], "resources.learner_ranks=16", "model.expert_parallel=8")
    assert [each["group"] for each in found] == [[1, 4], [2, 4], [2, 4]]
    for source in found[:2]:
        assert 0.45 < source["sent"] / source["published"] < 0.55
    assert found[2]["sent"] == 0


def test_another_layout_is_not_what_is_planned() -> None:
    (found,) = ranks(*EIGHT, [0], "model.tensor_parallel=4")
    assert max(map(abs, off(found, load(EIGHT[0]), EIGHT[1]).values())) > 0.3
