"""Runs of `megarl train quickstart-real` as small files, and what they show of how a real model learns and falls.

    python -m benchmarks.real_model record runs/quickstart-real …
    python -m benchmarks.real_model table
    python -m benchmarks.real_model signals

`record` writes benchmarks/results/real/RUN.jsonl.gz for each run: a line with what its recipe changes
in the shipped one, then the rows of eval.jsonl and metrics.jsonl. `table` prints a line for each record:
the held-out score at each evaluation, and means over the last ten steps. `signals` prints which alarms
each run raised, and when.
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

from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores, write_atomically
from megarl.core.evaluation import fall
from megarl.core.recipe import differences, load
from megarl.run.health import Alarm, Health

SHIPPED = "quickstart-real"
RECORDS = Path("benchmarks/results/real")
OF_THE_PLACE = ("run.name", "run.dir", "run.seed", "run.resume", "model.path", "data.tasks")
"""Keys, or beginnings of keys, that say where a run was made, and not how."""
NEWEST = 10
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
    parser.add_argument("what", choices=("record", "table", "signals"))
    parser.add_argument("runs", type=Path, nargs="*")
    options = parser.parse_args()
    if options.what == "record":
        for path in options.runs:
            record(RunDir.opened(path))
        return
    runs = [read(path) for path in sorted(RECORDS.glob("*.jsonl.gz"))]
    print(table(runs) if options.what == "table" else signals(runs))


def record(rundir: RunDir) -> None:
    recipe = load(str(rundir.recipe))
    differing = differences(load(SHIPPED), recipe)
    changed = {key: now for key, _, now in differing if not key.startswith(OF_THE_PLACE)}
    packages = {name: version(name) for name in ("megarl", "torch", "sglang", "megatron-core")}
    run = RealRun(rundir.path.name, recipe.run.seed, changed, platform.processor() or platform.machine(), packages)
    head = {key: value for key, value in asdict(run).items() if key not in ("scores", "steps")}
    scores = [{"score": _short(row)} for row in latest_scores(rundir.eval)]
    steps = [{"step": _short(row)} for row in latest_rows(rundir.metrics)]
    text = "".join(json.dumps(line) + "\n" for line in (head, *scores, *steps))
    RECORDS.mkdir(parents=True, exist_ok=True)
    write_atomically(RECORDS / f"{run.name}.jsonl.gz", gzip.compress(text.encode(), mtime=0))


def _short(row: Row) -> Row:
    """Return the row with its numbers rounded to six digits, and without the scores of each prompt."""
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
    """Return a table in Markdown. The last columns are means over the newest ten steps."""
    lines = [
        f"| run | changes | seed | held out | {' | '.join(COLUMNS)} | seconds a step |",
        "|---" * (5 + len(COLUMNS)) + "|",
    ]
    for run in runs:
        changes = ", ".join(f"`{key}={value}`" for key, value in run.changes.items()) or "none"
        scores = " ".join(f"{row['pass_rate']:.2f}" for row in run.scores)
        newest = [f"{_mean(run.steps[-NEWEST:], column):.2f}" for column in COLUMNS.values()]
        seconds = f"{_mean(run.steps, 'step_seconds'):.1f}"
        lines.append(f"| {run.name} | {changes} | {run.seed} | {scores} | {' | '.join(newest)} | {seconds} |")
    return "\n".join(lines)


def signals(runs: Sequence[RealRun]) -> str:
    """Return a table in Markdown: for each run its alarms with their first and last steps, and the
    evaluations that said that the held-out score had fallen."""
    lines = ["| run | held out | alarms | said to have fallen at step |", "|---|---|---|---|"]
    for run in runs:
        scores = " ".join(f"{row['pass_rate']:.2f}" for row in run.scores)
        alarms = ", ".join(_spelt(alarm) for alarm in Health(run.steps).history) or "none"
        fallen = [str(row["step"]) for row in run.scores if row.get(fall.WARNING)]
        lines.append(f"| {run.name} | {scores} | {alarms} | {' '.join(fallen) or 'never'} |")
    return "\n".join(lines)


def _spelt(alarm: Alarm) -> str:
    last = "the end" if alarm.until is None else alarm.until - 1
    return f"`{alarm.name}` {alarm.raised} to {last}"


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else math.nan


if __name__ == "__main__":
    main()
