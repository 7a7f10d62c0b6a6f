"""Rollouts of agents: paths as the learner sees them, how they weigh, and what is
subtracted from their rewards.
"""

import statistics
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from megarl.core.algorithm.advantages import with_advantages
from megarl.core.algorithm.advantages.group import centred_rewards
from megarl.core.algorithm.batch import advantage_statistics, batch_statistics, sequences_in_loss
from megarl.core.base.types import (
    Batch,
    Branch,
    Group,
    Prompt,
    Rollout,
    Segment,
    decode,
    encode,
    int32,
    paths_of,
)
from megarl.core.controller.parity_schedule import compared
from megarl.core.recipe import Recipe, from_tree
from tests import make

PROMPT = int32([90, 91])


def segment(tokens: list[int], trained: bool = True, version: int = 0) -> Segment:
    return make.segment(tokens, version, logprob=-0.5 * trained, trained=trained)


def rollout(sample: int, reward: float, segments: list[Segment], *paths: Branch) -> Rollout:
    return make.rollout(*segments, reward=reward, sample=sample, paths=paths)


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


def recipe(**batch: object) -> Recipe:
    return from_tree({"batch": {"prompts": 1} | batch, "sampling": {"generations": 2}})


BATCH = Batch(
    step=0,
    groups=(
        Group(ticket=7, prompt=Prompt(id="p", tokens=PROMPT, answer=""), rollouts=(AGENT, PLAIN)),
    ),
)


def test_paths_as_written_out_by_hand() -> None:
    first, second = paths_of(AGENT.segments, AGENT.paths, PROMPT)
    assert first.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.trained.tolist() == [False, False, True, True, False, True]
    assert second.tokens.tolist() == [1, 2, 3, 4, 7, 8, 9, 9]
    assert second.trained.tolist() == [False] * 5 + [True] * 3, (
        "what the first path trains is masked here"
    )
    assert second.logprobs.tolist() == [0] * 5 + [-0.5] * 3
    assert second.own_start == 4
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
            sample: sum(
                float(s.loss_weight.sum(dtype=np.float64)) for s in sequences if s.sample == sample
            )
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
    """The advantages are those of one sequence with the sum of both penalties, not the
    last one's.
    """
    settings = recipe(advantage="none")
    sequences = sequences_in_loss(BATCH, settings)
    assert [(s.sample, len(s)) for s in sequences] == [(0, 6), (0, 8), (1, 7)]
    penalised = [
        replace(s, kl_penalty=penalty)
        for s, penalty in zip(sequences, (0.25, 0.5, 0.0), strict=True)
    ]
    found, _ = with_advantages(penalised, BATCH, settings)
    rewards = np.array([1 - 0.75, -1.0])
    assert [s.advantage for s in found] == pytest.approx(
        [*[rewards[0] - rewards.mean()] * 2, rewards[1] - rewards.mean()]
    )
    assert advantage_statistics(found)["advantage_mean"] == pytest.approx(0), (
        "each rollout counts once"
    )


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
    batch: Batch = decode(encode(BATCH), Batch)
    back = batch.groups[0].rollouts[0]
    assert encode(back) == encode(AGENT)


def turns(sample: int, reward: float, *credits: float) -> Rollout:
    """A session of one path, in which turn t has t + 1 tokens and this credit."""
    own = [
        s
        for t, credit in enumerate(credits)
        for s in (segment([1], False), turn(t, credit, [2 + t] * (t + 1)))
    ]
    return rollout(sample, reward, own, Branch(segments=len(own)))


def turn(number: int, credit: float, tokens: list[int]) -> Segment:
    return msgspec.structs.replace(segment(tokens), turn=number, credit=credit)


def credited(*rollouts: Rollout) -> Batch:
    return Batch(
        step=0,
        groups=(
            Group(ticket=7, prompt=Prompt(id="p", tokens=PROMPT, answer=""), rollouts=rollouts),
        ),
    )


THREE = credited(turns(0, 1.0, 3.0, 1.0), turns(1, 0.0, 1.0, 0.0), turns(2, 0.0, 2.5, 0.5, 0.5))
"""Returns: of turn 0 they are 4, 1 and 2.5; of turn 1 2, 0 and 0.5; turn 2, .5, has
nothing beside it but the mean R, 1/3.
"""


