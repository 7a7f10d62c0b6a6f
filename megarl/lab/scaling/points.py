"""Reads points of a learning curve (compute, held-out pass rate) from a run directory,
a CSV or a JSONL file.

    RUN/eval.jsonl (+ epochs of metrics.jsonl)   ─┐
    a table: gpu_hours, pass_rate[, seed, …]      ├─► Curve, one per seed: checked, sorted by compute, R_0 separate
    (table_files.py)                             ─┘

The score of the weights before training (at step 0, or without compute) is R_0, not a
point of the curve. Rows without a score are left out, with a warning that counts them.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, latest_rows, rows_in_order
from megarl.lab.scaling.table_files import Placed, name_of, read_table

log = logging.getLogger(__name__)
HOURS = {"gpu": "GPU-hours", "core": "core-hours"}  # names of the units of compute, for people


@dataclass(frozen=True, eq=False)
class Curve:
    """One run with one seed. Example: Curve("mine", np.array([10., 20.]), np.array([.3,
    .4]), r0=.2).
    """

    name: str
    hours: (
        np.ndarray
    )  # cumulative compute of all roles together, [points] float64, above 0, ascending
    pass_rate: np.ndarray  # [points] float64, from 0 to 1
    r0: float | None = None  # pass rate before training, if it was measured
    unit: str = "gpu"  # a key of HOURS, or the name of a column that has no hours, such as flops
    seed: int | None = None
    first_epoch: float | None = None
    """Hours at which the first epoch over the prompts ended; infinite if it has not
    ended; None: unknown.
    """
    answers: int | None = None
    """Number of answers of which each score (the last, if they differ) is the mean:
    binomial noise. None: unknown.
    """
    noise: np.ndarray | None = None
    """Standard error of each score [points], if it is known and not that of `answers`.
    """


@dataclass(frozen=True)
class PointColumns:
    """Column names in a file or in eval.jsonl."""

    hours: str | None = None  # None: `gpu_hours` if there is such a column, else `compute_hours`
    score: str | None = (
        None  # None: `pass_rate` or, for a run directory, the column that its recipe forecasts
    )


class _Point(NamedTuple):
    """A score. before: whether it is that of the weights before training; answers: of
    which it is the mean, None: unknown.
    """

    hours: float
    rate: float
    before: bool
    answers: int | None


def binomial_noise(rates: np.ndarray, answers: float | np.ndarray) -> np.ndarray:
    """Return the standard error of scores [points], each the mean of this many answers,
    right or wrong.
    """
    least = 1 / np.maximum(
        answers, 2
    )  # a perfect score is not without noise, nor is a single answer
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
    """Read the curves of a run directory, its eval.jsonl, or a table, one per seed."""
    path = Path(source)
    columns = columns or PointColumns()
    if path.name == "eval.jsonl" and (path.parent / "recipe.yaml").exists():
        path = path.parent
    if path.is_dir():
        return [_run(path, columns)]
    if not path.exists():
        raise MegarlError(f"{path}: no such run directory or file of points")
    return curves_of_rows(name_of(path), read_table(path), columns, str(path))


def curve_of_run(
    name: str, scores: Sequence[Row], steps: Iterable[Row], where: str, columns: PointColumns
) -> Curve:
    """Build a curve from rows of eval.jsonl (`scores`) and metrics.jsonl (`steps`), the
    latest row of each step; also of a live run. where: the place, for errors.
    """
    rows = [(f"{where}, step {row['step']}", row) for row in scores]
    (curve,) = curves_of_rows(name, rows, columns, where)
    column = columns.hours or "compute_hours"
    unit = (
        curve.unit if "hours" in column else column
    )  # the rows' compute_unit is that of their hours
    epochs = (
        (row["epoch"], row[column])
        for row in steps
        if row.get("epoch") is not None and column in row
    )
    if (first := next(epochs, None)) is None:
        return replace(curve, unit=unit)
    return replace(
        curve,
        unit=unit,
        first_epoch=next((at for epoch, at in epochs if epoch > first[0]), math.inf),
    )


def _run(path: Path, columns: PointColumns) -> Curve:
    run = RunDir(path)
    if not run.eval.exists():
        raise MegarlError(
            f"{path}: no eval.jsonl in it; a run directory has one after its first evaluation"
        )
    chosen = PointColumns(columns.hours, columns.score or _forecast_column(run.recipe))
    return curve_of_run(
        path.resolve().name,
        latest_rows(run.eval),
        rows_in_order(run.metrics),
        str(run.eval),
        chosen,
    )


def _forecast_column(path: Path) -> str:
    """Return the column that is to be fitted according to the recipe at `path`.
    MegarlError if that says none.
    """
    from megarl.core.recipe import load

    if not path.exists():
        return "pass_rate"
    recipe = load(str(path))
    if not recipe.forecast_column:
        tasks = list(recipe.data.tasks)
        if not tasks:
            raise MegarlError(
                f"{path}: no task in it, so it is unknown which score to fit; give --score-column"
            )
        several = f"several tasks ({', '.join(tasks)}), each with its own law; say which to fit"
        which = (
            f"--score-column pass_rate/{tasks[0]}, or evaluation.forecast={tasks[0]} in the recipe"
        )
        raise MegarlError(
            f"{path}: {several}: {which} (--score-column pass_rate: all prompts together)"
        )
    return recipe.forecast_column


def curves_of_rows(
    name: str, rows: Sequence[Placed], columns: PointColumns, where: str
) -> list[Curve]:
    """Build one curve per value of `seed`. If a step has several rows, the last one
    counts.
    """
    if not rows:
        raise MegarlError(f"{where}: no points in it")
    hours, score = _columns(rows, columns, where)
    scored = _with_a_score([(at, row) for at, row in rows if score in row], score, where)
    seeds: dict[int | None, dict[float, _Point]] = {}
    for n, (at, row) in enumerate(scored):
        seed = _integer(at, row, "seed")
        step = _step(at, row)
        point = _point(at, row, hours, score, step)
        seeds.setdefault(seed, {})[step if step is not None else -1 - n] = point
    unit = _unit(where, rows, hours)
    return [_curve(name, seed, points, unit, hours, where) for seed, points in seeds.items()]


TENSORBOARD = {"Wall time", "Step", "Value"}
"""The columns of TensorBoard's CSV files."""
STEPS = ("step", "Step", "_step", "global_step")
"""Names of a step: ours, wandb's and TensorBoard's, wandb's in its history, other
trainers'.
"""
MOST_SHOWN = 12
"""Columns named in a message; wandb exports thousands."""


