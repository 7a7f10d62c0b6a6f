"""Generalised advantage estimation: how much more each sampled token was worth than the
critic expected.

    values V_0 … V_{n-1} (critic) ─┐
    rewards r_0 … r_{n-1} ─────────┴─► delta_t = r_t + V_{t+1} - V_t, with V_n = 0

    advantage, for the policy          A_t = delta_t + lambda A_{t+1}
    return, what the critic learns     R_t = A_t + V_t

Schulman et al. 2015 (arXiv 1506.02438), equation 16, with gamma 1: tokens are not
discounted, since the reward is for the answer, however long it took (as in
Open-Reasoner-Zero, arXiv 2503.24290). t counts only the trained tokens of a rollout:
text that the policy did not sample (an interruption phrase) is part of the transition
from the sampled token before it to the next one, and no step of lambda. V_t is the
critic's estimate before token t is sampled. The reward comes with the last sampled
token, and V is 0 after it, even if the answer was cut off: the budget is part of the
task, and the grade reflects it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megarl.core.algorithm.advantages.moments import NOTHING_SEEN, Moments
from megarl.core.algorithm.batch import TrainSequence


def advantages_and_returns(
    rewards: np.ndarray, values: np.ndarray, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and R, [n] float64 each, for one rollout's n trained tokens, from
    rewards [n] and values [n].
    """
    # A quarter of the learner's import time, and only runs with a critic need it.
    from scipy.signal import lfilter

    values = values.astype(np.float64)
    next_values = np.append(values[1:], 0.0)
    deltas = rewards + next_values - values
    # The recursion, from the last token backwards.
    advantages = lfilter([1.0], [1.0, -lam], deltas[::-1])[::-1]
    return advantages, advantages + values


def estimated(
    sequences: Sequence[TrainSequence],
    values: Sequence[np.ndarray],
    lam: float,
    normalisation: Literal["batch", "running", "none"],
    moments: Moments = NOTHING_SEEN,
) -> tuple[list[TrainSequence], Moments]:
    """Return the sequences with advantage, value and return at each trained token, 0
    elsewhere, and the `moments` of the advantages of all batches, which then include
    this one's. values: [len] per sequence. normalisation: centre advantages and divide
    them by the deviation, over all trained tokens of the batch (batch) or of all
    batches (running).
    """
    advantages: list[np.ndarray] = []
    returns: list[np.ndarray] = []
    for sequence, sequence_values in zip(sequences, values, strict=True):
        trained_values = sequence_values[sequence.trained]
        gains, targets = advantages_and_returns(_rewards(sequence), trained_values, lam)
        advantages.append(gains)
        returns.append(targets)
    all_advantages = np.concatenate(advantages)
    moments = moments.updated(all_advantages)
    if normalisation != "none":
        scale = moments
        if normalisation == "batch":
            scale = NOTHING_SEEN.updated(all_advantages)
        advantages = [(a - scale.mean) / scale.deviation for a in advantages]
    result = [
        replace(
            sequence,
            advantage=_at_trained(sequence, sequence_advantages),
            value=_at_trained(sequence, sequence_values[sequence.trained]),
            value_target=_at_trained(sequence, sequence_returns),
        )
        for sequence, sequence_values, sequence_advantages, sequence_returns in zip(
            sequences, values, advantages, returns, strict=True
        )
    ]
    return result, moments


def value_statistics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return statistics of `estimated` sequences; explained_variance: 1 - Var(R - V) /
    Var(R), NaN if R is constant.
    """
    values = np.concatenate([s.of_trained(s.value) for s in sequences])
    returns = np.concatenate([s.of_trained(s.value_target) for s in sequences])
    variance = float(returns.var())
    explained = float("nan")
    if variance:
        explained = 1 - float((returns - values).var()) / variance
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": explained,
    }


def _rewards(sequence: TrainSequence) -> np.ndarray:
    """Return the rewards [trained tokens] float64: the rollout's with the last token,
    less each token's KL penalty.
    """
    rewards = 0.0 - sequence.of_trained(sequence.kl_penalty)  # without penalty 0.0, not -0.0
    rewards[-1] += sequence.reward
    return rewards


def _at_trained(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Place `values` at the sequence's trained tokens, 0 elsewhere: [len] float32."""
    placed = np.zeros(len(sequence), np.float32)
    placed[sequence.trained] = values
    return placed
