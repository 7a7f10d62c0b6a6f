"""Whether a run's score has fallen below what its own earlier forecast allows.

The law of the forecast never falls. So `predicted_least` of a row of eval.jsonl, the lower of
the curve's values then and at the run's end, holds for every later evaluation, with the lower
end of its 95 % interval. A measured score has the sampling noise of its answers besides. A fall
is real if the newest two scores are both below one earlier forecast by more than both explain:
a single one may be chance.

A score above its forecast is no alarm: the run does better than it was given credit for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, sqrt

from megarl.core.base.rundir import Row
from megarl.core.evaluation.forecast import PASS_RATE

DEVIATIONS = 1.96
"""Half of a 95 % interval, in standard deviations of an evaluation's noise."""
IN_A_ROW = 2
"""Evaluations that have to be below the interval."""


@dataclass(frozen=True)
class Fall:
    """The newest score, and the earlier forecast that it contradicts. name: the score's column; least: of the forecast."""

    name: str
    score: float
    step: int
    least: float
    forecast_step: int


def lasting_fall(evaluations: Sequence[Row]) -> Fall | None:
    """Return the fall that lasts at the newest of a run's evaluations, in order of steps; None if there is none."""
    newest = evaluations[-IN_A_ROW:]
    falls = []
    for row in evaluations[:-IN_A_ROW]:
        if "predicted_least" not in row or "predicted_least_low" not in row:
            continue
        name = str(row.get("predicted_score", PASS_RATE))
        if all(_contradicts(late, name, row) for late in newest):
            falls.append(Fall(name, newest[-1][name], newest[-1]["step"], row["predicted_least"], row["step"]))
    return max(falls, key=lambda fall: fall.least, default=None)


def _contradicts(row: Row, name: str, forecast: Row) -> bool:
    """Return whether a score is below the interval of an earlier row's forecast, widened by the score's own noise."""
    score = row.get(name)
    suffix = name.removeprefix(PASS_RATE)
    prompts = row.get(f"n_prompts{suffix}")
    if score is None or not prompts:
        return False
    # The same prompts are asked each time, so only the answers vary. Where all were right or
    # all were wrong, one answer that differs still may.
    answers = prompts * row.get(f"samples{suffix}", row["samples"])
    share = min(max(score, 1 / answers), 1 - 1 / answers)
    noise = DEVIATIONS * sqrt(max(0.0, share * (1 - share)) / answers)
    least = forecast["predicted_least"]
    return score < least - hypot(least - forecast["predicted_least_low"], noise)
