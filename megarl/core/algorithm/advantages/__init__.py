"""Advantages. Pure functions of groups and sequences.

group.py    a reward less the mean of its group, divided by a deviation (GRPO, RLOO)
turns.py    the same for each turn of an agent's session
critic.py   from a critic's values, token by token (GAE)
teacher.py  a teacher's log-probs, token by token (distillation)
moments.py  mean and deviation of all batches so far
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megarl.core.algorithm.advantages.group import divided
from megarl.core.algorithm.advantages.moments import NOTHING_SEEN, Moments
from megarl.core.algorithm.advantages.teacher import with_teacher
from megarl.core.algorithm.advantages.turns import NO_TURN, centred_returns, turns_of
from megarl.core.algorithm.batch import PerToken, TrainSequence, groups_in_loss
from megarl.core.base.types import Batch, Group
from megarl.core.recipe import Recipe

type TurnAdvantages = Mapping[tuple[int, int, int], float]
"""By (ticket, sample, turn); the turn is NO_TURN for an advantage of the rollout."""


def with_advantages(
    sequences: Sequence[TrainSequence],
    batch: Batch,
    recipe: Recipe,
    moments: Moments = NOTHING_SEEN,
) -> tuple[list[TrainSequence], Moments]:
    """Return the batch's `sequences_in_loss` with advantages, from rewards less the sum
    of each rollout's `kl_penalty`, and the `moments` of all batches' centred rewards,
    which then include this one's. With a critic all advantages stay 0: critic.py
    computes them.
    """
    settings = recipe.batch
    if settings.centring == "critic":
        return list(sequences), moments
    groups = groups_in_loss(batch.groups, settings)
    penalties: dict[tuple[int, int], float] = defaultdict(float)
    for s in sequences:  # a rollout may have several sequences
        penalties[s.ticket, s.sample] += float(np.sum(s.kl_penalty))
    centred = [centred_returns(group, settings.centring, penalties) for group in groups]
    nothing = np.zeros(0)  # for a batch without groups
    moments = moments.updated(np.concatenate([nothing, *centred]))
    advantages = _by_turn(groups, divided(centred, settings.advantage, moments))
    weight = recipe.teacher.weight
    return [replace(s, advantage=_advantage(s, advantages, weight)) for s in sequences], moments


def _by_turn(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> TurnAdvantages:
    """Return the advantages by turn. advantages: each group's [turns], in the order of
    `turns_of`.
    """
    by_turn: dict[tuple[int, int, int], float] = {}
    for group, values in zip(groups, advantages, strict=True):
        for turn, value in zip(turns_of(group), values, strict=True):
            sample = group.rollouts[turn.rollout].sample
            by_turn[group.ticket, sample, turn.number] = float(value)
    return by_turn


def _advantage(
    sequence: TrainSequence, advantages: TurnAdvantages, teacher_weight: float
) -> PerToken:
    """Return the advantage of the rollout, or with `agent.credit: turn` that of each
    token's turn, [tokens] float32.
    """
    rollout = (sequence.ticket, sequence.sample)
    if sequence.turns is None:
        return with_teacher(advantages[*rollout, NO_TURN], sequence.teacher_gain, teacher_weight)
    values = np.zeros(len(sequence), np.float32)
    for turn in np.unique(sequence.turns[sequence.trained]):
        values[sequence.turns == turn] = advantages[*rollout, int(turn)]
    return values
