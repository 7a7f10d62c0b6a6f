"""How well do smaller policies predict a larger one's curve? The largest size of each
recipe in the corpus, from the others.

    python -m benchmarks.transfer DIR/records [--part open | all] [--out FILE.json]

DIR is made by `python -m benchmarks.corpus`; without --part all, held-out runs are
neither fitted nor predicted. Runs of a size are fitted together, whatever their dtype
and seed. Predicted are each score of the largest size in the second half of its
compute, and A and C_mid of its own fit. The power law is compared with the next smaller
size's fit, with C_mid proportional to the size. An interval is widened by the noise of
the evaluation with which it is compared.
"""

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.corpus import KINDS, SIZES, CorpusRun
from benchmarks.forecasts import arguments, noise
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.points import Curve
from megarl.predict.scaling.transfer import transfer

Row = dict[str, Any]
LEAST = 3  # fewest sizes of a recipe: two to fit, and the largest


def sizes(runs: list[CorpusRun]) -> dict[str, dict[float, list[Curve]]]:
    """Return the curves of each recipe by policy size, in ascending order."""
    found: dict[str, dict[float, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: SIZES[run.size].active):
        found[run.recipe][float(SIZES[run.size].active)].append(run.curve)
    return found


def judge(recipe: str, curves: dict[float, list[Curve]]) -> Row:
    *smaller, largest = curves
    fits = {n: fit(curves[n], start=0.0) for n in smaller}
    own = fit(curves[largest], start=0.0)
    known = [curve.r0 for curve in curves[largest] if curve.r0 is not None]
    found = transfer(fits, largest, float(np.mean(known)) if known else None)
    (a, a_low, a_high) = found.intervals[:, 0]
    (c, c_low, c_high) = found.intervals[:, 2]
    rows = []
    for curve in curves[largest]:
        later = curve.hours >= curve.hours[-1] / 2
        predicted = found.scores(curve.hours[later])
        next_smaller = fits[smaller[-1]](curve.hours[later] * smaller[-1] / largest)
        for score, (middle, low, high), plain in zip(
            curve.pass_rate[later], predicted.T, next_smaller, strict=True
        ):
            one = 1.96 * noise(score, curve)
            inside = (
                middle - math.hypot(middle - low, one)
                <= score
                <= middle + math.hypot(high - middle, one)
            )
            rows.append((score - middle, float(inside), high - low, score - plain))
    errors, inside, widths, plain_errors = np.array(rows).T
    return {
        "recipe": recipe,
        "from": smaller,
        "size": largest,
        "scores": len(rows),
        "inside": float(np.mean(inside)),
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "median_width": float(np.median(widths)),
        "rmse_of_next_smaller": float(np.sqrt(np.mean(plain_errors**2))),
        "A": [a, a_low, a_high],
        "own_A": [own.A, *own.A_interval],
        "C_mid": [c, c_low, c_high],
        "own_C_mid": [own.C_mid, *own.C_mid_interval],
    }


def main() -> None:
    runs, options = arguments(__doc__, ("open", "all"))
    judged = []
    for recipe, curves in sizes(runs).items():
        if len(curves) < LEAST:
            ran = {run.name.partition("-seed")[0] for run in runs}
            lacking = [
                kind.name for kind in KINDS if kind.recipe == recipe and kind.name not in ran
            ]
            has = f"{len(curves)} of {LEAST} sizes in the {options.part} part"
            print(f"{recipe}: {has}, which has no record of {', '.join(lacking) or 'any other'}")
            continue
        row = judge(recipe, curves)
        sources = ", ".join(f"{n / 1e6:.1f}m" for n in row["from"])
        errors = f"RMSE {row['rmse']:.3f} (next smaller size: {row['rmse_of_next_smaller']:.3f})"
        ceiling = (
            "A {:.2f} ({:.2f} to {:.2f})".format(*row["A"]) + f", own fit {row['own_A'][0]:.2f}"
        )
        print(
            f"{recipe}: {row['size'] / 1e6:.1f}m from {sources}: {row['scores']} scores,"
            f" {row['inside']:.0%} inside, {errors}, median width {row['median_width']:.3f};"
            f" {ceiling}"
        )
        judged.append(row)
    if not judged:
        print("nothing is judged yet")
    if options.out and judged:
        options.out.write_text(json.dumps({"part": options.part, "rows": judged}, indent=1) + "\n")


if __name__ == "__main__":
    main()
