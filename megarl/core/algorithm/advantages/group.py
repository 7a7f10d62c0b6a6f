"""GRPO's advantages: a reward less the mean of its group, divided by a deviation.

    A_i = (r_i - mean(r)) / deviation of the group | the batch | all batches so far

Group mean and batch deviation: ScaleRL (arXiv 2510.13786), section 3.2; group
deviation: GRPO (arXiv 2402.03300); leave-one-out: RLOO (arXiv 2402.14740); running:
reward scaling in PPO with a critic (Engstrom et al. 2020, arXiv 2005.12729).
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from megarl.core.algorithm.advantages.moments import Moments
from megarl.core.base.types import Group

Centring = Literal["group", "leave_one_out", "none"]
Normalisation = Literal["batch", "group", "running", "none"]
Penalties = Mapping[tuple[int, int], float]
"""Amount subtracted from the reward of (ticket, sample) before centring. A group with
equal rewards still has no gradient.
"""

LEAST_DEVIATION = 1e-6
"""A group is divided by this at least. Else the roundings of a reward model would turn
equal answers into a signal.
"""


def centred_rewards(group: Group, centring: Centring, penalties: Penalties) -> np.ndarray:
    """Return the rewards of a group less their mean, [generations] float64."""
    return centred(penalised_rewards(group, penalties), group.rewards, centring)


def centred(values: np.ndarray, unpenalised: np.ndarray, centring: Centring) -> np.ndarray:
    """Return `values` [n] less their mean, or less the mean of the others. All are 0 if
    they were equal before penalties.
    """
    if centring == "none":
        return values
    if not np.ptp(unpenalised):
        return np.zeros(len(values))  # values - mean would not be exactly 0
    difference = values - values.mean()
    if centring == "leave_one_out":
        n = len(values)
        return difference * (n / (n - 1))  # = value - mean of the n - 1 others
    return difference


def divided(
    centred_groups: list[np.ndarray], normalisation: Normalisation, running: Moments
) -> list[np.ndarray]:
    """Return each group's centred rewards divided by a population deviation: that of
    all these groups (batch), of the group (group), or of all batches (running: the
    argument `running`, which must already include this one).
    """
    if normalisation == "none" or not centred_groups:
        return centred_groups
    if normalisation == "group":
        return [values / max(values.std(), LEAST_DEVIATION) for values in centred_groups]
    if normalisation == "running":
        deviation = running.deviation
    else:
        deviation = np.concatenate(centred_groups).std() or 1.0
    return [values / deviation for values in centred_groups]


def penalised_rewards(group: Group, penalties: Penalties) -> np.ndarray:
    """Return the group's rewards less their penalties, [generations] float64."""
    of_rollouts = [penalties.get((group.ticket, r.sample), 0.0) for r in group.rollouts]
    return group.rewards - of_rollouts
