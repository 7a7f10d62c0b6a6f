"""Advantages: centred rewards, divided by a deviation. Pure functions of groups.

    rewards ── centring ──► centred ── / deviation of the group | the batch | all batches so far (Moments) ──► advantages

With `agent.credit: turn` a rollout has one advantage for each turn t of its session. It
comes from the turn's return G_t, which is R plus the sum of the agent's rewards after
turn t:

    A_t = (G_t - the mean of G_t over the rollouts of the group that have a turn t) /
    deviation

This is GTPO's advantage (arXiv 2511.14846) without a discount. A turn that no other
rollout has is compared with the mean of R.

Group mean and batch deviation: ScaleRL (arXiv 2510.13786), section 3.2; group
deviation: GRPO (arXiv 2402.03300); leave-one-out: RLOO (arXiv 2402.14740); running:
reward scaling in PPO with a critic (Engstrom et al. 2020, arXiv 2005.12729).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np

from megarl.core.base.types import Group

Centring = Literal["group", "leave_one_out", "none"]
Normalisation = Literal["batch", "group", "running", "none"]
Penalties = Mapping[tuple[int, int], float]
"""Amount subtracted from the reward of (ticket, sample) before centring. A group with
equal rewards still has no gradient.
"""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all numbers so far, as in trlX and
    TRL. The recurrence of Chan, Golub and LeVeque 1979, in float64: the same batches
    give the same bits.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, values: np.ndarray) -> "Moments":
        """Return the moments after one more batch [n] float64. A batch changes nothing
        if it is empty, or if a value in it is not finite, which would cause all later
        steps to be skipped.
        """
        if not len(values) or not np.isfinite(values).all():
            return self
        before = self.count
        n = len(values)
        off = float(values.mean()) - self.mean
        return Moments(
            before + n,
            self.mean + off * n / (before + n),
            self.squares + float(values.var()) * n + off * off * before * n / (before + n),
        )

    @property
    def deviation(self) -> float:
        """Population deviation; 1, so that dividing changes nothing, before the first
        batch and if all numbers are equal.
        """
        return sqrt(self.squares / self.count) or 1.0 if self.count else 1.0


NOTHING_SEEN = Moments()
LEAST_DEVIATION = 1e-6
"""A group is divided by this at least. Else the roundings of a reward model would turn
equal answers into a signal.
"""


def divided(
    centred: list[np.ndarray], normalisation: Normalisation, running: Moments
) -> list[np.ndarray]:
    """Return each group's `centred_rewards` divided by a population deviation: that of
    all these groups (batch), of the group (group), or of all batches (running: the
    argument `running`, which must already include this one).
    """
    if normalisation == "none" or not centred:
        return centred
    if normalisation == "group":
        return [c / max(c.std(), LEAST_DEVIATION) for c in centred]
    deviation = (
        running.deviation if normalisation == "running" else np.concatenate(centred).std() or 1.0
    )
    return [c / deviation for c in centred]


def turns_of(group: Group) -> list[tuple[int, int]]:
    """Return (rollout, turn) for all turns of the group; a rollout whose turns have no
    credit of their own has one turn, -1.
    """
    return [
        (n, turn) for n, rollout in enumerate(group.rollouts) for turn in sorted(rollout.credits)
    ]


def centred_rewards(group: Group, centring: Centring, penalties: Penalties) -> np.ndarray:
    """Return the group's centred returns, float64: [generations] or, if turns have
    credit of their own, in the order of `turns_of`. Leaving one out gives n / (n - 1)
    times the deviation from the group's mean. If all rewards are equal, all advantages
    are 0, unless centring is none.
    """
    rewards = group.rewards - [penalties.get((group.ticket, r.sample), 0.0) for r in group.rollouts]
    each = [sorted(r.credits.items()) for r in group.rollouts]
    rollouts = np.repeat(np.arange(len(each)), [len(turns) for turns in each])
    turns, credits = (np.array([entry[k] for entries in each for entry in entries]) for k in (0, 1))
    returns = rewards[rollouts] + credits
    if centring == "none":
        return returns
    centred = np.zeros(
        len(turns)
    )  # exactly 0 where all are equal; in floating point, G - mean would not be
    for turn in np.unique(turns):
        at = turns == turn
        unpenalised = group.rewards[rollouts[at]] + credits[at]
        count = np.count_nonzero(at)
        if count == 1:
            centred[at] = returns[at] - rewards.mean() if np.ptp(group.rewards) else credits[at]
        elif np.ptp(unpenalised):
            lowered = returns[at] - returns[at].mean()
            centred[at] = lowered if centring == "group" else lowered * (count / (count - 1))
    return centred
