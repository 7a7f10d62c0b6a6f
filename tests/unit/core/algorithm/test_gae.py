"""GAE against the sums it is defined by, and against the cases that have a name."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.algorithm.advantages import critic
from megarl.core.algorithm.advantages.moments import NOTHING_SEEN
from megarl.core.algorithm.batch import TrainSequence, advantage_statistics

Floats = st.lists(
    st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)), min_size=1, max_size=40
)
Share = st.floats(0, 1)


def by_the_sum(rewards: np.ndarray, values: np.ndarray, lam: float) -> np.ndarray:
    """arXiv 1506.02438, equation 16, term by term, with gamma 1."""
    n = len(values)
    deltas = [rewards[t] + (values[t + 1] if t + 1 < n else 0) - values[t] for t in range(n)]
    return np.array([sum(lam ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)])


@given(pairs=Floats, lam=Share)
def test_advantages_are_the_weighted_sums_of_errors(
    pairs: list[tuple[float, float]], lam: float
) -> None:
    rewards, values = np.array(pairs).T
    advantages, returns = critic.advantages_and_returns(rewards, values, lam)
    assert advantages == pytest.approx(by_the_sum(rewards, values, lam), abs=1e-9)
    assert returns == pytest.approx(advantages + values, abs=1e-12)


@given(pairs=Floats)
def test_lambda_one_is_the_return_less_the_value(pairs: list[tuple[float, float]]) -> None:
    rewards, values = np.array(pairs).T
    _, returns = critic.advantages_and_returns(rewards, values, 1.0)
    monte_carlo = [sum(rewards[t:]) for t in range(len(rewards))]
    assert returns == pytest.approx(monte_carlo, abs=1e-9)


@given(pairs=Floats)
def test_lambda_zero_is_the_error_of_one_step(pairs: list[tuple[float, float]]) -> None:
    rewards, values = np.array(pairs).T
    advantages, _ = critic.advantages_and_returns(rewards, values, 0.0)
    assert advantages == pytest.approx(rewards + np.append(values[1:], 0) - values, abs=1e-9)


def test_a_critic_that_expects_nothing_gives_each_token_the_reward() -> None:
    (sequence,), _ = critic.estimated(
        [rollout([0, 1, 1, 0, 1], reward=-1.0)], [np.zeros(5, np.float32)], 1.0, "none"
    )
    assert list(sequence.advantage) == [0, -1, -1, 0, -1]  # type: ignore[arg-type]
    assert list(sequence.value_target) == [0, -1, -1, 0, -1]  # type: ignore[arg-type]


def test_text_that_was_not_sampled_is_no_step_of_time() -> None:
    """What comes before and after an interruption phrase is as if they followed each
    other, whatever the critic says of it.
    """
    values = np.array([9, 0.5, 0.25, 9, 9, -0.5], np.float32)
    (cut,), _ = critic.estimated([rollout([0, 1, 1, 0, 0, 1])], [values], 0.8, "none")
    (whole,), _ = critic.estimated([rollout([1, 1, 1])], [values[[1, 2, 5]]], 0.8, "none")
    for name in ("advantage", "value", "value_target"):
        ours = getattr(cut, name)
        theirs = getattr(whole, name)
        assert list(ours[[1, 2, 5]]) == list(theirs)
        assert not ours[[0, 3, 4]].any()


def test_normalised_over_the_trained_tokens_of_the_batch() -> None:
    draw = np.random.default_rng(0)
    batch = [
        rollout([0, *draw.integers(0, 2, n), 1], reward=float(draw.choice([-1.0, 1.0])))
        for n in (3, 9, 30)
    ]
    values = [draw.normal(size=len(s)).astype(np.float32) for s in batch]
    plain, _ = critic.estimated(batch, values, 0.95, "none")
    scaled, _ = critic.estimated(batch, values, 0.95, "batch")
    flat = np.concatenate([np.asarray(s.advantage)[s.loss_weight > 0] for s in plain])
    expected = (flat - flat.mean()) / flat.std()
    assert np.concatenate(
        [np.asarray(s.advantage)[s.loss_weight > 0] for s in scaled]
    ) == pytest.approx(expected, abs=1e-5)
    statistics = advantage_statistics(scaled)
    assert (statistics["advantage_mean"], statistics["advantage_std"]) == pytest.approx(
        (0, 1), abs=1e-6
    )
    for a, b in zip(plain, scaled, strict=True):
        assert np.array_equal(
            a.value_target, b.value_target
        )  # what the critic learns is not normalised


def test_running_statistics_are_those_of_all_tokens_so_far() -> None:
    draw = np.random.default_rng(1)
    moments = NOTHING_SEEN
    seen = np.zeros(0)
    for reward in (1.0, -1.0, 1.0):
        batch = [rollout([0, 1, 1, 0, 1], reward), rollout([1, 1], -reward)]
        values = [draw.normal(size=len(s)).astype(np.float32) for s in batch]
        plain, _ = critic.estimated(batch, values, 0.95, "none")
        now = np.concatenate([s.advantage[s.loss_weight > 0] for s in plain])  # type: ignore[index]
        seen = np.append(seen, now)
        scaled, moments = critic.estimated(batch, values, 0.95, "running", moments)
        found = np.concatenate([np.asarray(s.advantage)[s.loss_weight > 0] for s in scaled])
        assert found == pytest.approx((now - seen.mean()) / seen.std(), abs=1e-5)


def test_a_kl_penalty_is_paid_where_it_arises() -> None:
    """A token's penalty is the business of that token and of those before it."""
    sequence = dataclasses.replace(
        rollout([0, 1, 1, 0, 1]), kl_penalty=np.array([0, 0.5, -0.25, 0, 2], np.float32)
    )
    (found,), _ = critic.estimated([sequence], [np.zeros(5, np.float32)], 1.0, "none")
    assert list(found.value_target) == [0, 1 - 0.5 + 0.25 - 2, 1 + 0.25 - 2, 0, 1 - 2]  # type: ignore[arg-type]


def test_equal_advantages_are_divided_by_nothing() -> None:
    (sequence,), _ = critic.estimated([rollout([1, 1])], [np.zeros(2, np.float32)], 1.0, "batch")
    assert list(sequence.advantage) == [0, 0]  # type: ignore[arg-type]


def test_explained_variance() -> None:
    values = [np.array([0, 0.2, 0.4, 0.9], np.float32), np.array([0.5, -0.5, -0.2, -1], np.float32)]
    batch, _ = critic.estimated(
        [rollout([0, 1, 1, 1]), rollout([1, 1, 1, 0], reward=-1.0)], values, 1.0, "batch"
    )
    found = critic.value_statistics(batch)
    errors = [0.8, 0.6, 0.1, -1.5, -0.5, -0.8]
    assert found["explained_variance"] == pytest.approx(1 - np.var(errors) / 1.0, abs=1e-6)
    assert (found["value_mean"], found["return_mean"]) == pytest.approx(
        (np.mean([0.2, 0.4, 0.9, 0.5, -0.5, -0.2]), 0)
    )
    assert np.isnan(critic.value_statistics([batch[0]])["explained_variance"])


def rollout(trained: list[int], reward: float = 1.0) -> TrainSequence:
    weight = np.array(trained, np.float32)
    zeros = np.zeros_like(weight)
    return TrainSequence(0, 0, zeros.astype(np.int32), zeros, weight / 7, 0.0, reward=reward)
