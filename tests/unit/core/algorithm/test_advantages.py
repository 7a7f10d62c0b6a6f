"""Advantages against the papers' formulas written out in plain Python."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.algorithm.advantages import with_advantages
from megarl.core.algorithm.advantages.group import Centring, Normalisation, centred_rewards, divided
from megarl.core.algorithm.advantages.moments import NOTHING_SEEN, Moments
from megarl.core.algorithm.batch import TrainSequence, sequences_in_loss
from megarl.core.base.types import Batch, Group, Prompt, int32
from megarl.core.recipe import Recipe, from_tree
from tests import make
from tests.sequences import training_sequences


def group(ticket: int, *rewards: float) -> Group:
    """One token a rollout."""
    rollouts = tuple(
        make.rollout(make.segment([5]), reward=reward, sample=i) for i, reward in enumerate(rewards)
    )
    return Group(
        ticket=ticket,
        prompt=Prompt(id=f"p{ticket}", tokens=int32([1, 2, 3]), answer="4"),
        rollouts=rollouts,
    )


def advantages_of(sequences: Sequence[TrainSequence]) -> np.ndarray:
    return np.array([s.advantage for s in sequences])


def advantages(
    groups: list[Group],
    kind: Normalisation,
    centring: Centring = "group",
    running: Moments = NOTHING_SEEN,
) -> list[np.ndarray]:
    return divided([centred_rewards(g, centring, {}) for g in groups], kind, running)


GROUPS = [group(0, 1.0, -1.0), group(1, 1.0, 1.0), group(3, -1.0, 1.0, 1.0)]


def test_advantages_of_the_batch() -> None:
    centred = [[1.0, -1.0], [0.0, 0.0], [-4 / 3, 2 / 3, 2 / 3]]
    deviation = statistics.pstdev(centred[0] + centred[1] + centred[2])
    found = advantages(GROUPS, "batch")
    for values, expected in zip(found, centred, strict=True):
        np.testing.assert_allclose(values, np.array(expected) / deviation, rtol=1e-12)


@pytest.mark.parametrize("kind", ["batch", "running"])
def test_groups_of_one_reward_count_in_the_deviation_where_they_are_kept(kind: Any) -> None:
    """ScaleRL divides by the deviation of all advantages in the batch; the filter
    decides which are in it. Two groups of four, one of them half right: its advantages
    are ±1, and ±sqrt(2) with four zeros beside them.
    """
    batch = Batch(step=0, groups=(group(0, 1.0, -1.0, 1.0, -1.0), group(1, 1.0, 1.0, 1.0, 1.0)))
    signs = np.array([1, -1, 1, -1])
    dropped = training_sequences(batch, recipe(advantage=kind))
    np.testing.assert_allclose(advantages_of(dropped), signs)
    kept = training_sequences(batch, recipe(advantage=kind, zero_variance="keep"))
    np.testing.assert_allclose(advantages_of(kept), [*(np.sqrt(2) * signs), 0, 0, 0, 0])


def test_the_overlong_penalty_does_not_put_a_group_of_right_answers_into_the_loss() -> None:
    """DAPO keeps a prompt if some, but not all, of its answers are right (arXiv
    2503.14476, equation 11). Else one right answer of sixteen that is a token too long
    would have advantage -3.87, as one wrong answer has among fifteen right ones.
    """
    right = penalised_group(0, *[1.0] * 15, 0.9995)
    mixed = penalised_group(1, *[1.0] * 14, 0.9995, -1.0)
    assert not right.has_variance
    assert mixed.has_variance
    batch = Batch(step=0, groups=(right, mixed))
    settings = recipe(advantage="group")
    assert {s.ticket for s in sequences_in_loss(batch, settings)} == {1}
    kept = training_sequences(batch, recipe(advantage="group", zero_variance="keep"))
    assert kept[15].advantage == pytest.approx(-(15**0.5)), (
        "kept, it is trained by its rewards as they are"
    )


def test_scores_of_a_reward_model_have_variance_though_all_are_right() -> None:
    assert group(0, 0.7, 0.3).has_variance
    assert not group(0, 0.7, 0.7).has_variance


def penalised_group(ticket: int, *rewards: float) -> Group:
    """As a grader of right and wrong makes it with the overlong penalty."""
    made = group(ticket, *rewards)
    rollouts = [
        msgspec.structs.replace(r, graded=1.0 if r.correct else -1.0) for r in made.rollouts
    ]
    return msgspec.structs.replace(made, rollouts=tuple(rollouts))


def test_a_rounding_of_a_reward_model_is_no_signal() -> None:
    """The same answer, scored in different batches. By the paper's formula one of them
    would have an advantage of 1.7.
    """
    (found,) = advantages([group(0, 0.5, 0.5 + 1e-7, 0.5, 0.5)], "group")
    assert np.abs(found).max() < 0.1
    (found,) = advantages([group(0, 0.5, 0.5 + 1e-4, 0.5, 0.5)], "group")
    assert found[1] == pytest.approx(3**0.5)


def test_advantages_of_the_group_and_undivided() -> None:
    found = advantages(GROUPS, "group")
    np.testing.assert_allclose(found[0], [1, -1])
    np.testing.assert_allclose(found[1], [0, 0])
    np.testing.assert_allclose(found[2], np.array([-4, 2, 2]) / 3 / statistics.pstdev([-1, 1, 1]))
    np.testing.assert_allclose(advantages(GROUPS, "none")[2], np.array([-4, 2, 2]) / 3)


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    found = advantages(GROUPS, "none", "leave_one_out")
    for group_, gains in zip(GROUPS, found, strict=True):
        rewards = group_.rewards.tolist()
        others = [statistics.mean(rewards[:j] + rewards[j + 1 :]) for j in range(len(rewards))]
        np.testing.assert_allclose(gains, np.subtract(rewards, others), rtol=1e-12)
    divided = advantages(GROUPS, "batch", "leave_one_out")
    deviation = statistics.pstdev(np.concatenate(found))
    for gains, raw in zip(divided, found, strict=True):
        np.testing.assert_allclose(gains, raw / deviation, rtol=1e-12)


def test_uncentred_rewards() -> None:
    assert [a.tolist() for a in advantages(GROUPS, "none", "none")] == [[1, -1], [1, 1], [-1, 1, 1]]
    deviation = statistics.pstdev([1, -1, 1, 1, -1, 1, 1])
    np.testing.assert_allclose(advantages(GROUPS, "batch", "none")[1], np.ones(2) / deviation)


@pytest.mark.parametrize("centring", ["group", "leave_one_out"])
@pytest.mark.parametrize("kind", ["batch", "group", "running", "none"])
def test_one_reward_throughout_has_advantage_zero_exactly(kind: Any, centring: Any) -> None:
    same = group(0, 0.1, 0.1, 0.1)  # the mean of three 0.1 is not 0.1 in floating point
    assert advantages([same], kind, centring)[0].tolist() == [0, 0, 0]


def penalised(sequences: list[TrainSequence], *penalties: float) -> list[TrainSequence]:
    """Each with its penalty at its last token."""
    arrays = [
        np.append(np.zeros(len(s) - 1), p).astype(np.float32)
        for s, p in zip(sequences, penalties, strict=True)
    ]
    return [dataclasses.replace(s, kl_penalty=a) for s, a in zip(sequences, arrays, strict=True)]


def test_a_kl_penalty_is_taken_off_before_centring_and_dividing() -> None:
    batch = Batch(step=0, groups=(*GROUPS,))
    settings = recipe(advantage="batch")
    penalties = [0.25, 0.5, 0.0, 1.0, 0.5]
    found, _ = with_advantages(
        penalised(sequences_in_loss(batch, settings), *penalties), batch, settings
    )
    lowered = [[0.75, -1.5], [-1.0, 0.0, 0.5]]
    centred = [r - statistics.mean(rewards) for rewards in lowered for r in rewards]
    expected = np.array(centred) / statistics.pstdev(centred)
    np.testing.assert_allclose(advantages_of(found), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["batch", "group", "running", "none"])
def test_a_kl_penalty_gives_a_group_of_one_reward_no_gradient(kind: Any) -> None:
    """However the penalty spreads them."""
    batch = Batch(step=0, groups=(group(0, 1.0, 1.0), group(1, 1.0, -1.0)))
    assert {s.ticket for s in sequences_in_loss(batch, recipe())} == {1}
    settings = recipe(zero_variance="keep", advantage=kind)
    found, _ = with_advantages(
        penalised(sequences_in_loss(batch, settings), 0.5, 0.0, 1.0, 0.0), batch, settings
    )
    gain = {"none": 0.5, "group": 1.0}.get(
        kind, 2**0.5
    )  # four rollouts are divided by their deviation, two of them are 0
    assert [s.advantage for s in found] == pytest.approx([0.0, 0.0, gain, -gain], rel=1e-15, abs=0)
    found, _ = with_advantages(
        penalised(sequences_in_loss(batch, settings), 0.5, 0.0, 2.0, 0.0), batch, settings
    )
    assert [s.advantage for s in found] == [0.0] * 4  # it made the second group's equal


def recipe(**batch: object) -> Recipe:
    return from_tree({"batch": {"advantage": "running", **batch}})


REWARDS = st.lists(
    st.lists(st.sampled_from([-1.0, -0.5, 0.25, 1.0]), min_size=2, max_size=4),
    min_size=1,
    max_size=4,
)
STREAM = st.lists(REWARDS, min_size=1, max_size=5)


@given(stream=STREAM, centring=st.sampled_from(["group", "leave_one_out", "none"]))
def test_running_deviation_is_that_of_all_batches_so_far(stream: Any, centring: Any) -> None:
    """numpy's deviation over the whole history of rollouts in the loss."""
    settings = recipe(centring=centring)
    moments = NOTHING_SEEN
    history = []
    for step, rewards in enumerate(stream):
        batch = Batch(step=step, groups=tuple(group(i, *r) for i, r in enumerate(rewards)))
        sequences, moments = with_advantages(
            sequences_in_loss(batch, settings), batch, settings, moments
        )
        varied = [g for g in batch.groups if g.has_variance]
        if varied:
            history.append(np.concatenate(advantages(varied, "none", centring)))
            expected = np.concatenate(advantages(varied, "none", centring)) / np.std(
                np.concatenate(history)
            )
            np.testing.assert_allclose(advantages_of(sequences), expected, rtol=1e-12, atol=1e-15)
        else:
            assert sequences == []