def _columns(rows: Sequence[Placed], columns: PointColumns, where: str) -> tuple[str, str]:
    """Return the columns of compute and of the score. MegarlError if there is none, or
    several.
    """
    known = list(dict.fromkeys(name for _, row in rows for name in row))
    if known and set(known) <= TENSORBOARD and not (columns.hours and columns.score):
        fix = "to fit over steps, give --hours-column Step --score-column Value"
        raise MegarlError(f"{where}: a file of TensorBoard, which has steps and no compute; {fix}")
    shown = ", ".join(known[:MOST_SHOWN])
    if len(known) > MOST_SHOWN:
        shown += f" and {len(known) - MOST_SHOWN} more"
    defaults = (columns.hours,) if columns.hours else ("gpu_hours", "compute_hours")
    hours = next(filter(None, (_column(known, name, where) for name in defaults)), None)
    if hours is None:
        wanted = repr(columns.hours) if columns.hours else " or ".join(defaults)
        step = next((name for name in STEPS if name in known and not columns.hours), "")
        over_steps = f"; --hours-column {step} fits over steps" if step else ""
        raise MegarlError(
            f"{where}: no column {wanted} (it has {shown}); name yours with"
            f" --hours-column{over_steps}"
        )
    wanted = columns.score or "pass_rate"
    score = _column(known, wanted, where)
    if score is None:
        raise MegarlError(
            f"{where}: no column {wanted!r} (it has {shown}); name yours with --score-column"
        )
    return hours, score


def _column(known: Sequence[str], name: str, where: str) -> str | None:
    """Return the column of this name, or the one that wandb wrote for it: `run -
    eval/pass_rate`. Its `…__MIN` and `…__MAX` are not meant. MegarlError if several
    runs have one.
    """
    if name in known:
        return name
    metrics = {column: column.rpartition(" - ")[2] for column in known}
    exported = [
        column
        for column, metric in metrics.items()
        if metric == name or metric.endswith(f"/{name}")
    ]
    if len(exported) > 1:
        several = " and ".join(map(repr, exported[:MOST_SHOWN]))
        raise MegarlError(
            f"{where}: any of {several} may be meant by {name}; choose one with --score-column"
        )
    return exported[0] if exported else None


NO_VALUE = {"", "nan", "-nan", "na", "n/a", "#n/a", "<na>", "null", "none", "-", "–"}
"""What programs and people write, in lower case, where there is no value."""


