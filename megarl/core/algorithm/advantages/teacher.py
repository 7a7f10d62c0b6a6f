"""Advantages from a teacher: on-policy distillation.

    A_t = (1 - weight) A + weight (log pi_T(y_t) - log mu(y_t))

On tokens of mu, log mu - log pi_T is the k1 estimate of the reverse KL(mu || pi_T).
With its negative as the advantage, each token descends that KL's gradient, without
credit for later tokens (Lu and Thinking Machines Lab 2025; GKD, arXiv 2306.13649, with
lambda 1 and reverse KL). It is not centred or divided: 0 means that both agree.
"""

import numpy as np

from megarl.core.algorithm.batch import PerToken


def with_teacher(advantage: float, teacher_gain: PerToken, weight: float) -> PerToken:
    """Return the mean of a rollout's `advantage` and of `teacher_gain` [tokens] with
    this `weight`; the advantage itself if the weight is 0.
    """
    if not weight:
        return advantage
    mixed = (1 - weight) * advantage + weight * np.asarray(teacher_gain)
    return mixed.astype(np.float32)