@given(rewards=REWARDS)
def test_running_statistics_of_one_batch_are_the_batchs(rewards: Any) -> None:
    batch = Batch(step=0, groups=tuple(group(i, *r) for i, r in enumerate(rewards)))
    running, of_batch = (
        training_sequences(batch, recipe(advantage=kind)) for kind in ("running", "batch")
    )
    assert [s.advantage for s in running] == pytest.approx(
        [s.advantage for s in of_batch], rel=1e-12
    )


def test_running_deviation_keeps_its_digits_far_from_zero() -> None:
    values = np.array([1e6, 1e6 + 1e-3, 1e6 - 1e-3])
    moments = NOTHING_SEEN
    for value in values:
        moments = moments.updated(np.array([value]))
    assert moments.deviation == pytest.approx(statistics.pstdev(values), rel=1e-6)


def test_a_batch_without_variance_is_divided_as_others_are() -> None:
    seen = Moments(8.0, 0.0, 8 * 0.25)
    assert [a.tolist() for a in advantages([group(0, 1.0, 1.0)], "running", "none", seen)] == [
        [2.0, 2.0]
    ]
    assert [a.tolist() for a in advantages([group(0, 1.0, 1.0)], "running", "none")] == [[1.0, 1.0]]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_penalty_that_is_no_number_breaks_its_group_and_no_later_batch(broken: float) -> None:
    batch = Batch(step=0, groups=(group(0, 1.0, -1.0), group(1, 1.0, -1.0)))
    settings = recipe()
    before = Moments(8.0, 0.0, 8.0)
    with np.errstate(invalid="ignore"):
        sequences = penalised(sequences_in_loss(batch, settings), broken, 0.0, 0.0, 0.0)
        found, after = with_advantages(sequences, batch, settings, before)
    assert after == before
    assert [np.isfinite(s.advantage) for s in found] == [False, False, True, True]


def test_a_batch_without_variance_is_remembered_only_where_it_is_kept() -> None:
    before = Moments(8.0, 0.0, 4.0)
    batch = Batch(step=1, groups=(group(0, 1.0, 1.0),))
    drop = recipe()
    keep = recipe(zero_variance="keep")
    assert with_advantages(sequences_in_loss(batch, drop), batch, drop, before)[1] == before
    assert with_advantages(sequences_in_loss(batch, keep), batch, keep, before)[1] == Moments(
        10.0, 0.0, 4.0
    )
