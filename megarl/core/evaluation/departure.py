"""Whether a run's score has left what its own earlier forecast allows, below or above.

The law of the forecast never falls. So `predicted_least` of a row of eval.jsonl, the
lower of the curve's values then and at the run's end, holds for every later evaluation,
with the lower end of its 95 % interval; so does `predicted_most`, the higher of both,
with the upper end. A measured score has the sampling noise of its answers besides. It
has left the forecast if the newest two scores are both beyond one earlier bound, on the
same side, by more than both explain: a single one may be chance.

Below, the run gets worse, and every earlier forecast says so as long as that lasts.
Above, the policy has learnt something new, or exploits its grader: that is news only to
the last forecast before the two scores, since later ones follow the run up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot, sqrt

from megarl.core.base.rundir import Row
from megarl.core.evaluation.forecast import PASS_RATE

DEVIATIONS = 1.96
"""Half of a 95 % interval, in standard deviations of an evaluation's noise."""
IN_A_ROW = 2
"""Evaluations that have to be outside the interval."""


@dataclass(frozen=True)
class Departure:
    """The newest score, and the earlier forecast that it contradicts.

    name: the score's column. bound: what the forecast allows it. forecast_step: of the
    forecast.
    """

    name: str
    score: float
    step: int
    bound: float
    forecast_step: int

    @property
    def below(self) -> bool:
        """Whether the score is below the bound, not above."""
        return self.score < self.bound


@dataclass(frozen=True)
class _Bound:
    """A forecast's bound for later scores. sign: 1 if they stay above it, -1 below.
    end: the end of the bound's interval, on the outer side.
    """

    sign: int
    value: float
    end: float

    def broken_by(self, score: float, noise: float) -> bool:
        """Return whether a score is beyond the bound by more than the interval and the
        score's own noise explain together.
        """
        beyond = self.sign * (self.value - score)
        return beyond > hypot(self.value - self.end, noise)


def lasting_departure(evaluations: Sequence[Row]) -> Departure | None:
    """Return how the newest scores of a run, given in order of steps, contradict an
    earlier forecast; None if they do not.

    Of several forecasts, it is the one that is furthest from the newest score.
    """
    newest = evaluations[-IN_A_ROW:]
    earlier = evaluations[:-IN_A_ROW]
    departures: list[Departure] = []
    for forecast in earlier:
        name = str(forecast.get("predicted_score", PASS_RATE))
        for bound in _bounds(forecast, forecast is earlier[-1]):
            if all(_breaks(row, name, bound) for row in newest):
                departure = Departure(
                    name,
                    score=newest[-1][name],
                    step=newest[-1]["step"],
                    bound=bound.value,
                    forecast_step=forecast["step"],
                )
                departures.append(departure)
    return max(departures, key=lambda d: abs(d.score - d.bound), default=None)


def _bounds(forecast: Row, last: bool) -> Iterator[_Bound]:
    """Yield the bounds that a row of eval.jsonl has for later scores. last: it is the
    last forecast before them.
    """
    if "predicted_least" in forecast and "predicted_least_low" in forecast:
        value = forecast["predicted_least"]
        yield _Bound(sign=1, value=value, end=forecast["predicted_least_low"])
    if last and "predicted_most" in forecast and "predicted_most_high" in forecast:
        value = forecast["predicted_most"]
        yield _Bound(sign=-1, value=value, end=forecast["predicted_most_high"])


def _breaks(row: Row, name: str, bound: _Bound) -> bool:
    """Return whether a score is beyond a bound's interval, widened by the score's own
    noise.
    """
    score = row.get(name)
    suffix = name.removeprefix(PASS_RATE)
    prompts = row.get(f"n_prompts{suffix}")
    if score is None or not prompts:
        return False
    # The same prompts are asked each time, so only the answers vary. Where all were
    # right or all were wrong, one answer that differs still may.
    answers = prompts * row.get(f"samples{suffix}", row["samples"])
    share = min(max(score, 1 / answers), 1 - 1 / answers)
    noise = DEVIATIONS * sqrt(max(0.0, share * (1 - share)) / answers)
    return bound.broken_by(score, noise)
