"""How much better one model is than another on the same prompts, and how sure that is. Pure functions.

Prompts are what was drawn at random, and a prompt that is hard for one model is hard for the other: what counts is how the
difference varies from prompt to prompt, which is less than what the intervals of both scores say by themselves.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from megarl.core.evaluation.estimators import Interval


def paired_difference(a: Sequence[float], b: Sequence[float], step: float) -> Interval:
    """Mean of b - a over prompts, with its 95 % interval. a, b: [prompts], the same prompts in the same order.

    step: what one answer more changes in a prompt's value: 1/k of a share of k answers. The interval is Student's of the
    differences with two prompts added, one better and one worse by one step. With one answer a prompt these are the pseudo
    observations of Bonett and Price (2012) for paired proportions; without them few prompts of which most agree have an
    interval that is much too narrow, or none at all. step 0 adds none: for values that vary freely, such as lengths.
    """
    differences = np.subtract(b, a)
    mean = float(differences.mean())
    spread = np.concatenate([differences, (step, -step)]) if step else differences
    half = stdtrit(max(len(differences) - 1, 1), 0.975) * math.sqrt(float(spread.var()) / len(spread))
    centre = float(spread.mean())
    return Interval(mean, min(mean, centre - half), max(mean, centre + half))
