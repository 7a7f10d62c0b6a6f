"""Does the alarm for a score outside its forecast notice runs that get worse, and does
it let the others pass?

    python -m benchmarks.falls benchmarks/results/corpus [--curves FOLDER]

Each run is replayed evaluation by evaluation: a forecast from the scores so far, then
the judgement of the newest, as in a live run. `noticed`: runs with an alarm below the
forecast at any evaluation; `above`: runs with one above it. `fell`: the mean of the
last two scores is below the best mean of two in a row, by more than three standard
errors of their answers, twice over, and by .06 at least.

--curves: other people's runs, points.csv (curve, x, score, answers) and index.csv
(name, cls): evaluations (cls eval) and noisy short ones (tiny), where the answers
behind each score are stated. Curves of more than 30 points are averaged to 30.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path
from statistics import fmean

from benchmarks.corpus import read
from megarl.core.base.rundir import Row
from megarl.core.evaluation.departure import lasting_departure
from megarl.predict.scaling.extrapolate import forecast

MOST_POINTS = 30
LEAST_FALL = 0.06
STANDARD_ERRORS = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--curves", type=Path)
    options = parser.parse_args()
    kinds = {
        "corpus": [list(read(path).scores) for path in sorted(options.records.glob("*.jsonl.gz"))]
    }
    if options.curves:
        kinds |= curves_of(options.curves)
    print(
        "| runs | runs, forecasts | fell | of these noticed | of the others noticed | above |\n"
        + "|---" * 6
        + "|"
    )
    for kind, runs in kinds.items():
        judged = [(fell(scores), replayed(scores)) for scores in runs]
        of_fallen = [found.below for falls, found in judged if falls]
        of_others = [found.below for falls, found in judged if not falls]
        forecasts = sum(found.forecasts for _, found in judged)
        above = sum(found.above for _, found in judged)
        noticed = f"{len(of_fallen)} | {sum(of_fallen)} | {sum(of_others)} | {above}"
        print(f"| {kind} | {len(runs)}, {forecasts} | {noticed} |", flush=True)


@dataclass(frozen=True)
class Replayed:
    """Whether an alarm was raised at any evaluation, below or above a forecast, and the
    number of forecasts.
    """

    below: bool
    above: bool
    forecasts: int


def replayed(scores: Sequence[Row]) -> Replayed:
    steps = max(1, int(scores[-1]["step"]))
    rows: list[Row] = []
    found = []
    for score in scores:
        columns = forecast([*rows, score], [], steps)
        rows.append(dict(score) | columns)
        departure = lasting_departure(rows)
        if departure is not None:
            found.append(departure.below)
    forecasts = sum("predicted_least" in row for row in rows)
    return Replayed(any(found), not all(found), forecasts)


def fell(scores: Sequence[Row]) -> bool:
    pairs = [fmean((a["pass_rate"], b["pass_rate"])) for a, b in pairwise(scores)]
    best = max(pairs)
    last = pairs[-1]
    answers = 2 * scores[-1]["n_prompts"] * scores[-1]["samples"]
    error = sqrt((best * (1 - best) + last * (1 - last)) / answers)
    return best - last > max(LEAST_FALL, STANDARD_ERRORS * error)


def curves_of(folder: Path) -> dict[str, list[list[Row]]]:
    """Return other people's curves as rows of eval.jsonl, by kind."""
    with (folder / "index.csv").open() as file:
        kind_of = {row["name"]: row["cls"] for row in csv.DictReader(file)}
    points: dict[str, list[dict[str, str]]] = defaultdict(list)
    with (folder / "points.csv").open() as file:
        for point in csv.DictReader(file):
            points[point["curve"]].append(point)
    kinds: dict[str, list[list[Row]]] = {"eval": [], "tiny": []}
    for name, curve in points.items():
        if kind_of[name] in kinds and all(point["answers"] for point in curve):
            kinds[kind_of[name]].append(list(rows_of(curve)))
    return kinds


def rows_of(points: Sequence[dict[str, str]]) -> Iterator[Row]:
    together = ceil(len(points) / MOST_POINTS)
    for begin in range(0, len(points), together):
        part = points[begin : begin + together]
        x = fmean(float(point["x"]) for point in part)
        score = fmean(float(point["score"]) for point in part)
        answers = sum(int(float(point["answers"])) for point in part)
        place = {"step": round(x), "compute_hours": x, "compute_unit": "core"}
        yield place | {"pass_rate": score, "n_prompts": answers, "samples": 1}


if __name__ == "__main__":
    main()
