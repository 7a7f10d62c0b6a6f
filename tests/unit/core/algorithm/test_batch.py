"""What a step trains. References: the paper's formulas written out in plain Python over
lists, token by token.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.algorithm.advantages import with_advantages
from megarl.core.algorithm.batch import (
    TrainSequence,
    advantage_statistics,
    batch_statistics,
    sequences_in_loss,
    token_weights,
)
from megarl.core.base.types import Batch, Group, Prompt, Rollout, int32
from megarl.core.recipe import Recipe, from_tree
from tests import make
from tests.sequences import training_sequences


def rollout(sample: int, reward: float, *parts: tuple[int, int, bool], **fields: Any) -> Rollout:
    """parts: (tokens, weight version, trained)."""
    segments = tuple(
        make.segment(
            range(100 * sample, 100 * sample + n), version, logprob=-0.5 - sample, trained=trained
        )
        for n, version, trained in parts
    )
    return make.rollout(*segments, reward=reward, sample=sample, **fields)


def group(ticket: int, *rollouts: Rollout, void: str = "") -> Group:
    prompt = Prompt(id=f"p{ticket}", tokens=int32([1, 2, 3]), answer="4")
    return Group(ticket=ticket, prompt=prompt, rollouts=rollouts, void=void)


def recipe(**batch: object) -> Recipe:
    return from_tree(
        {"batch": batch, "length": {"thinking_tokens": [1, LONGEST - 2], "answer_tokens": 2}}
    )


LONGEST = 10
ALL_AGGREGATIONS: list[Any] = ["prompt", "sample", "token", "constant"]


MIXED = Batch(
    step=6,
    groups=(
        group(
            0,
            rollout(0, 1.0, (4, 5, True)),
            rollout(1, -1.0, (3, 4, True), (2, 5, False), (1, 6, True)),
        ),
        group(1, rollout(0, 1.0, (5, 6, True)), rollout(1, 1.0, (7, 6, True))),  # no variance
        group(2, void="server answered 400"),
        group(
            3,
            rollout(0, -1.0, (2, 6, True), finish="length"),
            rollout(1, 1.0, (6, 3, True)),
            rollout(2, 1.0, (1, 6, True)),
        ),
    ),
)


def reference_loss(
    batch: Batch, token_losses: dict[tuple[int, int], list[float]], aggregation: str, keep: bool
) -> float:
    """Each aggregation as the paper words it."""
    groups = [
        g for g in batch.groups if not g.void and (keep or len({r.reward for r in g.rollouts}) > 1)
    ]
    per_group = [[token_losses[g.ticket, r.sample] for r in g.rollouts] for g in groups]
    if aggregation == "prompt":
        return statistics.mean(sum(map(sum, g)) / sum(map(len, g)) for g in per_group)
    rollouts = [losses for g in per_group for losses in g]
    if aggregation == "sample":
        return statistics.mean(sum(losses) / len(losses) for losses in rollouts)
    if aggregation == "constant":  # Dr. GRPO (arXiv 2503.20783), section 3.1
        return sum(sum(losses) / LONGEST for losses in rollouts) / len(rollouts)
    return sum(map(sum, rollouts)) / sum(map(len, rollouts))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("aggregation", ALL_AGGREGATIONS)
def test_weighted_sum_is_the_aggregation(aggregation: str, keep: bool) -> None:
    rng = np.random.default_rng(0)
    losses = {
        (g.ticket, r.sample): rng.normal(size=r.trained_tokens).tolist()
        for g in MIXED.groups
        for r in g.rollouts
    }
    sequences = training_sequences(
        MIXED, recipe(aggregation=aggregation, zero_variance="keep" if keep else "drop")
    )
    total = 0.0
    for s in sequences:
        weights = s.loss_weight[s.loss_weight > 0]
        total += float(np.dot(weights, losses[s.ticket, s.sample]))
    assert total == pytest.approx(reference_loss(MIXED, losses, aggregation, keep), rel=1e-6)
    filled = statistics.mean(len(losses[s.ticket, s.sample]) for s in sequences) / LONGEST
    whole = sum(float(s.loss_weight.sum(dtype=np.float64)) for s in sequences)
    assert whole == pytest.approx(filled if aggregation == "constant" else 1.0, rel=1e-6)


def test_dr_grpo_is_centring_alone_over_a_constant() -> None:
    """A token's weight and advantage depend on no length and on no deviation (arXiv
    2503.20783, section 3.1).
    """
    sequences = training_sequences(MIXED, recipe(advantage="none", aggregation="constant"))
    assert [s.advantage for s in sequences] == pytest.approx([1, -1, -4 / 3, 2 / 3, 2 / 3])
    weights = np.unique(np.concatenate([s.loss_weight for s in sequences]))
    np.testing.assert_array_equal(weights, np.array([0, 1 / (5 * LONGEST)], np.float32))


def test_statistics_of_advantages() -> None:
    found = advantage_statistics(training_sequences(MIXED, recipe(advantage="none")))
    gains = [1, -1, -4 / 3, 2 / 3, 2 / 3]
    assert found == pytest.approx(
        {
            "advantage_mean": 0.0,
            "advantage_std": statistics.pstdev(gains),
            "advantage_abs_max": 4 / 3,
            "advantage_fit": 1.0,
        }
    )


def test_advantages_that_do_not_follow_rewards_are_told_from_those_that_do() -> None:
    """Turned ones, each of its neighbour, tokens with their own, with a teacher,
    without variance, and a shift of a prompt.
    """
    good = training_sequences(MIXED, recipe(advantage="none"))

    def fit(change: Callable[[TrainSequence], dict[str, Any]]) -> float:
        return advantage_statistics([replace(s, **change(s)) for s in good]).get(
            "advantage_fit", math.inf
        )

    assert fit(lambda s: {"advantage": -s.advantage}) == pytest.approx(-1)
    draw = np.random.default_rng(0).choice((-1.0, 1.0), (8, 16))
    many = [
        replace(good[0], ticket=t, sample=n, reward=draw[t, n]) for t in range(8) for n in range(16)
    ]
    neighbours = [
        replace(s, advantage=before.reward)
        for s, before in zip(many, [*many[-1:], *many[:-1]], strict=True)
    ]
    assert abs(advantage_statistics(neighbours)["advantage_fit"]) < 0.1
    assert fit(
        lambda s: {"advantage": s.advantage + s.ticket, "reward": 5 * s.reward + 2}
    ) == pytest.approx(1)
    assert fit(
        lambda s: {"advantage": np.where(s.loss_weight > 0, np.float32(s.advantage), 99)}
    ) == pytest.approx(1)
    rewards: list[Any] = [s.reward for s in good]
    gains: list[Any] = [s.advantage + 0.3 * n**2 for n, s in enumerate(good)]
    centred = [
        np.concatenate([np.array(x[:2]) - np.mean(x[:2]), np.array(x[2:]) - np.mean(x[2:])])
        for x in (gains, rewards)
    ]
    assert fit(lambda s: {"advantage": gains[good.index(s)]}) == pytest.approx(
        np.corrcoef(centred[0], centred[1])[0, 1]
    )
    assert math.isnan(fit(lambda s: {"advantage": 0.7}))
    assert math.isnan(fit(lambda s: {"reward": 0.1}))
    assert fit(lambda s: {"teacher_gain": np.zeros(len(s))}) == math.inf
    assert fit(lambda s: {"turns": np.zeros(len(s), np.int32)}) == math.inf


def test_sequences_hold_the_rollout_as_sampled() -> None:
    sequences = training_sequences(MIXED, recipe())
    assert [(s.ticket, s.sample) for s in sequences] == [(0, 0), (0, 1), (3, 0), (3, 1), (3, 2)]
    s = sequences[1]
    assert isinstance(s, TrainSequence)
    assert len(s) == 9
    assert s.tokens.tolist() == [1, 2, 3, 100, 101, 102, 100, 101, 100]
    trained = [0, 0, 0, 1, 1, 1, 0, 0, 1]  # prompt and the masked segment in the middle are not
    np.testing.assert_array_equal(
        s.loss_weight, np.float32(1 / (2 * 8)) * np.array(trained, np.float32)
    )
    np.testing.assert_array_equal(
        s.behaviour_logprobs, np.float32(-1.5) * np.array(trained, np.float32)
    )
    assert {s.tokens.dtype, s.behaviour_logprobs.dtype, s.loss_weight.dtype} == {
        np.dtype(np.int32),
        np.dtype(np.float32),
    }


@pytest.mark.parametrize("zero_variance", ["drop", "refill", "keep"])
def test_nothing_to_train(zero_variance: str) -> None:
    assert (
        training_sequences(
            Batch(step=0, groups=(group(0, void="dead"),)), recipe(zero_variance=zero_variance)
        )
        == []
    )


DEVIATION = statistics.pstdev([1, -1, -4 / 3, 2 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("prompt", [1 / (2 * 8)] * 2 + [1 / (2 * 7)] * 2),
        ("sample", [1 / (4 * 4), 1 / (4 * 4), 1 / (4 * 6), 1 / (4 * 1)]),
        ("token", [1 / 15] * 4),
        ("constant", [1 / (4 * LONGEST)] * 4),
    ],
)
def test_a_truncated_rollout_that_is_dropped_has_a_reward_but_no_weight(
    aggregation: str, weights: list[float]
) -> None:
    """Group 3 of MIXED by hand: rewards -1 (truncated, 2 tokens), 1 (6 tokens), 1 (1
    token), whose mean is 1/3.
    """
    sequences = training_sequences(MIXED, recipe(aggregation=aggregation, truncated="drop"))
    assert [(s.ticket, s.sample) for s in sequences] == [(0, 0), (0, 1), (3, 1), (3, 2)]
    gains = [1 / DEVIATION, -1 / DEVIATION, (2 / 3) / DEVIATION, (2 / 3) / DEVIATION]
    assert [s.advantage for s in sequences] == pytest.approx(gains)
    assert [float(s.loss_weight.max()) for s in sequences] == pytest.approx(weights)
    kept = training_sequences(MIXED, recipe(aggregation=aggregation))
    assert [s.advantage for s in kept if (s.ticket, s.sample) != (3, 0)] == pytest.approx(gains)


def test_a_group_of_truncated_rollouts_is_not_in_the_loss() -> None:
    """Graded differently, so it has variance; where it is kept, both are trained."""
    cut = group(
        1,
        rollout(0, 1.0, (4, 0, True), finish="length"),
        rollout(1, -1.0, (3, 0, True), finish="length"),
    )
    batch = Batch(step=0, groups=(cut, MIXED.groups[0]))
    for truncated, tickets in (("drop", [0, 0]), ("keep", [1, 1, 0, 0])):
        found = recipe(truncated=truncated)
        assert [s.ticket for s in training_sequences(batch, found)] == tickets
        assert batch_statistics(batch, found)["groups_in_loss"] == len(tickets) // 2
    whole = training_sequences(batch, recipe(truncated="drop"))
    assert sum(float(s.loss_weight.sum()) for s in whole) == pytest.approx(1.0), (
        "it counts as no prompt"
    )


def test_a_batch_without_variance_is_empty_unless_kept() -> None:
    batch = Batch(step=0, groups=(MIXED.groups[1],))
    assert training_sequences(batch, recipe()) == []
    assert [s.advantage for s in training_sequences(batch, recipe(zero_variance="keep"))] == [0, 0]


@pytest.mark.parametrize("aggregation", ALL_AGGREGATIONS)
def test_a_rollout_without_a_sampled_token_counts_in_no_mean(aggregation: Any) -> None:
    silent = group(0, rollout(0, 1.0, (4, 0, True)), rollout(1, -1.0, (3, 0, False)))
    (only,) = training_sequences(Batch(step=0, groups=(silent,)), recipe(aggregation=aggregation))
    assert only.advantage == 1.0
    assert only.loss_weight.sum() == pytest.approx(
        4 / LONGEST if aggregation == "constant" else 1.0
    )


COUNTS = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=6)


@given(counts=COUNTS, aggregation=st.sampled_from(["prompt", "sample", "token"]))
def test_weights_sum_to_one(counts: Any, aggregation: Any) -> None:
    weights = token_weights(counts, aggregation, 50)
    total = sum(float(np.dot(w, c)) for w, c in zip(weights, counts, strict=True))
    assert total == pytest.approx(1.0 if any(map(any, counts)) else 0.0)


@given(counts=COUNTS)
def test_constant_weights_sum_to_the_share_of_the_longest_that_is_used(counts: Any) -> None:
    weights = token_weights(counts, "constant", 50)
    used = [n / 50 for group_ in counts for n in group_ if n]
    assert sum(float(np.dot(w, c)) for w, c in zip(weights, counts, strict=True)) == pytest.approx(
        statistics.mean(used) if used else 0.0
    )
    assert (
        len(
            {
                float(w)
                for g, c in zip(weights, counts, strict=True)
                for w, n in zip(g, c, strict=True)
                if n
            }
        )
        <= 1
    )


@given(counts=COUNTS, aggregation=st.sampled_from(ALL_AGGREGATIONS))
def test_every_rollout_with_a_trained_token_weighs(counts: Any, aggregation: Any) -> None:
    for w, c in zip(token_weights(counts, aggregation, 50), counts, strict=True):
        assert ((w > 0) >= (np.array(c) > 0)).all()
        assert np.isfinite(w).all()


@given(n=st.integers(1, 50), groups=st.integers(1, 5), generations=st.integers(1, 5))
def test_all_aggregations_agree_where_all_rollouts_are_of_the_longest(
    n: int, groups: int, generations: int
) -> None:
    every = [
        np.concatenate(token_weights([[n] * generations] * groups, a, n)) for a in ALL_AGGREGATIONS
    ]
    for weights in every:
        np.testing.assert_allclose(weights, 1 / (n * groups * generations), rtol=1e-12)


@given(counts=COUNTS, aggregation=st.sampled_from(ALL_AGGREGATIONS), data=st.data())
def test_weights_do_not_depend_on_the_order_of_groups(
    counts: Any, aggregation: Any, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(counts))))
    weights = token_weights(counts, aggregation, 50)
    for place, w in zip(
        order, token_weights([counts[i] for i in order], aggregation, 50), strict=True
    ):
        np.testing.assert_allclose(w, weights[place], rtol=1e-12)


def test_statistics_of_a_mixed_batch() -> None:
    found = batch_statistics(MIXED)
    assert found["pass_rate_train"] == pytest.approx(
        5 / 7
    )  # of all graded rollouts, without variance too
    assert found["reward_mean"] == pytest.approx(3 / 7)
    assert found["reward_gap"] == 2
    assert found["zero_variance_share"] == pytest.approx(1 / 3)
    assert found["groups_in_loss"] == 2
    assert found["void_groups"] == 1
    assert found["truncation_rate"] == pytest.approx(1 / 7)
    assert found["completion_tokens_mean"] == pytest.approx((4 + 6 + 5 + 7 + 2 + 6 + 1) / 7)
    assert found["completion_tokens_right_mean"] == pytest.approx((4 + 5 + 7 + 6 + 1) / 5)
    assert found["completion_tokens_wrong_mean"] == pytest.approx((6 + 2) / 2)
    assert found["generated_tokens"] == 4 + 4 + 5 + 7 + 2 + 6 + 1
    assert found["lag_max"] == 3
    assert found["lag_mean"] == pytest.approx((4 * 1 + 3 * 2 + 6 * 3) / 29)
    assert found["versions_per_rollout"] == pytest.approx(8 / 7)
    assert found["versions_per_rollout_max"] == 2
    assert all(type(v) is float for v in found.values())


def test_statistics_of_a_batch_that_is_void_throughout() -> None:
    found = batch_statistics(Batch(step=0, groups=(group(0, void="dead"),)))
    assert found["void_groups"] == 1
    assert found["lag_max"] == found["generated_tokens"] == 0
    assert math.isnan(found["pass_rate_train"])
    assert math.isnan(found["reward_gap"])


def scored(batch: Batch) -> Batch:
    """The batch with a teacher's scores: log-probs of -1, -2, …, also where nothing is
    trained.
    """
    replace = msgspec.structs.replace

    def with_scores(r: Rollout) -> Rollout:
        return replace(r, teacher_logprobs=-1 - np.arange(len(r.tokens), dtype=np.float32))

    groups = tuple(replace(g, rollouts=tuple(map(with_scores, g.rollouts))) for g in batch.groups)
    return replace(batch, groups=groups)


def made(batch: Batch, weight: float) -> list[TrainSequence]:
    recipe = from_tree(
        {"teacher": {"url": "http://t", "weight": weight}, "batch": {"zero_variance": "keep"}}
    )
    return with_advantages(sequences_in_loss(batch, recipe), batch, recipe)[0]


def test_a_teachers_advantage_is_mixed_in_token_by_token() -> None:
    plain, mixed, alone = (made(scored(MIXED), weight) for weight in (0.0, 0.25, 1.0))
    rollouts = [r for g in MIXED.groups for r in g.rollouts]
    for reward, both, teacher, r in zip(plain, mixed, alone, rollouts, strict=True):
        assert isinstance(teacher.advantage, np.ndarray)
        assert isinstance(both.advantage, np.ndarray)
        for t, trained in enumerate(r.trained):
            apart = -1 - t - r.logprobs[t] if trained else 0.0
            assert teacher.advantage[3 + t] == pytest.approx(apart)  # three prompt tokens
            assert both.advantage[3 + t] == pytest.approx(0.75 * reward.advantage + 0.25 * apart)
        assert not np.any(teacher.advantage[:3])
    shown = batch_statistics(scored(MIXED))["kl_teacher"]
    assert shown == pytest.approx(
        np.mean([r.logprobs[t] + 1 + t for r in rollouts for t in np.flatnonzero(r.trained)])
    )
    assert "kl_teacher" not in batch_statistics(MIXED)


def test_a_weight_of_0_is_no_teacher_to_the_last_bit() -> None:
    recipe = from_tree({"batch": {"zero_variance": "keep"}})
    today = with_advantages(sequences_in_loss(MIXED, recipe), MIXED, recipe)[0]
    for a, b in zip(today, made(MIXED, 0.0), strict=True):
        assert all(
            np.array_equal(x, y) and type(x) is type(y)
            for x, y in zip(astuple(a), astuple(b), strict=True)
        )
