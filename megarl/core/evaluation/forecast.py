"""The forecast in a row of eval.jsonl, as text. The code that starts the controller
passes it a function that makes a forecast, and one that compares the reward with a
trusted grader.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from megarl.core.base.rundir import Row, RunDir

Forecast = Callable[[Sequence[Row], Iterable[Row], int, str], Row]
"""Makes the forecast's columns, if there is one, from rows of eval.jsonl and
metrics.jsonl, run.steps and the score's name.
"""
TrustedWatch = Callable[[RunDir, int, Sequence[str]], Row]
"""Judges for each task, from the results of all evaluations up to this version, whether
the trusted score falls while the reward rises. Returns columns of eval.jsonl, empty
without a trusted grader.
"""
PASS_RATE = "pass_rate"
FURTHER_HOURS = {"gpu": 1000.0, "core": 1.0}
"""The additional compute for which a forecast states the gain, by unit."""
STOP_WHEN = re.compile(r"gain < (\S+) per (GPU|core)-hour")


def not_worth_it(row: Row, stop_when: str) -> str:
    """Return a text that says why a run with this `run.stop_when` may end at a row of
    eval.jsonl; empty if it may not.
    """
    price = STOP_WHEN.fullmatch(stop_when)
    if price is None or "predicted_rest_high" not in row:
        return ""
    least_gain, unit = price.groups()
    if unit.lower() != row["compute_unit"]:  # the row may be of a life on other devices
        return ""
    hours_left = row["predicted_hours"] - row["compute_hours"]
    gain = row["predicted_rest_high"]
    if hours_left <= 0 or gain >= float(least_gain) * hours_left:
        return ""
    return (
        f"the last {hours_left:,.4g} {unit}-hours are predicted to gain {_of(row)}{gain:.4f} at"
        " most"
    )


def forecast_text(row: Row) -> str:
    """Return the forecast of a row as text; empty if it has none."""
    if "predicted_final" not in row:
        return ""
    low = row["predicted_final_low"]
    high = row["predicted_final_high"]
    ceiling = f"ceiling {row['predicted_asymptote']:.3f}"
    gain = f"{row['predicted_rest_high']:+.3f} at most in the rest"
    return (
        f"{_of(row)}{row['predicted_final']:.3f} ({low:.3f}–{high:.3f}) at the end · {ceiling} ·"
        f" {gain}"
    )


def _of(row: Row) -> str:
    """Return the name of the pass rate that is forecast, followed by a space; empty for
    the overall one.
    """
    name = row.get("predicted_score", PASS_RATE).removeprefix(PASS_RATE).removeprefix("/")
    return f"{name} " if name else ""