def advantages_by_turn(batch: Batch, **settings: object) -> dict[tuple[int, int], float]:
    """Return each token's advantage by (sample, turn), which must be the same for all
    of a turn's tokens.
    """
    found, _ = with_advantages(
        sequences_in_loss(batch, recipe(**settings)), batch, recipe(**settings)
    )
    made: dict[tuple[int, int], set[float]] = {}
    for s in found:
        assert s.turns is not None
        gains = np.asarray(s.advantage)
        assert not gains[s.loss_weight == 0].any()
        for t in np.unique(s.turns[s.loss_weight > 0]):
            made.setdefault((s.sample, int(t)), set()).update(gains[s.turns == t].tolist())
    return {key: value for key, (value,) in made.items()}


def test_each_turn_is_compared_with_the_same_turn_of_other_sessions() -> None:
    centred = {
        (0, 0): 1.5,
        (1, 0): -1.5,
        (2, 0): 0,
        (0, 1): 7 / 6,
        (1, 1): -5 / 6,
        (2, 1): -1 / 3,
        (2, 2): 1 / 6,
    }
    assert advantages_by_turn(THREE, advantage="none") == pytest.approx(centred)
    deviation = statistics.pstdev(centred.values())
    assert advantages_by_turn(THREE) == pytest.approx(
        {key: value / deviation for key, value in centred.items()}
    )
    alone = advantages_by_turn(THREE, advantage="none", centring="leave_one_out")
    assert alone == pytest.approx(
        {key: value * (1 if key[1] == 2 else 1.5) for key, value in centred.items()}
    )
    assert advantages_by_turn(THREE, advantage="none", centring="none")[2, 1] == pytest.approx(0.5)


def test_a_reward_after_a_turn_is_no_credit_of_later_turns() -> None:
    batch = credited(turns(0, 1.0, 1.0, 0.0), turns(1, 1.0, 0.0, 0.0))
    found = advantages_by_turn(batch)
    assert found[0, 0] > 0 > found[1, 0]
    assert found[0, 1] == found[1, 1] == 0, "exactly, as both went on to the same end"


def test_turns_of_a_session_in_two_paths_have_their_own_advantages() -> None:
    own = [
        segment([1], False),
        turn(0, 1.0, [2]),
        segment([3], False),
        turn(2, 0.0, [4]),
        segment([5], False),
        turn(1, 1.0, [6]),
    ]
    branched = rollout(0, 0.0, own, Branch(segments=4), Branch(segments=2, parent=0, shared=2))
    found = advantages_by_turn(credited(branched, turns(1, 0.0, 0.0, 0.0, 0.0)), advantage="none")
    assert found == {(0, 0): 0.5, (0, 1): 0.5, (0, 2): 0, (1, 0): -0.5, (1, 1): -0.5, (1, 2): 0}


@pytest.mark.parametrize(
    ("group", "varies"),
    [
        ((turns(0, 1.0, 0.5, 0.0), turns(1, 1.0, 0.5, 0.0)), False),
        ((turns(0, 1.0, 0.5, 0.0), turns(1, 1.0, 0.0, 0.0)), True),
        ((turns(0, 1.0, 0.0), turns(1, 1.0, 0.0, 0.0)), False),
        ((turns(0, 1.0, 0.0), turns(1, 1.0, 0.0, 0.5)), True),
        ((turns(0, 1.0, 0.0), turns(1, 0.0, 0.0)), True),
    ],
)
def test_a_group_is_in_the_loss_if_a_turn_has_an_advantage(
    group: tuple[Rollout, ...], varies: bool
) -> None:
    batch = credited(*group)
    assert batch.groups[0].has_variance == varies == bool(sequences_in_loss(batch, recipe()))
    kept = advantages_by_turn(batch, zero_variance="keep")
    assert any(kept.values()) == varies


def test_turns_without_credit_are_trained_as_the_whole_session() -> None:
    """With R alone the advantages before their division are those of `agent.credit:
    episode`, bit for bit.
    """
    told = credited(turns(0, 1.0, 0.0, 0.0), turns(1, -1.0, 0.0, 0.0), turns(2, -1.0, 0.0, 0.0))
    found = advantages_by_turn(told, advantage="none")
    whole = centred_rewards(
        credited(*(replace_turns(r) for r in told.groups[0].rollouts)).groups[0], "group", {}
    )
    assert found == {(n, t): np.float32(whole[n]) for n in range(3) for t in range(2)}


def replace_turns(one: Rollout) -> Rollout:
    return msgspec.structs.replace(
        one, segments=tuple(msgspec.structs.replace(s, turn=-1) for s in one.segments)
    )


def test_what_turns_were_rewarded_is_a_metric() -> None:
    assert batch_statistics(THREE)["reward/turns"] == pytest.approx((3 + 1 + 2.5) / 3)
    assert "reward/turns" not in batch_statistics(BATCH)
