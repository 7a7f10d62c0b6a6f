"""Signs that a run is about to go wrong, of one row of metrics: numbers for its row, words for the view.

Healthy runs cut off under 5 % of their answers; 10 to 15 % destabilise (ScaleRL, arXiv 2510.13786). An effective sample size is
the share of the batch's tokens that as many equally weighted ones would be worth.
"""

import math
from collections.abc import Mapping
from typing import Any

TRUNCATION_LIMIT = 0.10
SAMPLE_SIZE_LIMIT = 0.10


def flags(row: Mapping[str, Any]) -> dict[str, float]:
    """1 for each sign that `row` shows, 0 for each that it does not; none of a metric that it lacks."""
    truncated, size = row.get("truncation_rate", math.nan), row.get("effective_sample_size", math.nan)
    found = {}
    if math.isfinite(truncated):
        found["warning_truncation"] = float(truncated > TRUNCATION_LIMIT)
    if math.isfinite(size):
        found["warning_sample_size"] = float(size < SAMPLE_SIZE_LIMIT)
    return found


def words(truncated: float | None, sample_size: float | None) -> list[str]:
    """What a user should look at, given recent means of both; None: not measured."""
    found = []
    if truncated is not None and truncated > TRUNCATION_LIMIT:
        found.append(
            f"{truncated:.0%} of the answers are cut off: above 10 % training destabilises; raise length.answer_tokens"
        )
    if sample_size is not None and sample_size < SAMPLE_SIZE_LIMIT:
        found.append(
            f"the effective sample size is {sample_size:.0%} of the batch's tokens: the weights run away from those that "
            "generated; lower pipeline.k or the learning rate"
        )
    return found
