"""A step that is trained again against the row it left: other weights are noticed,
another layout's rounding is not.
"""

import math

import numpy as np
import pytest

from megarl.core.evaluation.parity import LIMITS
from megarl.core.learner.main import contradiction


@pytest.mark.parametrize(("dtype", "experts"), sorted(LIMITS))
def test_rounding_passes_and_another_model_does_not(dtype: str, experts: bool) -> None:
    """If log-probs differ by exactly the limit on average, no way in which they differ
    exceeds it.
    """
    limits = LIMITS[dtype, experts]
    rng = np.random.default_rng(0)
    behaviour = -rng.exponential(1.0, 4000)
    learner = behaviour + rng.normal(0, 0.01, 4000)
    rounding = rng.normal(0, 1.0, 4000)
    rounding *= limits.mean / np.abs(rounding).mean()

    def row(logprobs: np.ndarray) -> dict[str, float]:
        return {"trained_logprob_diff": float(np.abs(logprobs - behaviour).mean())}

    for other in (rounding, -rounding, np.abs(rounding), np.zeros(4000)):
        assert contradiction(row(learner), row(learner + other), limits) == ""
    another = -rng.exponential(1.0, 4000)
    said = contradiction(row(learner), row(another), limits)
    assert "The weights are not those that the run had" in said
    assert contradiction(row(another), row(learner), limits)


def test_what_was_not_measured_contradicts_nothing() -> None:
    limits = LIMITS["fp32", False]
    for recorded in ({}, {"trained_logprob_diff": math.nan}, {"trained_logprob_diff": "?"}):
        assert contradiction(recorded, {"trained_logprob_diff": 3.5}, limits) == ""
    assert contradiction({"trained_logprob_diff": 3.5}, {}, limits) == ""
    assert contradiction({"trained_logprob_diff": 0.01}, {"trained_logprob_diff": math.inf}, limits)


def test_other_rollouts_are_an_older_journal_and_not_other_weights() -> None:
    limits = LIMITS["fp32", False]
    recorded = {"trained_logprob_diff": 0.01, "generated_tokens": 4035.0}
    assert contradiction(recorded, recorded, limits) == ""
    said = contradiction(
        recorded, {"trained_logprob_diff": 0.01, "generated_tokens": 4100.0}, limits
    )
    assert "RUN/rollouts is older than RUN/metrics.jsonl" in said
    assert contradiction({"trained_logprob_diff": 0.01}, recorded, limits) == "", (
        "of a row that does not say"
    )
