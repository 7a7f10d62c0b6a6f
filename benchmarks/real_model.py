"""Runs of `megarl train quickstart-real` as small files, and what they show of how a
real model learns and falls.

    python -m benchmarks.real_model record runs/quickstart-real …
    python -m benchmarks.real_model table
    python -m benchmarks.real_model signals
    python -m benchmarks.real_model predict [--picture docs/pictures/real-prediction]

`record` writes benchmarks/results/real/RUN.jsonl.gz for each run: a line with what its
recipe changes in the shipped one, then the rows of eval.jsonl and metrics.jsonl.
`table` prints a line for each record: the held-out score at each evaluation, and means
over the last ten steps. `signals` prints which alarms each run raised, and when.
`predict` fits the first half of the steps of runs that were evaluated often enough,
each alone and the seeds of one setting together, and compares the laws with what came
later.
"""

import argparse
import gzip
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores, write_atomically
from megarl.core.evaluation import fall
from megarl.core.evaluation.departure import lasting_departure
from megarl.core.recipe import differences, load
from megarl.predict.scaling.extrapolate import predict
from megarl.predict.scaling.fit import Fit, fit
from megarl.predict.scaling.plot import plot_fits
from megarl.predict.scaling.points import Curve, PointColumns, binomial_noise, curve_of_run
from megarl.run.health import Alarm, Health

SHIPPED = "quickstart-real"
RECORDS = Path("benchmarks/results/real")
OF_THE_PLACE = ("run.name", "run.dir", "run.seed", "run.resume", "model.path", "data.tasks")
"""Keys, or beginnings of keys, that say where a run was made, and not how."""
NEWEST = 10
FEWEST_SCORES = 8
"""Evaluations after training began that a run needs, so that half of its steps has
enough for a law.
"""
COLUMNS = {
    "groups": "groups_in_loss",
    "entropy": "entropy",
    "norm": "grad_norm",
    "sample size": "effective_sample_size",
}


@dataclass(frozen=True)
class RealRun:
    """A recorded run. changes: keys whose values are not the shipped recipe's."""

    name: str
    seed: int
    changes: dict[str, Any]
    machine: str
    versions: dict[str, str]
    scores: tuple[Row, ...] = ()
    steps: tuple[Row, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "table", "signals", "predict"))
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument(
        "--picture", type=Path, help="of the laws that `predict` fits, without its suffix"
    )
    options = parser.parse_args()
    if options.what == "record":
        for path in options.runs:
            record(RunDir.opened(path))
        return
    runs = [read(path) for path in sorted(RECORDS.glob("*.jsonl.gz"))]
    match options.what:
        case "table":
            print(table(runs))
        case "signals":
            print(signals(runs))
        case _:
            print(predictions(runs, options.picture))


def record(rundir: RunDir) -> None:
    recipe = load(str(rundir.recipe))
    differing = differences(load(SHIPPED), recipe)
    changed = {key: now for key, _, now in differing if not key.startswith(OF_THE_PLACE)}
    packages = {name: version(name) for name in ("megarl", "torch", "sglang", "megatron-core")}
    run = RealRun(
        rundir.path.name,
        recipe.run.seed,
        changed,
        platform.processor() or platform.machine(),
        packages,
    )
    head = {key: value for key, value in asdict(run).items() if key not in ("scores", "steps")}
    scores = [{"score": _short(row)} for row in latest_scores(rundir.eval)]
    steps = [{"step": _short(row)} for row in latest_rows(rundir.metrics)]
    text = "".join(json.dumps(line) + "\n" for line in (head, *scores, *steps))
    RECORDS.mkdir(parents=True, exist_ok=True)
    write_atomically(RECORDS / f"{run.name}.jsonl.gz", gzip.compress(text.encode(), mtime=0))


def _short(row: Row) -> Row:
    """Return the row with its numbers rounded to six digits, and without the scores of
    each prompt.
    """
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in row.items()
        if isinstance(value, str | int | float)
    }


def read(path: Path) -> RealRun:
    head, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    scores = tuple(line["score"] for line in lines if "score" in line)
    steps = tuple(line["step"] for line in lines if "step" in line)
    return RealRun(**head, scores=scores, steps=steps)


def table(runs: Sequence[RealRun]) -> str:
    """Return a table in Markdown. The last columns are means over the
    newest ten steps.
    """
    lines = [
        f"| run | changes | seed | held out | {' | '.join(COLUMNS)} | seconds a step |",
        "|---" * (5 + len(COLUMNS)) + "|",
    ]
    for run in runs:
        changes = settings_of(run)
        scores = " ".join(f"{row['pass_rate']:.2f}" for row in run.scores)
        newest = [f"{_mean(run.steps[-NEWEST:], column):.2f}" for column in COLUMNS.values()]
        seconds = f"{_mean(run.steps, 'step_seconds'):.1f}"
        lines.append(
            f"| {run.name} | {changes} | {run.seed} | {scores} | {' | '.join(newest)} | {seconds} |"
        )
    return "\n".join(lines)


