"""Advantages of turns: with `agent.credit: turn` a rollout has one advantage for each
turn t of its session.

It comes from the turn's return G_t, which is R plus the sum of the agent's rewards
after turn t:

    A_t = (G_t - the mean of G_t over the rollouts of the group that have a turn t)
          / deviation

This is GTPO's advantage (arXiv 2511.14846) without a discount. A turn that no other
rollout has is compared with the mean of R.
"""

from typing import NamedTuple

import numpy as np

from megarl.core.algorithm.advantages.group import (
    Centring,
    Penalties,
    centred,
    centred_rewards,
    penalised_rewards,
)
from megarl.core.base.types import Group

NO_TURN = -1
"""Number of the only turn of a rollout whose turns have no credit of their own."""


class Turn(NamedTuple):
    """A turn of a group's rollout."""

    rollout: int  # index in the group
    number: int
    credit: float  # the agent's rewards after it


def turns_of(group: Group) -> list[Turn]:
    """Return the turns of all rollouts, in order; of a rollout whose turns have no
    credit of their own, one turn, NO_TURN.
    """
    turns: list[Turn] = []
    for index, rollout in enumerate(group.rollouts):
        for number, credit in sorted(rollout.credits.items()):
            turns.append(Turn(index, number, credit))
    return turns


def centred_returns(group: Group, centring: Centring, penalties: Penalties) -> np.ndarray:
    """Return the group's centred returns [turns] float64, in the order of `turns_of`;
    without turns' credit these are its centred rewards. If all rewards and credits are
    equal, all are 0, unless centring is none.
    """
    turns = turns_of(group)
    if all(turn.number == NO_TURN for turn in turns):
        return centred_rewards(group, centring, penalties)
    rollouts = np.array([turn.rollout for turn in turns])
    numbers = np.array([turn.number for turn in turns])
    credits = np.array([turn.credit for turn in turns])
    rewards = penalised_rewards(group, penalties)
    returns = rewards[rollouts] + credits
    if centring == "none":
        return returns
    unpenalised = group.rewards[rollouts] + credits
    result = np.zeros(len(turns))
    for number in np.unique(numbers):
        same_turn = numbers == number
        if np.count_nonzero(same_turn) > 1:
            result[same_turn] = centred(returns[same_turn], unpenalised[same_turn], centring)
        elif np.ptp(group.rewards):  # a turn that no other rollout has
            result[same_turn] = returns[same_turn] - rewards.mean()
        else:  # the same, with equal rewards: exactly the credit is left
            result[same_turn] = credits[same_turn]
    return result
