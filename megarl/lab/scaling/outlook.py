"""What the evaluations so far predict for the rest of a live run.

    rows of eval.jsonl, metrics.jsonl ─► fit ─► Outlook: score at the last step, gain of further compute, whether it is worth it

Compute at the last step is the present one times steps / step. The next tenth of that budget is worth its price while it is
predicted to gain more than an evaluation's noise, sqrt(p (1 − p) / answers): a smaller gain would be indistinguishable from
none.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.evaluation.forecast import FURTHER_HOURS, PASS_RATE, Row
from megarl.lab.scaling.extrapolate import predict
from megarl.lab.scaling.fit import FEW_POINTS, WIDE_INTERVAL, Fit, fit
from megarl.lab.scaling.points import PointColumns, curve_of_run

NEXT = 0.1
"""Part of the budget that is weighed against the noise."""


@dataclass(frozen=True)
class Outlook:
    """A forecast of pass rates. hours: compute at the last step; low, high: 95 % interval of the final pass rate.

    gain: from `FURTHER_HOURS`; next_gain: from the next tenth of the budget; settled: the points support a decision, without
    which more training is never judged not worth its price.
    """

    hours: float
    asymptote: float
    final: float
    low: float
    high: float
    gain: float
    next_gain: float
    noise: float
    settled: bool
    score: str = PASS_RATE
    """Column of eval.jsonl that the forecast is about."""

    @property
    def enough(self) -> bool:
        """Whether the run may as well stop."""
        return self.settled and self.next_gain < self.noise

    def row(self) -> dict[str, float | str]:
        """Return the forecast as columns of eval.jsonl."""
        return {
            "predicted_score": self.score,
            "predicted_hours": self.hours,
            "predicted_asymptote": self.asymptote,
            "predicted_final": self.final,
            "predicted_final_low": self.low,
            "predicted_final_high": self.high,
            "predicted_gain": self.gain,
            "predicted_next_gain": self.next_gain,
            "evaluation_noise": self.noise,
            "enough": float(self.enough),
        }


def outlook(evaluations: Sequence[Row], metrics: Iterable[Row], steps: int, score: str = PASS_RATE) -> Outlook | None:
    """Forecast after the last of these evaluations, for a run of `steps` steps; None if they are too few, or no curve fits.

    score: `pass_rate`, or that of a task or a suite, `pass_rate/math`.
    """
    last = evaluations[-1]
    if not last["step"]:
        return None
    try:
        fitted = fit([curve_of_run("run", evaluations, metrics, "the run", PointColumns(score=score))])
    except MegarlError:
        return None
    now = last["compute_hours"]
    budget = now * max(1.0, steps / last["step"])
    further = FURTHER_HOURS[fitted.unit]
    final = predict(fitted, np.array([budget]))
    here, after, soon = fitted(np.array([now, now + further, now + NEXT * budget]))
    suffix = score.removeprefix(PASS_RATE)
    answers = last[f"n_prompts{suffix}"] * last.get(f"samples{suffix}", last["samples"])
    rate = min(max(last[score], 1 / answers), 1 - 1 / answers)  # a perfect score is not without noise
    return Outlook(
        hours=budget,
        asymptote=fitted.A,
        final=float(final.pass_rate[0]),
        low=float(final.low[0]),
        high=float(final.high[0]),
        gain=float(after - here),
        next_gain=float(soon - here),
        noise=math.sqrt(rate * (1 - rate) / answers),
        settled=_settled(fitted),
        score=score,
    )


def forecast(evaluations: Sequence[Row], metrics: Sequence[Row], steps: int, score: str) -> Row:
    """Return the outlook as columns of eval.jsonl, for the controller; empty while there is none."""
    result = outlook(evaluations, metrics, steps, score)
    return result.row() if result else {}


def _settled(fitted: Fit) -> bool:
    """Return whether there are enough points, some beyond the midpoint, and a well-known ceiling."""
    low, high = fitted.A_interval
    return fitted.n >= FEW_POINTS and fitted.window[1] > fitted.C_mid and high - low <= WIDE_INTERVAL
