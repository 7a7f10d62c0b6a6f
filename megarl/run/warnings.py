"""Signs in a metrics row, and in one of eval.jsonl, that a run is about to go wrong: as numbers for the row, as words for the
view.

Healthy runs cut off under 5 % of their answers; 10 to 15 % destabilise (ScaleRL, arXiv 2510.13786). The effective sample size
is the number of equally weighted tokens that would be worth as much, as a share of the batch's tokens.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

TRUNCATION_LIMIT = 0.10
SAMPLE_SIZE_LIMIT = 0.10
MALFORMED_LIMIT = 0.50
OVER = "warning_overoptimisation"
"""A column of eval.jsonl; of several tasks, its beginning."""


def flags(row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 for each sign that `row` shows, 0 for each that it does not, and nothing for metrics that it lacks."""
    signs = {
        "warning_truncation": row.get("truncation_rate", math.nan) - TRUNCATION_LIMIT,
        "warning_sample_size": SAMPLE_SIZE_LIMIT - row.get("effective_sample_size", math.nan),
    }
    return {name: float(excess > 0) for name, excess in signs.items() if math.isfinite(excess)}


def words(mean: Callable[[str], float | None], end_of_thinking: str, evaluation: Mapping[str, Any]) -> list[str]:
    """Return messages for the user. mean: a metric's recent mean, None if not measured; end_of_thinking: the recipe's;
    evaluation: the newest row of eval.jsonl, empty before the first.
    """
    truncated, sample_size = mean("truncation_rate"), mean("effective_sample_size")
    malformed, messages = mean("format_error_rate"), []
    if truncated is not None and truncated > TRUNCATION_LIMIT:
        messages.append(
            f"{truncated:.0%} of the answers are cut off: above 10 % training destabilises; raise length.answer_tokens"
        )
    if sample_size is not None and sample_size < SAMPLE_SIZE_LIMIT:
        messages.append(
            f"the effective sample size is {sample_size:.0%} of the batch's tokens: the weights run away from those that "
            "generated; lower pipeline.k or the learning rate"
        )
    if malformed is not None and malformed > MALFORMED_LIMIT:
        share = "all answers" if malformed == 1 else f"{malformed:.0%} of the answers"
        cause = (
            f"their completions have no {end_of_thinking} (length.end_of_thinking) with an answer behind it. A model that "
            "was never trained to write it needs a warm start (megarl sft), or length.end_of_thinking= with length.control=none"
            if end_of_thinking
            else "their completions are empty"
        )
        messages.append(f"{share} are malformed and count as wrong: {cause}")
    return messages + [
        _overoptimised(evaluation, name) for name in evaluation if name.startswith(OVER) and evaluation[name]
    ]


def _overoptimised(row: Mapping[str, Any], warning: str) -> str:
    task = warning.removeprefix(OVER)  # "/NAME" if there are several
    fall, rise, step = (
        row.get(f"{name}{task}", math.nan) for name in ("trusted_fall", "proxy_rise", "trusted_peak_step")
    )
    return (
        f"{task[1:] or 'held out'}: the trusted score has fallen by {fall:.3f} since step {step:g} while the reward rose by "
        f"{rise:.3f}: the policy exploits the reward. Stop, keep the checkpoint nearest to that step, read what has changed "
        f"(megarl answers compare) and repair the grader, or hold the policy closer to where it began (reference)"
    )