def signals(runs: Sequence[RealRun]) -> str:
    """Return a table in Markdown: for each run its alarms with their first and last
    steps, and the evaluations that said that the held-out score had fallen, or was
    below what an earlier forecast allows.
    """
    lines = [
        (
            "| run | held out | alarms | said to have fallen at step | said to be below the"
            " forecast at step |"
        ),
        "|---|---|---|---|---|",
    ]
    for run in runs:
        scores = " ".join(f"{row['pass_rate']:.2f}" for row in run.scores)
        alarms = ", ".join(_spelt(alarm) for alarm in Health(run.steps).history) or "none"
        fallen = [str(row["step"]) for row in run.scores if row.get(fall.WARNING_COLUMN)]
        below = [str(step) for step in _below_forecast(run.scores)]
        lines.append(
            f"| {run.name} | {scores} | {alarms} | {' '.join(fallen) or 'never'} |"
            f" {' '.join(below) or 'never'} |"
        )
    return "\n".join(lines)


def _below_forecast(scores: Sequence[Row]) -> list[int]:
    """Return the steps of the evaluations at which a run is said to be below an earlier
    forecast.
    """
    steps = []
    for count in range(1, len(scores) + 1):
        departure = lasting_departure(scores[:count])
        if departure is not None and departure.below:
            steps.append(departure.step)
    return steps


@dataclass(frozen=True)
class LaterScore:
    """A score after half of a run's steps, and what a law fitted to the first half says
    of it.

    before: the last score of the first half; low, high: the 95 % interval of the score,
    which is the law's and the evaluation's own noise together.
    """

    measured: float
    predicted: float
    low: float
    high: float
    before: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def curve_of(run: RealRun) -> Curve:
    """Return the run's scores by step. Hours would not do: other work on the machine
    stretches them.
    """
    return curve_of_run(run.name, run.scores, run.steps, run.name, PointColumns(hours="step"))


def settings_of(run: RealRun) -> str:
    """Return what a run changes in the shipped recipe, which seeds of one setting have
    in common.
    """
    return ", ".join(f"`{key}={value}`" for key, value in run.changes.items()) or "none"


def later_scores(law: Fit, curve: Curve, half: float) -> list[LaterScore]:
    """Compare a law with the scores of one run after step `half`."""
    later = curve.hours > half
    band = predict(law, curve.hours[later])
    noise = 1.96 * binomial_noise(band.pass_rate, curve.answers or 1)
    low = band.pass_rate - np.hypot(band.pass_rate - band.low, noise)
    high = band.pass_rate + np.hypot(band.high - band.pass_rate, noise)
    before = float(curve.pass_rate[~later][-1])
    columns = (curve.pass_rate[later], band.pass_rate, low, high)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [LaterScore(*numbers, before=before) for numbers in rows]


def predictions(runs: Sequence[RealRun], picture: Path | None) -> str:
    """Return a table in Markdown: a line for each run and its own law, then one for the
    seeds of a setting and the law of all of them. Draw the latter if a path is given.
    """
    settings: dict[str, list[RealRun]] = {}
    for run in runs:
        if len(run.scores) > FEWEST_SCORES:
            settings.setdefault(settings_of(run), []).append(run)
    headings = (
        "runs",
        "changes",
        "at half",
        "predicted for the end",
        "measured",
        "later scores inside",
        "error of the law",
        "of the score at half",
    )
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    drawn = {}
    for changes, seeds in settings.items():
        curves = [curve_of(run) for run in seeds]
        halves = [float(curve.hours[-1]) / 2 for curve in curves]
        for curve, half in zip(curves, halves, strict=True):
            lines.append(_prediction_line(curve.name, changes, [curve], [half], [curve]))
        if len(curves) > 1:
            lines.append(_prediction_line(f"{len(curves)} seeds", changes, curves, halves, curves))
            prompts = seeds[0].changes.get("batch.prompts", load(SHIPPED).batch.prompts)
            drawn[f"{prompts} prompts a step"] = (curves, fit(curves, end=fmean(halves)))
    if picture is not None:
        plot_fits(
            drawn,
            picture,
            until=max(float(c.hours[-1]) for curves, _ in drawn.values() for c in curves),
        )
    return "\n".join(lines)


def _prediction_line(
    name: str,
    changes: str,
    fitted: Sequence[Curve],
    halves: Sequence[float],
    judged: Sequence[Curve],
) -> str:
    half = fmean(halves)
    try:
        law = fit(fitted, end=half)
    except MegarlError as error:
        return f"| {name} | {changes} | {error} | | | | | |"
    ends = []
    every = []
    for curve in judged:
        later = later_scores(law, curve, half)
        ends.append(later[-1])
        every.extend(later)
    before = " ".join(f"{end.before:.2f}" for end in ends)
    measured = " ".join(f"{end.measured:.2f}" for end in ends)
    predicted = f"{ends[0].predicted:.2f} ({ends[0].low:.2f} to {ends[0].high:.2f})"
    inside = f"{sum(score.inside for score in every)} of {len(every)}"
    of_law = fmean(abs(score.measured - score.predicted) for score in every)
    of_last = fmean(abs(score.measured - score.before) for score in every)
    return (
        f"| {name} | {changes} | {before} | {predicted} | {measured} | {inside} | {of_law:.3f} |"
        f" {of_last:.3f} |"
    )


def _spelt(alarm: Alarm) -> str:
    last = "the end" if alarm.until is None else alarm.until - 1
    return f"`{alarm.name}` {alarm.raised} to {last}"


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else math.nan


if __name__ == "__main__":
    main()
