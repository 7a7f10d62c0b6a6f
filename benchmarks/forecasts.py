"""Tests forecasts on real runs: fitted up to some compute, judged at twice and at four
times as much.

    python -m benchmarks.forecasts DIR/records [--part open | held-out]
    [--out FILE.json]

DIR is made by `python -m benchmarks.corpus`. A run is cut where it has made .3 to .8 of
its final gain, and its own score at twice and four times the compute of the cut (within
a tenth) is predicted. megarl's fit is compared with

    last value     the score at the cut; its interval has only the noise of the two
                   evaluations
    power law      A − D / C^b, by scipy; interval of the linear approximation
    least squares  the law with R_0 fixed at the score before training, by scipy;
                   interval of the linear approximation

An interval is widened by the noise of the evaluation with which it is compared. The
interval score is the mean of its width plus 40 times the distance by which the score
missed it; lower is better (Gneiting and Raftery 2007). Coverage has a 95 % interval
from resampling runs, since the cuts of a run are not independent. The last row says how
far a run is from the mean of the other seeds of its recipe, size, task and type at the
predicted compute: no forecast, for those have already been there.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from benchmarks.corpus import CorpusRun, read
from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.extrapolate import predict
from megarl.predict.scaling.fit import fit
from megarl.predict.scaling.points import Curve

GAIN = (0.3, 0.8)
AHEAD = (2.0, 4.0)
NEAR = 0.1
RESAMPLES = 2000

Predicted = tuple[float, float, float]  # score, low, high
Forecaster = Callable[[Curve, float], Predicted]


def ours(curve: Curve, at: float) -> Predicted:
    there = predict(fit([curve], start=0.0), np.array([at]))
    return float(there.pass_rate[0]), float(there.low[0]), float(there.high[0])


def last_value(curve: Curve, at: float) -> Predicted:
    score = float(curve.pass_rate[-1])
    half = 1.96 * noise(score, curve)
    return score, score - half, score + half


def _by_scipy(
    law: Callable[..., np.ndarray], start: tuple[float, ...], low: list[float], high: list[float]
) -> Forecaster:
    def forecast(curve: Curve, at: float) -> Predicted:
        scale = curve.hours[-1]
        x = curve.hours / scale
        y = curve.pass_rate
        r0 = y.min() if curve.r0 is None else curve.r0
        best, covariance = optimize.curve_fit(
            lambda c, *p: law(c, r0, *p),
            x,
            y,
            np.clip(start, low, high),
            bounds=(low, high),
            maxfev=20_000,
        )
        step = 1e-5
        here = law(np.array([at / scale]), r0, *best)[0]
        slopes = np.array(
            [
                (law(np.array([at / scale]), r0, *(best + step * unit))[0] - here) / step
                for unit in np.eye(len(best))
            ]
        )
        half = stats.t.ppf(0.975, max(1, len(x) - len(best))) * math.sqrt(
            max(0.0, slopes @ covariance @ slopes)
        )
        return float(here), float(here - half), float(here + half)

    return forecast


def _sigmoid(c: np.ndarray, r0: float, a: float, b: float, middle: float) -> np.ndarray:
    scores: np.ndarray = r0 + (a - r0) / (1 + (np.exp(middle) / c) ** b)
    return scores


def _power(c: np.ndarray, r0: float, a: float, d: float, b: float) -> np.ndarray:
    scores: np.ndarray = a - d * c**-b
    return scores


FORECASTERS: dict[str, Forecaster] = {
    "megarl": ours,
    "last value": last_value,
    "power law": _by_scipy(_power, (0.9, 0.2, 0.5), [0, 0, 0.01], [1, 2, 5]),
    "least squares": _by_scipy(_sigmoid, (0.9, 1.5, -1.0), [0, 0.05, -7], [1, 20, 7]),
}


class Judged(NamedTuple):
    """One prediction and the score that came."""

    run: str
    ahead: float
    score: float
    predicted: float
    low: float
    high: float
    noise: float

    @property
    def inside(self) -> bool:
        return self.low <= self.score <= self.high

    @property
    def interval_score(self) -> float:
        return (
            self.high
            - self.low
            + 40 * (max(0.0, self.low - self.score) + max(0.0, self.score - self.high))
        )


def part_of(curve: Curve, kept: slice | np.ndarray) -> Curve:
    """Return the curve with these of its scores."""
    errors = None if curve.noise is None else curve.noise[kept]
    return replace(curve, hours=curve.hours[kept], pass_rate=curve.pass_rate[kept], noise=errors)


def noise(score: float, curve: Curve) -> float:
    rate = min(max(score, 1e-3), 1 - 1e-3)
    return math.sqrt(rate * (1 - rate) / (curve.answers or 1))


def origins(run: CorpusRun) -> Iterator[tuple[Curve, float, float, float]]:
    """Yield for each cut the curve up to it, the factor of compute to the predicted
    point, the compute there, and its score.
    """
    curve = run.curve
    begin = curve.pass_rate[0] if curve.r0 is None else curve.r0
    gain = curve.pass_rate[-1] - begin
    for n in range(4, len(curve.hours)):
        share = (curve.pass_rate[n - 1] - begin) / gain if gain > 0 else 0.0
        if not GAIN[0] <= share <= GAIN[1]:
            continue
        seen = part_of(curve, slice(n))
        for ahead in AHEAD:
            later = int(np.abs(np.log(curve.hours / (seen.hours[-1] * ahead))).argmin())
            if abs(curve.hours[later] / seen.hours[-1] / ahead - 1) <= NEAR:
                yield seen, ahead, float(curve.hours[later]), float(curve.pass_rate[later])


def judge(runs: list[CorpusRun]) -> dict[str, list[Judged]]:
    judged: dict[str, list[Judged]] = {name: [] for name in FORECASTERS}
    for run in runs:
        for seen, ahead, at, score in origins(run):
            for name, forecaster in FORECASTERS.items():
                try:
                    middle, low, high = forecaster(seen, at)
                except (
                    RuntimeError,
                    MegarlError,
                ):  # without a fit, only the last score is known, and any score is possible
                    middle = float(seen.pass_rate[-1])
                    low = 0.0
                    high = 1.0
                one = noise(score, seen)
                wide_low = math.hypot(middle - low, 1.96 * one)
                wide_high = math.hypot(high - middle, 1.96 * one)
                judged[name].append(
                    Judged(
                        run.name, ahead, score, middle, middle - wide_low, middle + wide_high, one
                    )
                )
    return judged


def between_seeds(runs: list[CorpusRun], ahead: float) -> float:
    """Return the error, net of noise, of the mean of the other seeds at the compute
    that is predicted; NaN without any.
    """
    squares = []
    for run in runs:
        same = (run.recipe, run.size, run.task, run.dtype)
        others = [
            o.curve
            for o in runs
            if o.seed != run.seed and (o.recipe, o.size, o.task, o.dtype) == same
        ]
        for seen, distance, at, score in origins(run):
            there = [
                np.interp(at, o.hours, o.pass_rate)
                for o in others
                if o.hours[-1] >= at * (1 - NEAR)
            ]
            if distance == ahead and there:
                squares.append(
                    (score - np.mean(there)) ** 2 - noise(score, seen) ** 2 * (1 + 1 / len(there))
                )
    return math.sqrt(max(0.0, float(np.mean(squares)))) if squares else math.nan


def row(rows: list[Judged]) -> dict[str, float]:
    """Return one forecaster's figures at one distance."""
    names = sorted({r.run for r in rows})
    inside = [np.array([r.inside for r in rows if r.run == name], float) for name in names]
    rng = np.random.default_rng(0)
    drawn = [
        np.concatenate([inside[i] for i in rng.integers(len(names), size=len(names))]).mean()
        for _ in range(RESAMPLES)
    ]
    errors = np.array([r.score - r.predicted for r in rows])
    net = (errors**2).mean() - np.mean([r.noise**2 for r in rows])
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "runs": len(names),
        "predictions": len(rows),
        "coverage": float(np.mean([r.inside for r in rows])),
        "coverage_low": float(low),
        "coverage_high": float(high),
        "rmse_net_of_noise": math.sqrt(max(0.0, net)),
        "bias": float(errors.mean()),
        "median_width": float(np.median([r.high - r.low for r in rows])),
        "interval_score": float(np.mean([r.interval_score for r in rows])),
    }


