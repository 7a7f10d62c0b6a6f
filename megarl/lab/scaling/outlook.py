"""What the evaluations so far predict for the rest of a live run.

    rows of eval.jsonl, metrics.jsonl ─► fit ─► score at the last step, gain of further compute, whether it is worth it

Compute at the last step is the present one times steps / step. The next tenth of that budget is worth its price while it is
predicted to gain more than an evaluation's noise, sqrt(p (1 − p) / answers): a smaller gain would be indistinguishable from
none.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.evaluation.forecast import FURTHER_HOURS, PASS_RATE, Row
from megarl.lab.scaling.extrapolate import predict
from megarl.lab.scaling.fit import FEW_POINTS, WIDE_INTERVAL, fit
from megarl.lab.scaling.points import PointColumns, curve_of_run

NEXT = 0.1
"""Part of the budget that is weighed against the noise."""


def forecast(evaluations: Sequence[Row], metrics: Iterable[Row], steps: int, score: str = PASS_RATE) -> Row:
    """Forecast after the last of these evaluations, for a run of `steps` steps: columns of eval.jsonl.

    Empty if they are too few, or no curve fits. score: `pass_rate`, or that of a task or a suite, `pass_rate/math`.
    """
    last = evaluations[-1]
    if not last["step"]:
        return {}
    try:
        fitted = fit([curve_of_run("run", evaluations, metrics, "the run", PointColumns(score=score))])
    except MegarlError:
        return {}
    now = last["compute_hours"]
    budget = now * max(1.0, steps / last["step"])
    final = predict(fitted, np.array([budget]))
    here, after, soon = fitted(np.array([now, now + FURTHER_HOURS[fitted.unit], now + NEXT * budget])).tolist()
    suffix = score.removeprefix(PASS_RATE)
    answers = last[f"n_prompts{suffix}"] * last.get(f"samples{suffix}", last["samples"])
    rate = min(max(last[score], 1 / answers), 1 - 1 / answers)  # a perfect score is not without noise
    noise = math.sqrt(rate * (1 - rate) / answers)
    # Training is never judged to be enough before there are enough points, some beyond the midpoint, and a known ceiling.
    settled = fitted.n >= FEW_POINTS and fitted.window[1] > fitted.C_mid and np.ptp(fitted.A_interval) <= WIDE_INTERVAL
    return {
        "predicted_score": score,
        "predicted_hours": budget,
        "predicted_asymptote": fitted.A,
        "predicted_final": float(final.pass_rate[0]),
        "predicted_final_low": float(final.low[0]),
        "predicted_final_high": float(final.high[0]),
        "predicted_gain": after - here,
        "predicted_next_gain": soon - here,
        "evaluation_noise": noise,
        "enough": float(settled and soon - here < noise),
    }
