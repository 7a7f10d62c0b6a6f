"""The teacher's scores, by a real server: transformers' log-probs; a rollout without
scores is void.
"""

import time

import numpy as np
import pytest

from megarl.core.algorithm.advantages import with_advantages
from megarl.core.algorithm.batch import sequences_in_loss
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment
from megarl.core.controller.teacher import TeacherEndpoint
from megarl.core.recipe import Recipe
from megarl.core.sampling.sampler import Void
from megarl.run.process import free_ports
from tests.stack.conftest import Stack, stack_recipe
from tests.tiny_scores import scores

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.usefixtures("serves_a")]

PROMPT = np.arange(5, 25, dtype=np.int32)


def segment(random: np.random.Generator, n: int, trained: bool = True) -> Segment:
    logprobs = (
        -random.exponential(2.0, n).astype(np.float32) if trained else np.zeros(n, np.float32)
    )
    return Segment(
        tokens=random.integers(5, 90, n, dtype=np.int32),
        logprobs=logprobs,
        weight_version=0,
        trained=trained,
    )


def rollout(random: np.random.Generator) -> tuple[Segment, ...]:
    return segment(random, 40), segment(random, 6, trained=False), segment(random, 3)


@pytest.fixture(autouse=True)
def teacher_key(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", stack.endpoints.api_key)


def distilled(stack: Stack, weight: float = 0.5, timeout_s: float = 20.0, url: str = "") -> Recipe:
    url = url or stack.server.address.url
    return stack_recipe(
        stack.directory,
        teacher={"url": url, "api_key": "env:TEACHER_KEY", "weight": weight},
        batch={"zero_variance": "keep", "prompts": 1},
        sampling={"generations": 2},
        weights={"timeout_s": timeout_s},
    )


@pytest.mark.parametrize("weight", [1.0, 0.25])
async def test_advantages_are_transformers_log_probs_less_the_recorded_ones(
    stack: Stack, weight: float
) -> None:
    recipe = distilled(stack, weight)
    random = np.random.default_rng(0)
    asked = TeacherEndpoint(recipe)
    try:
        each = [rollout(random) for _ in range(2)]
        given = [await asked.logprobs(PROMPT, segments) for segments in each]
    finally:
        await asked.close()
    rollouts = tuple(
        Rollout(sample=n, segments=s, reward=r, correct=r > 0, finish="stop", teacher_logprobs=g)
        for n, (s, r, g) in enumerate(zip(each, (1.0, -1.0), given, strict=True))
    )
    batch = Batch(
        step=0,
        groups=(
            Group(ticket=0, prompt=Prompt(id="", tokens=PROMPT, answer=""), rollouts=rollouts),
        ),
    )
    sequences, _ = with_advantages(sequences_in_loss(batch, recipe), batch, recipe)
    expected = scores(stack.models["a"], [s.tokens for s in sequences])
    for sequence, logprobs, r in zip(sequences, expected, rollouts, strict=True):
        first = len(PROMPT)
        trained = r.trained
        # Of two rewards, 1 and -1 are the advantages.
        gain = weight * (logprobs[first - 1 :] - r.logprobs) + (1 - weight) * r.reward
        assert isinstance(sequence.advantage, np.ndarray)
        np.testing.assert_allclose(sequence.advantage[first:][trained], gain[trained], atol=1e-5)
        assert len(sequence.advantage) == len(sequence.tokens)
        assert not r.teacher_logprobs[~trained].any()  # type: ignore[index]


async def test_without_a_teacher_that_answers_a_rollout_is_void_within_the_limit(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.core.recipe.tree.START_S", 0.0)
    (dead,) = free_ports(1)
    asked = TeacherEndpoint(distilled(stack, timeout_s=1.0, url=f"http://127.0.0.1:{dead}"))
    began = time.monotonic()
    try:
        with pytest.raises(
            Void,
            match=(
                r"no teacher scored a rollout within 2 s \(twice weights.timeout_s, at least 1200"
                r" s\): "
            ),
        ):
            await asked.logprobs(PROMPT, rollout(np.random.default_rng(0)))
    finally:
        await asked.close()
    assert 0.5 < time.monotonic() - began < 10


async def test_a_token_that_the_teacher_has_not_is_refused_at_once(stack: Stack) -> None:
    asked = TeacherEndpoint(distilled(stack))
    beyond = Segment(
        tokens=np.array([10**6], np.int32), logprobs=np.zeros(1, np.float32), weight_version=0
    )
    try:
        with pytest.raises(Void, match="the teacher refuses a rollout"):
            await asked.logprobs(PROMPT, (beyond,))
    finally:
        await asked.close()
