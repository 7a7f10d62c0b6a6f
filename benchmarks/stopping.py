"""Replays the stop rule `run.stop_when` on recorded runs: what would it have saved, and
what would it have forgone?

    python -m benchmarks.stopping DIR/records [--part open | held-out] [--out FILE.json]

DIR is made by `python -m benchmarks.corpus`. After each evaluation of a run the
forecast is made from the data until then, and the rule is applied as in the controller.
A price is a gain in pass rate per whole budget of the run, so `.02` means: stop if the
rest brings less than .02 times its share of the budget. megarl's rule, with the upper
end of the interval, is compared with

    point estimate   the same rule with the gain of the best fit
    hindsight        the first evaluation after which the rest really brought less than
                     the price, by the recorded scores

A stop is wrong if the rest brought more than the price and two standard errors of the
two evaluations.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.corpus import CorpusRun
from benchmarks.forecasts import arguments, noise, part_of
from megarl.core.evaluation.forecast import not_worth_it
from megarl.predict.scaling.extrapolate import forecast
from megarl.predict.scaling.fit import fit

PRICES = (0.02, 0.05, 0.1, 0.2)

Row = dict[str, Any]


class EarlyEnd(NamedTuple):
    """Where a rule ended a run. saved: share of the budget; forgone: the gain in pass
    rate from the rest.
    """

    run: str
    saved: float
    forgone: float
    wrong: bool


def rows_of(run: CorpusRun) -> list[Row]:
    """Return the rows of eval.jsonl, each with the forecast that was possible then.
    Hours are petaFLOP here.

    `gain`: the gain from the rest, by the fitted law alone.
    """
    scores = [
        row | {"compute_hours": row["flop"] / 1e15, "compute_unit": "core"} for row in run.scores
    ]
    rows = [row | forecast(scores[: n + 1], (), scores[-1]["step"]) for n, row in enumerate(scores)]
    for n, row in enumerate(rows):
        if "predicted_hours" in row:
            law = fit([part_of(run.curve, slice(n))])
            here, end = law(np.array([row["compute_hours"], row["predicted_hours"]]))
            row["gain"] = float(end - here)
    return rows


def upper_end(row: Row, price: float) -> bool:
    return bool(not_worth_it(row, f"gain < {price} per core-hour"))


def point_estimate(row: Row, price: float) -> bool:
    return "gain" in row and row["gain"] < price * (row["predicted_hours"] - row["compute_hours"])


def stops(
    run: CorpusRun, rule: Callable[[Row, float], bool], price: float, rows: list[Row]
) -> EarlyEnd:
    """Replay one rule. price: gain in pass rate per whole budget."""
    last = rows[-1]
    budget = rows[-1]["compute_hours"]
    ended = next((row for row in rows[:-1] if rule(row, price / budget)), last)
    saved = 1 - ended["compute_hours"] / budget
    forgone = last["pass_rate"] - ended["pass_rate"]
    error = math.hypot(noise(last["pass_rate"], run.curve), noise(ended["pass_rate"], run.curve))
    return EarlyEnd(run.name, saved, forgone, forgone > price * saved + 2 * error)


def hindsight(run: CorpusRun, price: float, rows: list[Row]) -> EarlyEnd:
    end = rows[-1]
    worth = {
        row["step"]: (
            (end["pass_rate"] - row["pass_rate"])
            < price * (end["compute_hours"] - row["compute_hours"]) / end["compute_hours"]
        )
        for row in rows[:-1]
    }
    return stops(run, lambda row, _: worth[row["step"]], price, rows)


def main() -> None:
    runs, options = arguments(__doc__)
    known = [(run, rows_of(run)) for run in runs]
    figures = []
    print(
        "| price | rule | runs ended early | compute saved, mean | forgone, mean | forgone, most |"
        " wrong |\n" + "|---" * 7 + "|"
    )
    for price in PRICES:
        for name, replay in {
            "upper end": lambda run, rows, price: stops(run, upper_end, price, rows),
            "point estimate": lambda run, rows, price: stops(run, point_estimate, price, rows),
            "hindsight": lambda run, rows, price: hindsight(run, price, rows),
        }.items():
            each = [replay(run, rows, price) for run, rows in known]
            early = [stop for stop in each if stop.saved > 0]
            figures.append(
                {
                    "price": price,
                    "rule": name,
                    "early": f"{len(early)} of {len(each)}",
                    "saved": round(float(np.mean([stop.saved for stop in each])), 3),
                    "forgone": round(float(np.mean([stop.forgone for stop in each])), 4),
                    "forgone_most": round(max((stop.forgone for stop in early), default=0.0), 4),
                    "wrong": sum(stop.wrong for stop in each),
                }
            )
            print("| " + " | ".join(map(str, figures[-1].values())) + " |")
    if options.out:
        options.out.write_text(json.dumps({"part": options.part, "rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
