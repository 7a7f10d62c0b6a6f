"""Tests `megarl health` on finished runs: is a fault noticed and named, how long before
the policy suffers, and how often does a clean run raise an alarm?

    python -m benchmarks.alarm FOLDER [--labels FILE.csv] [--records DIR/records]
    [--part open | held-out] [--out FILE.json]

FOLDER holds run directories. The labels (by default FOLDER/labels.csv) have a line for
each:

    name,kind,seed,dose,step,named
    rope-3,rope,3,1.1,60,kernels kernels_median RoPE
    clean-0,clean,0,,,

`step` is the first that the fault affects. `named` has alarms, or words of a cause,
that name the fault.

Records of clean runs (`python -m benchmarks.corpus`) are judged as well. Steps before a
fault count as clean steps, too. A forked run may have a column `fork`, its own first
step: earlier steps set its norm, but are not counted a second time.

A fault is noticed by the first alarm raised at its step or later. It is named by the
first such alarm that is one of `named`, or whose text contains one of them; without
`named` any alarm counts. If parity ended the run, the fault is noticed at the end, by
the message that the run left. The policy suffers at the first evaluation whose pass
rate is two standard errors (of the difference) below the last one before the fault. An
alarm before the fault is a false one. The bound on the rate of false alarms is
Garwood's (1936), exact for a Poisson number, one-sided at 95 %.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from scipy.stats import chi2

from benchmarks.corpus import read
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, latest_scores
from megarl.run.health import Alarm, Health

COLUMNS = ("name", "kind", "seed", "dose", "step", "named")
ERRORS = 2.0
"""Standard errors by which the pass rate must have fallen for the policy to count as
suffering.
"""


class JudgedRun(NamedTuple):
    """A run and its alarms. step: that of the fault, None if clean. steps: the number
    of clean steps. For a fault: the first alarm, the first that names it, and the step
    of the first evaluation that suffers, each None if there is none.
    """

    name: str
    kind: str
    seed: str
    dose: str
    step: int | None
    steps: int
    false_alarms: list[str]
    first: Alarm | None = None
    naming: Alarm | None = None
    suffers: int | None = None

    @property
    def lead(self) -> int | None:
        """The steps from the first alarm to the evaluation that suffers; negative if
        the alarm came later.
        """
        return (
            None if self.first is None or self.suffers is None else self.suffers - self.first.raised
        )


def garwood(count: int, confidence: float = 0.95) -> float:
    """Return the upper bound of a Poisson mean after `count` events: P(count or fewer |
    bound) = 1 - confidence.
    """
    return float(chi2.ppf(confidence, 2 * (count + 1)) / 2)


def labels(path: Path) -> list[dict[str, str]]:
    """Read the labels. MegarlError if the file does not have the format described at
    the top of this module.
    """
    if not path.exists():
        raise MegarlError(f"{path}: no such file; it says what each run is: {','.join(COLUMNS)}")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, restval=""))
    for number, row in enumerate(rows, 2):
        if missing := [column for column in COLUMNS[:5] if column not in row]:
            raise MegarlError(f"{path}: no column {', '.join(missing)}")
        if (row["kind"] == "clean") != (not row["step"]) or not (row["step"] or "0").isdecimal():
            raise MegarlError(
                f"{path}, line {number}: step {row['step']!r}; a fault has that of its first step,"
                " clean has none"
            )
    return rows


def judge(
    label: dict[str, str], steps: Sequence[Row], scores: Sequence[Row], failure: str = ""
) -> JudgedRun:
    """Judge one run by its rows of metrics.jsonl and eval.jsonl. failure: the reason if
    it ended for good.
    """
    own = int(label.get("fork") or 0)
    history = [alarm for alarm in Health(steps).history if alarm.raised >= own]
    begins = int(label["step"]) if label["step"] else None
    false = [alarm for alarm in history if begins is None or alarm.raised < begins]
    clean = sum(own <= row["step"] < (math.inf if begins is None else begins) for row in steps)
    told = (label["name"], label["kind"], label["seed"], label["dose"])
    if begins is None:
        return JudgedRun(*told, None, clean, [_short(alarm) for alarm in false])
    end = steps[-1]["step"] + 1 if steps else begins
    noticed = [alarm for alarm in history if alarm.raised >= begins]
    noticed += [Alarm("ended", end, end, failure)] if failure else []
    wanted = label.get("named", "").split()
    naming = [
        a
        for a in noticed
        if not wanted or any(a.name.split("/")[0] == w or w in a.text for w in wanted)
    ]
    accused = [_short(alarm) for alarm in false]
    return JudgedRun(
        *told, begins, clean, accused, _first(noticed), _first(naming), suffers(scores, begins)
    )


def _first(alarms: list[Alarm]) -> Alarm | None:
    return min(alarms, key=lambda alarm: alarm.raised, default=None)


def _short(alarm: Alarm) -> str:
    return f"{alarm.name} at {alarm.raised}"


def suffers(scores: Sequence[Row], begins: int) -> int | None:
    """Return the step of the first evaluation from `begins` on that is ERRORS below the
    last one before `begins`, or None.

    The version `begins` was trained before the fault, but a faulty server already
    evaluates it.
    """
    before = [row for row in scores if row["step"] < begins]
    for row in scores if before else ():
        gap = before[-1]["pass_rate"] - row["pass_rate"]
        if row["step"] >= begins and gap > ERRORS * math.hypot(error(before[-1]), error(row)):
            return int(row["step"])
    return None


def error(score: Row) -> float:
    """Return the standard error of a pass rate, from its interval over prompts if there
    is one, else binomial over answers.
    """
    if "pass_rate_low" in score and "pass_rate_high" in score:
        return float(score["pass_rate_high"] - score["pass_rate_low"]) / 3.92
    rate = min(max(score["pass_rate"], 0.01), 0.99)
    return math.sqrt(rate * (1 - rate) / (score["n_prompts"] * score["samples"]))


def folder(path: Path, told: Iterable[dict[str, str]]) -> list[JudgedRun]:
    """Judge the labelled runs in a folder."""
    runs = []
    for label in told:
        run = RunDir(path / label["name"])
        if not run.metrics.exists():
            raise MegarlError(f"{run.path}: no metrics.jsonl; it is in the labels")
        failure = run.failure_file.read_text().strip() if run.failure_file.exists() else ""
        runs.append(judge(label, latest_rows(run.metrics), latest_scores(run.eval), failure))
    return runs


def records(path: Path, part: str) -> list[JudgedRun]:
    """Judge the records of that part of the corpus as clean runs."""
    known = [
        run
        for run in map(read, sorted(path.glob("*.jsonl.gz")))
        if run.held_out == (part == "held-out")
    ]
    label = {"kind": "clean", "dose": "", "step": ""}
    return [
        judge(label | {"name": run.name, "seed": str(run.seed)}, run.steps, run.scores)
        for run in known
    ]


def tables(runs: Sequence[JudgedRun]) -> str:
    """Return tables of faults, kinds, and false alarms, as Markdown."""
    faults = [run for run in runs if run.step is not None]
    kinds = {run.kind: [r for r in faults if r.kind == run.kind] for run in faults}
    text = _table(
        "run|kind|seed|dose|fault at|noticed at|by|named at|by|pass rate falls at|noticed steps"
        " before",
        [(*run[:5], *_of(run.first), *_of(run.naming), run.suffers, run.lead) for run in faults],
    ) + _table(
        "kind|runs|noticed|named|median steps to notice|before the pass rate fell|median steps"
        " before",
        [(kind, len(some), *_counts(some)) for kind, some in kinds.items()],
    )
    steps = sum(run.steps for run in runs)
    count = sum(len(run.false_alarms) for run in runs)
    listed = (
        "; ".join(f"{run.name}: {', '.join(run.false_alarms)}" for run in runs if run.false_alarms)
        or "none"
    )
    bound = garwood(count) / steps if steps else math.inf
    return (
        text
        + f"Clean steps: {steps:,} of {sum(bool(run.steps) for run in runs)} runs. False alarms:"
        f" {count} ({listed}). At 95 %: fewer than {bound * 5000:.2f} in 5,000 steps, one in"
        f" {1 / bound:,.0f} (Garwood).\n"
    )


def _counts(some: Sequence[JudgedRun]) -> tuple[Any, ...]:
    return (
        sum(run.first is not None for run in some),
        sum(run.naming is not None for run in some),
        _median([run.first.raised - (run.step or 0) for run in some if run.first]),
        (
            f"{sum((run.lead or 0) > 0 for run in some)} of"
            f" {sum(run.suffers is not None for run in some)}"
        ),
        _median([run.lead for run in some if run.lead is not None]),
    )


def _of(alarm: Alarm | None) -> tuple[Any, Any]:
    return (alarm.raised, alarm.name) if alarm else ("not", "")


def _median(values: Sequence[int]) -> Any:
    return median(values) if values else None


def _table(heads: str, rows: Sequence[Sequence[Any]]) -> str:
    names = heads.split("|")
    lines = [names, ["---"] * len(names), *rows] if rows else []
    cells = (" | ".join("–" if cell is None else str(cell) for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in cells) + ("\n" if rows else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--part", choices=("open", "held-out"), default="open")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        runs = records(options.records, options.part) if options.records else []
        if options.folder:
            runs += folder(options.folder, labels(options.labels or options.folder / "labels.csv"))
    except MegarlError as problem:
        raise SystemExit(str(problem)) from None
    if not runs:
        raise SystemExit("no runs; give a folder of runs, --records, or both")
    print(tables(runs), end="")
    if options.out:
        alarms = [
            {"first": run.first and asdict(run.first), "naming": run.naming and asdict(run.naming)}
            for run in runs
        ]
        said = [run._asdict() | found for run, found in zip(runs, alarms, strict=True)]
        options.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