def arguments(
    description: str, parts: tuple[str, ...] = ("open", "held-out")
) -> tuple[list[CorpusRun], argparse.Namespace]:
    """Return the records of the part named on the command line, and the other options.
    SystemExit if there are none.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("--part", choices=parts, default="open")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = [read(path) for path in sorted(options.records.glob("*.jsonl.gz"))]
    runs = [
        run for run in runs if options.part == "all" or run.held_out == (options.part == "held-out")
    ]
    if not runs:
        raise SystemExit(f"{options.records}: no records of the {options.part} part")
    return runs, options


def main() -> None:
    runs, options = arguments(__doc__)
    judged = judge(runs)
    figures = []
    print(
        "| ahead | forecast | runs, predictions | inside | RMSE net of noise | median width |"
        " interval score |\n" + "|---" * 7 + "|"
    )
    for ahead in AHEAD:
        for name, rows in judged.items():
            if at := [r for r in rows if r.ahead == ahead]:
                f = row(at)
                inside = (
                    f"{f['coverage']:.2f} ({f['coverage_low']:.2f} to {f['coverage_high']:.2f})"
                )
                shown = (
                    f"{f['rmse_net_of_noise']:.4f} | {f['median_width']:.3f} |"
                    f" {f['interval_score']:.3f}"
                )
                print(
                    f"| {ahead:g} times | {name} | {f['runs']}, {f['predictions']} | {inside} |"
                    f" {shown} |"
                )
                figures.append({"ahead": ahead, "forecast": name, **f})
        print(f"| {ahead:g} times | the other seeds | | | {between_seeds(runs, ahead):.4f} | | |")
    if options.out:
        options.out.write_text(json.dumps({"part": options.part, "rows": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
