"""Generalised advantage estimation: how much more each sampled token was worth than the
critic expected.

    values V_0 … V_{n-1} (critic) ─┐
    rewards r_0 … r_{n-1} ─────────┴─► delta_t = r_t + V_{t+1} - V_t, with V_n = 0
                                       A_t = delta_t + lambda A_{t+1}               advantage, for the policy
                                       R_t = A_t + V_t                              return, what the critic learns

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

from megarl.core.algorithm.advantages import NOTHING_SEEN, Moments
from megarl.core.algorithm.batch import TrainSequence


def advantages_and_returns(
    rewards: np.ndarray, values: np.ndarray, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and R, [n] float64 each, for one rollout's n trained tokens, from
    rewards [n] and values [n].
    """
    from scipy.signal import (
        lfilter,
    )  # takes a quarter of the learner's import time; only runs with a critic need it

    values = values.astype(np.float64)
    deltas = rewards + np.append(values[1:], 0.0) - values
    advantages = lfilter([1.0], [1.0, -lam], deltas[::-1])[
        ::-1
    ]  # the recursion, from the last token backwards
    return advantages, advantages + values


def estimated(
    sequences: Sequence[TrainSequence],
    values: Sequence[np.ndarray],
    lam: float,
    normalisation: Literal["batch", "running", "none"],
    before: Moments = NOTHING_SEEN,
) -> tuple[list[TrainSequence], Moments]:
    """Return the sequences with advantage, value and return at each trained token, 0
    elsewhere, and the moments of the advantages of all batches, those `before`
    included. values: [len] per sequence. normalisation: centre advantages and divide
    them by the deviation, over all trained tokens of the batch (batch) or of all
    batches (running).
    """
    pairs = [
        advantages_and_returns(_rewards(s), v[s.trained], lam)
        for s, v in zip(sequences, values, strict=True)
    ]
    advantages = [a for a, _ in pairs]
    everything = np.concatenate(advantages)
    after = before.after(everything)
    if normalisation != "none":
        scale = after if normalisation == "running" else NOTHING_SEEN.after(everything)
        advantages = [(a - scale.mean) / scale.deviation for a in advantages]
    result = [
        replace(
            s, advantage=_placed(s, a), value=_placed(s, v[s.trained]), value_target=_placed(s, r)
        )
        for s, v, a, (_, r) in zip(sequences, values, advantages, pairs, strict=True)
    ]
    return result, after


def value_statistics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Return statistics of `estimated` sequences; explained_variance: 1 - Var(R - V) /
    Var(R), NaN if R is constant.
    """
    values = np.concatenate([s.of_trained(s.value) for s in sequences])
    returns = np.concatenate([s.of_trained(s.value_target) for s in sequences])
    spread = float(returns.var())
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": (
            1 - float((returns - values).var()) / spread if spread else float("nan")
        ),
    }


def _rewards(sequence: TrainSequence) -> np.ndarray:
    """Return the rewards [trained tokens] float64: the rollout's with the last token,
    less each token's KL penalty.
    """
    rewards = 0.0 - sequence.of_trained(sequence.kl_penalty)
    rewards[-1] += sequence.reward
    return rewards


def _placed(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """Place `values` at the sequence's trained tokens, 0 elsewhere: [len] float32."""
    out = np.zeros(len(sequence), np.float32)
    out[sequence.trained] = values
    return out
