"""Is the step that a learner trains first the one that an earlier life has recorded in RUN/metrics.jsonl?

A learner that comes back begins with a batch that was trained before, with weights that should be those of that time. Both
rows have the mean, over the same tokens, of |learner's log-prob less behaviour log-prob|. By the triangle inequality two such
means differ by no more than the mean |difference| of the two learners' log-probs. Of that rounding explains, at any layout, no
more than it explains between server and learner: the limit of parity. What differs by more is another model.

The first step alone tells: a learning rate that was changed makes the steps behind it other ones, and may.
"""

import math
from collections.abc import Mapping
from typing import Any

from megarl.core.weights.parity import Limits

MEASURED = "trained_logprob_diff"


def contradiction(recorded: Mapping[str, Any], now: Mapping[str, Any], limits: Limits) -> str:
    """How far the step is from its recorded row; empty if rounding explains it, or one of them has nothing to compare."""
    before, after = recorded.get(MEASURED), now.get(MEASURED)
    if not isinstance(before, float) or not isinstance(after, float) or not math.isfinite(before):
        return ""
    if abs(after - before) <= limits.mean:
        return ""
    return (
        f"{MEASURED} is {after:.3g} and was {before:.3g} when the step was trained before; rounding explains a difference of "
        f"{limits.mean:g}. The weights are not those that the run had: put back what was changed since (model, checkpoints, "
        "code), or give another run.name"
    )
