"""Reads points of a learning curve (compute, held-out pass rate) from a run directory, a CSV or a JSONL file.

    RUN/eval.jsonl (+ epochs of metrics.jsonl)   ─┐
    points.csv    gpu_hours,pass_rate[,seed,…]    ├─► Curve, one per seed: checked, sorted by compute, R_0 separate
    points.jsonl  {"compute_hours": …, …}        ─┘

The score of the weights before training (at step 0, or without compute) is R_0, not a point of the curve.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, rows_in_order

HOURS = {"gpu": "GPU-hours", "core": "core-hours"}  # names of the units of compute, for people


@dataclass(frozen=True, eq=False)
class Curve:
    """One run with one seed. Example: Curve("mine", np.array([10., 20.]), np.array([.3, .4]), r0=.2)."""

    name: str
    hours: np.ndarray  # cumulative compute of all roles together, [points] float64, above 0, ascending
    pass_rate: np.ndarray  # [points] float64, from 0 to 1
    r0: float | None = None  # pass rate before training, if it was measured
    unit: str = "gpu"  # a key of HOURS, or the name of a column that has no hours, such as flops
    seed: int | None = None
    first_epoch: float | None = None
    """Hours at which the first epoch over the prompts ended; infinite if it has not ended; None: unknown."""
    answers: int | None = None
    """Number of answers of which each score (the last, if they differ) is the mean: binomial noise. None: unknown."""
    noise: np.ndarray | None = None
    """Standard error of each score [points], if it is known and not that of `answers`."""


@dataclass(frozen=True)
class PointColumns:
    """Column names in a file or in eval.jsonl."""

    hours: str | None = None  # None: `gpu_hours` if there is such a column, else `compute_hours`
    score: str | None = None  # None: `pass_rate` or, for a run directory, the column that its recipe forecasts


class _Point(NamedTuple):
    """A score. before: whether it is that of the weights before training; answers: of which it is the mean, None: unknown."""

    hours: float
    rate: float
    before: bool
    answers: int | None


def binomial_noise(rates: np.ndarray, answers: float | np.ndarray) -> np.ndarray:
    """Return the standard error of scores [points], each the mean of this many answers, right or wrong."""
    least = 1 / np.maximum(answers, 2)  # a perfect score is not without noise, nor is a single answer
    rates = np.clip(rates, least, 1 - least)
    return np.asarray(np.sqrt(rates * (1 - rates) / answers))


def amount(hours: float, unit: str | None = None) -> str:
    """Format an amount of compute for people: 16,000 GPU-hours, 0.125 core-hours."""
    number = f"{hours:,.0f}" if 1000 <= hours < 1e12 else f"{hours:.4g}"
    return f"{number} {unit_name(unit)}" if unit else number


def unit_name(unit: str) -> str:
    """Return what people call a `Curve.unit`."""
    return HOURS.get(unit, unit)


def read_points(source: str | Path, columns: PointColumns | None = None) -> list[Curve]:
    """Read the curves of a run directory or a file, one per seed."""
    path, columns = Path(source), columns or PointColumns()
    if path.is_dir():
        return [_run(path, columns)]
    if not path.exists():
        raise MegarlError(f"{path}: no such run directory or file of points")
    rows = list(_jsonl(path) if path.suffix == ".jsonl" else _csv(path))
    return curves_of_rows(path.stem, rows, columns, str(path))


def curve_of_run(name: str, scores: Sequence[Row], steps: Iterable[Row], where: str, columns: PointColumns) -> Curve:
    """Build a curve from rows of eval.jsonl (`scores`) and metrics.jsonl (`steps`), the latest row of each step; also of a
    live run. where: the place, for errors."""
    rows = [(f"{where}, step {row['step']}", row) for row in scores]
    (curve,) = curves_of_rows(name, rows, columns, where)
    column = columns.hours or "compute_hours"
    unit = curve.unit if "hours" in column else column  # the rows' compute_unit is that of their hours
    epochs = ((row["epoch"], row[column]) for row in steps if row.get("epoch") is not None and column in row)
    if (first := next(epochs, None)) is None:
        return replace(curve, unit=unit)
    return replace(curve, unit=unit, first_epoch=next((at for epoch, at in epochs if epoch > first[0]), math.inf))


def _run(path: Path, columns: PointColumns) -> Curve:
    run = RunDir(path)
    if not run.eval.exists():
        raise MegarlError(f"{path}: no eval.jsonl in it; a run directory has one after its first evaluation")
    chosen = PointColumns(columns.hours, columns.score or _forecast_column(run.recipe))
    return curve_of_run(path.resolve().name, latest_rows(run.eval), rows_in_order(run.metrics), str(run.eval), chosen)


def _forecast_column(path: Path) -> str:
    """Return the column that is to be fitted according to the recipe at `path`. MegarlError if that says none."""
    from megarl.core.recipe import load

    if not path.exists():
        return "pass_rate"
    recipe = load(str(path))
    if not recipe.forecast_column:
        tasks = list(recipe.data.tasks)
        if not tasks:
            raise MegarlError(f"{path}: no task in it, so it is unknown which score to fit; give --score-column")
        several = f"several tasks ({', '.join(tasks)}), each with its own law; say which to fit"
        which = f"--score-column pass_rate/{tasks[0]}, or evaluation.forecast={tasks[0]} in the recipe"
        raise MegarlError(f"{path}: {several}: {which} (--score-column pass_rate: all prompts together)")
    return recipe.forecast_column


def _csv(path: Path) -> Iterable[tuple[str, Row]]:
    """Yield rows, each with its place for error messages."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            lines = [line for line in file if not line.startswith("#")]
            separator = max(",;\t", key="".join(lines[:1]).count)  # some countries' spreadsheets write semicolons
            reader = csv.DictReader(lines, delimiter=separator, skipinitialspace=True)
            for number, row in enumerate(reader, 1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise MegarlError(f"{where}: {len(reader.fieldnames or ())} headers, but another number of fields")
                yield where, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise MegarlError(f"{path}: not a CSV file ({error})") from error


def _jsonl(path: Path) -> Iterable[tuple[str, Row]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise MegarlError(f"{path}: not a JSONL file ({error})") from error
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MegarlError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise MegarlError(f"{where}: not a JSON object")
        yield where, row


def curves_of_rows(name: str, rows: Sequence[tuple[str, Row]], columns: PointColumns, where: str) -> list[Curve]:
    """Build one curve per value of `seed`. If a step has several rows, the last one counts."""
    if not rows:
        raise MegarlError(f"{where}: no points in it")
    known, score = rows[0][1], columns.score or "pass_rate"
    hours = columns.hours or next((name for name in ("gpu_hours", "compute_hours") if name in known), None)
    if hours is None:
        has = f"no column gpu_hours or compute_hours (it has {', '.join(known)})"
        raise MegarlError(f"{where}: {has}; name yours with --hours-column")
    scored = [(at, row) for at, row in rows if score in row]  # a suite may have been added in the middle of a run
    for column, there in ((hours, hours in known), (score, scored)):
        if not there:
            has = f"no column {column!r} (it has {', '.join(known)})"
            raise MegarlError(f"{where}: {has}; name yours with --hours-column, --score-column")
    seeds: dict[int | None, dict[float, _Point]] = {}
    for n, (at, row) in enumerate(scored):
        seed, step = (None if row.get(c) in (None, "") else _number(at, row, c) for c in ("seed", "step"))
        seed = None if seed is None else int(seed)
        point = _point(at, row, hours, score, step)
        seeds.setdefault(seed, {})[step if step is not None else -1 - n] = point
    unit = _unit(where, rows, hours)
    return [_curve(name, seed, points, unit, hours, where) for seed, points in seeds.items()]


def _unit(where: str, rows: Sequence[tuple[str, Row]], hours: str) -> str:
    """Return the unit of compute that the rows state; if none does, GPU-hours, or the column's own name if it has no hours."""
    stated = {str(row["compute_unit"]) for _, row in rows if row.get("compute_unit")}
    if len(stated) > 1 or not stated <= HOURS.keys():
        advice = "it is gpu or core, the same in all rows"
        raise MegarlError(f"{where}: compute_unit is {', '.join(sorted(stated))}; {advice}")
    return next(iter(stated), "gpu" if "hour" in hours.lower() else hours)


def _answers(where: str, row: Row, score: str) -> int | None:
    """Return the number of answers per score, from one row: the column `answers`, or prompts times samples in eval.jsonl."""
    suffix = score.removeprefix("pass_rate")
    prompts, samples = f"n_prompts{suffix}", f"samples{suffix}" if f"samples{suffix}" in row else "samples"
    if row.get(prompts) and row.get(samples):
        answers = _number(where, row, prompts) * _number(where, row, samples)
    elif row.get("answers") in (None, ""):
        return None
    else:
        answers = _number(where, row, "answers")
    if answers < 1:
        raise MegarlError(f"{where}: answers is {answers:g}; it is how many each score is the mean of")
    return int(answers)


def _point(where: str, row: Row, hours: str, score: str, step: float | None) -> _Point:
    compute, rate = _number(where, row, hours), _number(where, row, score)
    if not 0 <= rate <= 1:
        hint = "; if it is in percent, divide it by 100" if 1 < rate <= 100 else ""
        raise MegarlError(f"{where}: {score} is {rate:g}, not a pass rate between 0 and 1{hint}")
    if compute < 0:
        raise MegarlError(f"{where}: {hours} is {compute:g}; compute is cumulative and cannot be negative")
    before = step == 0 or (step is None and compute == 0)
    if compute == 0 and not before:
        why = f"no compute at step {step:g}; only the score before training (step 0) has none"
        raise MegarlError(f"{where}: {why}. Is {hours} cumulative hours of all devices?")
    return _Point(compute, rate, before, _answers(where, row, score))


FALLS = 0.99  # a restart's clock may be a little behind


def _curve(name: str, seed: int | None, points: Mapping[float, _Point], unit: str, hours: str, where: str) -> Curve:
    """Build a curve from points by step; those without a step have negative keys."""
    first = {point.rate for point in points.values() if point.before}
    if len(first) > 1:
        several = f"different scores before training ({', '.join(f'{rate:g}' for rate in sorted(first))})"
        raise MegarlError(f"{where}: {len(first)} {several}; several runs need a column `seed`")
    for (step, one), (later, other) in pairwise(sorted((step, point) for step, point in points.items() if step >= 0)):
        if other.hours < FALLS * one.hours:
            fell = f"{hours} falls from {one.hours:g} at step {step:g} to {other.hours:g} at step {later:g}"
            raise MegarlError(f"{where}: {fell}; it is cumulative, also over restarts")
    trained = sorted(point for point in points.values() if not point.before)
    compute, rates = np.array([point[:2] for point in trained], dtype=np.float64).reshape(-1, 2).T
    answers = [point.answers for point in trained] or [point.answers for point in points.values()]
    known = answers[-1] if None not in answers else None
    noise = binomial_noise(rates, np.array(answers)) if known and len({*answers}) > 1 else None
    called = name if seed is None else f"{name} seed {seed}"
    return Curve(called, compute, rates, next(iter(first), None), unit, seed, answers=known, noise=noise)


def _number(where: str, row: Row, column: str) -> float:
    value = row.get(column)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise MegarlError(f"{where}: {column} is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise MegarlError(f"{where}: {column} is {number}; leave out points without a score")
    return number
