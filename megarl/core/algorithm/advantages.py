"""Advantages: centred rewards, divided by a deviation. Pure functions of groups.

    rewards ── centring ──► centred ── / deviation of the group | the batch | all batches so far (Moments) ──► advantages

Group's mean and batch's deviation: ScaleRL (arXiv 2510.13786), section 3.2; group's deviation: GRPO (arXiv 2402.03300);
leave-one-out: RLOO (arXiv 2402.14740); running: what PPO with a critic scales rewards with (Engstrom et al. 2020, arXiv
2005.12729; RunningMoments of trlX and of TRL's PPO trainer).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np

from megarl.core.base.types import Group

Centring = Literal["group", "leave_one_out", "none"]
Normalisation = Literal["batch", "group", "running", "none"]
Penalties = Mapping[tuple[int, int], float]
"""What is taken off the reward of (ticket, sample) before centring. A group of one reward has no gradient whatever it is."""
NO_PENALTIES: Penalties = {}


@dataclass(frozen=True)
class Moments:
    """Of a stream of numbers, each batch of which weighs `decay` times the next: weights, mean, sum of squared deviations.

    Decay 1 is mean and population deviation of all numbers so far, which is what trlX and TRL keep. Below 1 old batches are
    forgotten; the beginning needs no correction, for the count decays too. Batches are put together by the recurrence of Chan,
    Golub and LeVeque 1979 in float64: the same batches give the same bits. Part of the learner's checkpoint.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, values: np.ndarray, decay: float) -> "Moments":
        """With one more batch [n] float64. No values leave it as it is; so does one that is no number: its step is skipped, and
        all later ones would be."""
        if not len(values) or not np.isfinite(values).all():
            return self
        before, n = decay * self.count, len(values)
        off = float(values.mean()) - self.mean
        return Moments(
            before + n,
            self.mean + off * n / (before + n),
            decay * self.squares + float(values.var()) * n + off * off * before * n / (before + n),
        )

    @property
    def deviation(self) -> float:
        """Of the population; 1, which divides nothing, before the first batch and of numbers that are all the same."""
        return sqrt(self.squares / self.count) or 1.0 if self.count else 1.0


NOTHING_SEEN = Moments()


def advantages(
    groups: Sequence[Group],
    normalisation: Normalisation,
    centring: Centring = "group",
    running: Moments = NOTHING_SEEN,
    penalties: Penalties = NO_PENALTIES,
) -> list[np.ndarray]:
    """Centred rewards divided by a population deviation. One [generations] float64 a group.

    centring: minus the mean of the group, or of its other rollouts (n / (n - 1) times as much), or as they are.
    normalisation: batch: of all centred rewards of these groups; group: of the own group; running: of those of all batches up
    to this one, which `running` has seen already (`centred`); none: not divided.
    A group of one reward has advantage 0 throughout, unless nothing is taken off.
    """
    each = [centred_rewards(g, centring, penalties) for g in groups]
    if normalisation == "running":
        return [c / running.deviation for c in each]
    if normalisation == "none" or not groups:
        return each
    if normalisation == "group":  # "or 1": all of them may be the same
        return [c / (c.std() or 1.0) for c in each]
    deviation = centred(groups, centring, penalties).std() or 1.0
    return [c / deviation for c in each]


def centred(groups: Sequence[Group], centring: Centring, penalties: Penalties = NO_PENALTIES) -> np.ndarray:
    """[rollouts] float64 of all groups: what a deviation over groups is of."""
    return np.concatenate([np.zeros(0), *(centred_rewards(g, centring, penalties) for g in groups)])


def centred_rewards(group: Group, centring: Centring, penalties: Penalties = NO_PENALTIES) -> np.ndarray:
    """[generations] float64"""
    if not np.ptp(group.rewards) and centring != "none":  # exactly, which r - mean is not in floating point
        return np.zeros(len(group.rollouts))
    rewards = group.rewards - [penalties.get((group.ticket, r.sample), 0.0) for r in group.rollouts]
    if centring == "none":
        return rewards
    lowered = rewards - rewards.mean()
    return lowered if centring == "group" else lowered * (len(lowered) / (len(lowered) - 1))
