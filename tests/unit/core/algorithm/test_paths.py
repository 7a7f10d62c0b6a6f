"""Rollouts of agents: paths as the learner sees them, how they weigh, and what is taken off their rewards."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.core.algorithm.batch import advantage_statistics, sequences_in_loss, with_advantages
from megarl.core.base.types import (
    Batch,
    Branch,
    Group,
    Prompt,
    Rollout,
    Segment,
    decode,
    encode,
    float32,
    int32,
    paths_of,
)
from megarl.core.controller.parity import compared
from megarl.core.recipe import from_tree

PROMPT = int32([90, 91])


def segment(tokens: list[int], trained: bool = True, version: int = 0) -> Segment:
    logprobs = float32([-0.5 * trained] * len(tokens))
    return Segment(tokens=int32(tokens), logprobs=logprobs, weight_version=version, trained=trained)


def rollout(sample: int, reward: float, segments: list[Segment], *paths: Branch) -> Rollout:
    return Rollout(
        sample=sample, segments=tuple(segments), reward=reward, correct=reward > 0, finish="stop", paths=paths
    )


AGENT = rollout(
    0,
    1.0,
    [
        segment([1, 2], False),
        segment([3, 4]),
        segment([5], False),
        segment([6]),
        segment([7], False),
        segment([8, 9, 9]),
    ],
    Branch(segments=4),
    Branch(segments=2, parent=0, shared=4),
)
"""Two turns, and another one that goes on after the first."""
PLAIN = rollout(1, -1.0, [segment([3, 3, 3]), segment([4], False), segment([5])])


def recipe(**batch: object):  # type: ignore[no-untyped-def]
    return from_tree({"batch": {"prompts": 1} | batch, "sampling": {"generations": 2}})


BATCH = Batch(
    step=0, groups=(Group(ticket=7, prompt=Prompt(id="p", tokens=PROMPT, answer=""), rollouts=(AGENT, PLAIN)),)
)


def test_paths_as_written_out_by_hand() -> None:
    first, second = paths_of(AGENT.segments, AGENT.paths, PROMPT)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.trained.tolist() == [False, False, True, True, False, True]
    assert second.tokens.tolist() == [1, 2, 3, 4, 7, 8, 9, 9]
    assert second.trained.tolist() == [False] * 5 + [True] * 3, "what the first path trains is masked here"
    assert second.logprobs.tolist() == [0] * 5 + [-0.5] * 3
    assert second.own == 4
    assert AGENT.trained_tokens == 6 == first.trained.sum() + second.trained.sum()


def test_a_plain_rollout_is_prompt_and_completion() -> None:
    (only,) = paths_of(PLAIN.segments, (), PROMPT)
    assert only.tokens.tolist() == [90, 91, 3, 3, 3, 4, 5]
    assert only.trained.tolist() == [False, False, True, True, True, False, True]
    (sequence,) = [s for s in sequences_in_loss(BATCH, recipe()) if s.sample == 1]
    assert np.array_equal(sequence.tokens, np.concatenate([PROMPT, PLAIN.tokens]))
    assert sequence.behaviour_logprobs.dtype == sequence.loss_weight.dtype == np.float32


@pytest.mark.parametrize("aggregation", ["prompt", "sample", "token", "constant"])
def test_a_rollout_weighs_the_same_however_its_tokens_lie_in_paths(aggregation: str) -> None:
    whole = replace_agent(rollout(0, 1.0, [segment([3] * 6)]))
    weights = [
        {
            sample: sum(float(s.loss_weight.sum(dtype=np.float64)) for s in sequences if s.sample == sample)
            for sample in (0, 1)
        }
        for batch in (BATCH, whole)
        if (sequences := sequences_in_loss(batch, recipe(aggregation=aggregation)))
    ]
    assert weights[0] == pytest.approx(weights[1])
    total = sum(weights[0].values())
    assert total == pytest.approx(1) if aggregation != "constant" else 0 < total < 1


def replace_agent(other: Rollout) -> Batch:
    group = BATCH.groups[0]
    return Batch(step=0, groups=(Group(ticket=7, prompt=group.prompt, rollouts=(other, PLAIN)),))


def test_penalties_of_paths_add() -> None:
    """The advantages are those of one sequence with the sum of both penalties, not the last one's."""
    settings = recipe(advantage="none")
    sequences = sequences_in_loss(BATCH, settings)
    assert [(s.sample, len(s)) for s in sequences] == [(0, 6), (0, 8), (1, 7)]
    penalised = [replace(s, kl_penalty=penalty) for s, penalty in zip(sequences, (0.25, 0.5, 0.0), strict=True)]
    found, _ = with_advantages(penalised, BATCH, settings)
    rewards = np.array([1 - 0.75, -1.0])
    assert [s.advantage for s in found] == pytest.approx(
        [*[rewards[0] - rewards.mean()] * 2, rewards[1] - rewards.mean()]
    )
    assert advantage_statistics(found)["advantage_mean"] == pytest.approx(0), "each rollout counts once"


def test_what_parity_compares_of_a_path() -> None:
    before, after = compared(PROMPT, AGENT.segments, AGENT.paths, choice=1)
    assert before.tolist() == [1, 2, 3, 4, 7]
    assert [s.tokens.tolist() for s in after] == [[8, 9, 9]]
    before, after = compared(PROMPT, AGENT.segments, AGENT.paths, choice=2)
    assert before.tolist() == [1, 2]
    assert [s.tokens.tolist() for s in after] == [[3, 4], [5], [6]]
    before, after = compared(PROMPT, PLAIN.segments, (), choice=5)
    assert before is PROMPT
    assert after == PLAIN.segments


def test_paths_pass_between_roles() -> None:
    back = decode(encode(BATCH), Batch).groups[0].rollouts[0]
    assert encode(back) == encode(AGENT)
