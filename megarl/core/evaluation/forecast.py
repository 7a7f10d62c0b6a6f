"""The forecast in a row of eval.jsonl, in words. Whoever starts the controller passes the function that makes one."""

from collections.abc import Callable, Sequence

from megarl.core.base.rundir import Row as Row

Forecast = Callable[[Sequence[Row], Sequence[Row], int, str], Row]
"""Makes the forecast's columns from the rows of eval.jsonl, those of metrics.jsonl, run.steps and the forecast column; empty
while there is none.
"""
PASS_RATE = "pass_rate"
FURTHER_HOURS = {"gpu": 1000.0, "core": 1.0}
"""The compute whose gain a forecast states, by unit."""


def enough(row: Row) -> str:
    """Return in words why the run may stop, for a row of eval.jsonl that says so."""
    gain, noise = f"{_of(row)}{row['predicted_next_gain']:.4f}", f"{row['evaluation_noise']:.4f}"
    return f"the next tenth of the budget is predicted to bring {gain}, less than the noise of an evaluation ({noise})"


def words(row: Row) -> str:
    """Return the forecast of a row in words; empty if it has none."""
    if "predicted_final" not in row:
        return ""
    low, high, unit = row["predicted_final_low"], row["predicted_final_high"], row["compute_unit"]
    gain = f"{row['predicted_gain']:+.3f} in {FURTHER_HOURS[unit]:,.0f} {'GPU' if unit == 'gpu' else 'core'} h"
    ceiling = f"ceiling {row['predicted_asymptote']:.3f}"
    return f"{_of(row)}{row['predicted_final']:.3f} ({low:.3f}–{high:.3f}) at the end · {ceiling} · {gain}"


def _of(row: Row) -> str:
    """Return the name of the pass rate that is forecast, if there are several."""
    name = row.get("predicted_score", PASS_RATE).removeprefix(PASS_RATE).removeprefix("/")
    return f"{name} " if name else ""