def _is_missing(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in NO_VALUE
    return value is None or (isinstance(value, float) and math.isnan(value))


def _with_a_score(rows: Sequence[Placed], score: str, where: str) -> list[Placed]:
    """Return the rows that have a score; say how many have none. MegarlError if all
    have none.
    """
    scored = [(at, row) for at, row in rows if not _is_missing(row[score])]
    left_out = len(rows) - len(scored)
    if not scored:
        raise MegarlError(f"{where}: {score} is empty in each of its {left_out} rows")
    if left_out:
        log.warning(
            "%s: %d of %d rows have no %s and are left out", where, left_out, len(rows), score
        )
    return scored


def _step(where: str, row: Row) -> float | None:
    """Return the row's step, if it has one."""
    column = next((name for name in STEPS if not _is_missing(row.get(name))), None)
    return None if column is None else _number(where, row, column)


def _integer(where: str, row: Row, column: str) -> int | None:
    return None if _is_missing(row.get(column)) else int(_number(where, row, column))


def _unit(where: str, rows: Sequence[tuple[str, Row]], hours: str) -> str:
    """Return the unit of compute that the rows state; if none does, GPU-hours, or the
    column's own name if it has no hours.
    """
    stated = {
        str(row["compute_unit"]) for _, row in rows if not _is_missing(row.get("compute_unit"))
    }
    if len(stated) > 1 or not stated <= HOURS.keys():
        advice = "it is gpu or core, the same in all rows"
        raise MegarlError(f"{where}: compute_unit is {', '.join(sorted(stated))}; {advice}")
    return next(iter(stated), "gpu" if "hour" in hours.lower() else hours)


def _answers(where: str, row: Row, score: str) -> int | None:
    """Return the number of answers per score, from one row: the column `answers`, or
    prompts times samples in eval.jsonl.
    """
    suffix = score.removeprefix("pass_rate")
    prompts = f"n_prompts{suffix}"
    samples = f"samples{suffix}" if f"samples{suffix}" in row else "samples"
    if all(row.get(name) and not _is_missing(row[name]) for name in (prompts, samples)):
        answers = _number(where, row, prompts) * _number(where, row, samples)
    elif _is_missing(row.get("answers")):
        return None
    else:
        answers = _number(where, row, "answers")
    if answers < 1:
        raise MegarlError(
            f"{where}: answers is {answers:g}; it is how many each score is the mean of"
        )
    return int(answers)


def _point(where: str, row: Row, hours: str, score: str, step: float | None) -> _Point:
    compute = _number(where, row, hours)
    rate = _number(where, row, score)
    if not 0 <= rate <= 1:
        hint = "; if it is in percent, write 54.2% or divide by 100" if 1 < rate <= 100 else ""
        raise MegarlError(f"{where}: {score} is {rate:g}, not a pass rate between 0 and 1{hint}")
    if compute < 0:
        raise MegarlError(
            f"{where}: {hours} is {compute:g}; compute is cumulative and cannot be negative"
        )
    before = step == 0 or (step is None and compute == 0)
    if compute == 0 and not before:
        why = f"no compute at step {step:g}; only the score before training (step 0) has none"
        raise MegarlError(f"{where}: {why}. Is {hours} cumulative hours of all devices?")
    return _Point(compute, rate, before, _answers(where, row, score))


FALLS = 0.99  # a restart's clock may be a little behind


def _curve(
    name: str, seed: int | None, points: Mapping[float, _Point], unit: str, hours: str, where: str
) -> Curve:
    """Build a curve from points by step; those without a step have negative keys."""
    first = {point.rate for point in points.values() if point.before}
    if len(first) > 1:
        several = (
            f"different scores before training ({', '.join(f'{rate:g}' for rate in sorted(first))})"
        )
        raise MegarlError(f"{where}: {len(first)} {several}; several runs need a column `seed`")
    for (step, one), (later, other) in pairwise(
        sorted((step, point) for step, point in points.items() if step >= 0)
    ):
        if other.hours < FALLS * one.hours:
            fell = (
                f"{hours} falls from {one.hours:g} at step {step:g} to {other.hours:g} at step"
                f" {later:g}"
            )
            raise MegarlError(f"{where}: {fell}; it is cumulative, also over restarts")
    trained = sorted(point for point in points.values() if not point.before)
    without_step = Counter(
        point.hours for step, point in points.items() if step < 0 and not point.before
    )
    if repeated := [at for at, count in without_step.items() if count > 1]:
        several = f"several scores at {hours} {', '.join(f'{at:g}' for at in repeated[:3])}"
        log.warning(
            "%s: %s count as those of one run; several runs need a column `seed`", where, several
        )
    compute, rates = np.array([point[:2] for point in trained], dtype=np.float64).reshape(-1, 2).T
    answers = [point.answers for point in trained] or [point.answers for point in points.values()]
    known = answers[-1] if None not in answers else None
    noise = binomial_noise(rates, np.array(answers)) if known and len({*answers}) > 1 else None
    called = name if seed is None else f"{name} seed {seed}"
    return Curve(
        called, compute, rates, next(iter(first), None), unit, seed, answers=known, noise=noise
    )


def _number(where: str, row: Row, column: str) -> float:
    value = row.get(column)
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        hint = "; is the comma a decimal mark?" if isinstance(value, str) and "," in value else ""
        raise MegarlError(f"{where}: {column} is {value!r}, not a number{hint}")
    return number
