"""Reads points of a learning curve (compute, held-out pass rate) from a run directory,
a CSV or a JSONL file.

    RUN/eval.jsonl (+ epochs of metrics.jsonl)   ─┐   Curve, one per seed: checked,
    a table: gpu_hours, pass_rate[, seed, …]      ├─► sorted by compute, R_0 separate
    (table_files.py)                             ─┘

The score of the weights before training (at step 0, or without compute) is R_0, not a
point of the curve. Rows without a score are left out, with a warning that counts them.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError, few
from megarl.core.base.rundir import Row, RunDir, latest_rows, rows_in_order
from megarl.predict.scaling.table_files import Placed, name_of, read_table

log = logging.getLogger(__name__)
HOURS = {"gpu": "GPU-hours", "core": "core-hours"}  # names of the units of compute, for people


@dataclass(frozen=True, eq=False)
class Curve:
    """One run with one seed. Example: Curve("mine", np.array([10., 20.]), np.array([.3,
    .4]), r0=.2).
    """

    name: str
    hours: np.ndarray
    """Cumulative compute of all roles together, [points] float64, above 0,
    ascending.
    """
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

    hours: str | None = None
    """None: `gpu_hours` if there is such a column, else `compute_hours`."""
    score: str | None = None
    """None: `pass_rate` or, for a run directory, the column that its recipe
    forecasts.
    """


class _Point(NamedTuple):
    """A score. is_start: whether it is that of the weights before training; answers:
    the number of answers of which it is the mean, None: unknown.
    """

    hours: float
    rate: float
    is_start: bool
    answers: int | None


def binomial_noise(rates: np.ndarray, answers: float | np.ndarray) -> np.ndarray:
    """Return the standard error of scores [points], each the mean of this many answers,
    right or wrong.
    """
    # A score of 0 or 1 is taken as one answer away from it, since it is not without
    # noise; that of a single answer is taken as 1/2.
    lowest = 1 / np.maximum(answers, 2)
    rates = np.clip(rates, lowest, 1 - lowest)
    return np.asarray(np.sqrt(rates * (1 - rates) / answers))


def amount(hours: float, unit: str | None = None) -> str:
    """Format an amount of compute for people: 16,000 GPU-hours, 0.125 core-hours."""
    number = f"{hours:,.0f}" if 1000 <= hours < 1e12 else f"{hours:.4g}"
    return f"{number} {unit_name(unit)}" if unit else number


def unit_name(unit: str) -> str:
    """Return what people call a `Curve.unit`."""
    return HOURS.get(unit, unit)


def read_points(source: str | Path, columns: PointColumns | None = None) -> list[Curve]:
    """Read the curves of a run directory, its eval.jsonl, or a table, one per seed.
    columns: None for the usual names.
    """
    path = Path(source)
    columns = columns or PointColumns()
    if path.name == "eval.jsonl" and (path.parent / "recipe.yaml").exists():
        path = path.parent
    if path.is_dir():
        return [_curve_of_directory(path, columns)]
    if not path.exists():
        raise MegarlError(f"{path}: no such run directory or file of points")
    return curves_of_rows(name_of(path), read_table(path), columns, str(path))


def curve_of_run(
    name: str, scores: Sequence[Row], steps: Iterable[Row], place: str, columns: PointColumns
) -> Curve:
    """Build a curve from rows of eval.jsonl (`scores`) and metrics.jsonl (`steps`), the
    latest row of each step; also of a live run. place: where they stand, for errors.
    """
    rows = [(f"{place}, step {row['step']}", row) for row in scores]
    (curve,) = curves_of_rows(name, rows, columns, place)
    compute_column = columns.hours or "compute_hours"
    # The rows' compute_unit is that of their hours, and says nothing of other columns.
    unit = curve.unit if "hours" in compute_column else compute_column
    second_epoch = _compute_at_second_epoch(steps, compute_column)
    return replace(curve, unit=unit, first_epoch=second_epoch)


def _compute_at_second_epoch(steps: Iterable[Row], compute_column: str) -> float | None:
    """Return the compute at the first step of the second epoch: infinite if no step is
    in one, None if no step has an epoch. Later steps are not read.
    """
    first_epoch = None
    for row in steps:
        epoch = row.get("epoch")
        if epoch is None or compute_column not in row:
            continue
        if first_epoch is None:
            first_epoch = epoch
        elif epoch > first_epoch:
            return row[compute_column]
    return None if first_epoch is None else math.inf


def _curve_of_directory(path: Path, columns: PointColumns) -> Curve:
    """Read the curve of a run directory. MegarlError if it has no evaluation yet."""
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
    """Return the column that is to be fitted according to the recipe at `path`;
    `pass_rate` if there is no such file. MegarlError if the recipe names no column.
    """
    from megarl.core.recipe import load

    if not path.exists():
        return "pass_rate"
    recipe = load(str(path))
    if recipe.forecast_column:
        return recipe.forecast_column
    tasks = list(recipe.data.tasks)
    if not tasks:
        raise MegarlError(
            f"{path}: no task in it, so it is unknown which score to fit; give --score-column"
        )
    raise MegarlError(
        f"{path}: several tasks ({', '.join(tasks)}), each with its own law; say which to fit:"
        f" --score-column pass_rate/{tasks[0]}, or evaluation.forecast={tasks[0]} in the recipe"
        " (--score-column pass_rate: all prompts together)"
    )


def curves_of_rows(
    name: str, rows: Sequence[Placed], columns: PointColumns, place: str
) -> list[Curve]:
    """Build one curve per value of `seed`. If a step has several rows, the last one
    counts. place: where the rows stand, for errors.
    """
    if not rows:
        raise MegarlError(f"{place}: no points in it")
    hours_column, score_column = _column_names(rows, columns, place)
    with_column = [(row_place, row) for row_place, row in rows if score_column in row]
    scored = _with_a_score(with_column, score_column, place)
    seeds: dict[int | None, dict[float, _Point]] = {}
    for n, (row_place, row) in enumerate(scored):
        seed = _integer(row_place, row, "seed")
        step = _step(row_place, row)
        point = _point(row_place, row, hours_column, score_column, step)
        # A row without a step replaces no other: its key is its own, and negative.
        key = -1 - n if step is None else step
        seeds.setdefault(seed, {})[key] = point
    unit = _unit(place, rows, hours_column)
    curves = []
    for seed, points in seeds.items():
        curves.append(_curve(name, seed, points, unit, hours_column, place))
    return curves


TENSORBOARD = {"Wall time", "Step", "Value"}
"""The columns of TensorBoard's CSV files."""
STEPS = ("step", "Step", "_step", "global_step")
"""Names of a step: ours, wandb's and TensorBoard's, wandb's in its history, other
trainers'.
"""
MOST_LISTED = 12
"""Columns named in a message; wandb exports thousands."""


def _column_names(rows: Sequence[Placed], columns: PointColumns, place: str) -> tuple[str, str]:
    """Return the names of the columns of compute and of the score. MegarlError if there
    is no such column, or several may be meant.
    """
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    if names and set(names) <= TENSORBOARD and not (columns.hours and columns.score):
        raise MegarlError(
            f"{place}: a file of TensorBoard, which has steps and no compute; to fit over steps,"
            " give --hours-column Step --score-column Value"
        )
    hours_column = _hours_column(names, columns, place)
    score_name = columns.score or "pass_rate"
    score_column = _column_like(score_name, names, place)
    if score_column is None:
        raise MegarlError(
            f"{place}: no column {score_name!r} (it has {few(names, MOST_LISTED)}); name yours with"
            " --score-column"
        )
    return hours_column, score_column


def _hours_column(names: Sequence[str], columns: PointColumns, place: str) -> str:
    """Return the name of the column with compute: the one asked for, else the first
    usual one. MegarlError, with the columns there are, if it is not in the table.
    """
    candidates = (columns.hours,) if columns.hours else ("gpu_hours", "compute_hours")
    for candidate in candidates:
        column = _column_like(candidate, names, place)
        if column is not None:
            return column
    hint = ""
    missing = repr(columns.hours)
    if not columns.hours:
        missing = " or ".join(candidates)
        step = next((name for name in STEPS if name in names), None)
        if step:
            hint = f"; --hours-column {step} fits over steps"
    raise MegarlError(
        f"{place}: no column {missing} (it has {few(names, MOST_LISTED)}); name yours with"
        f" --hours-column{hint}"
    )


def _column_like(name: str, names: Sequence[str], place: str) -> str | None:
    """Return the column of this name, or the one that wandb wrote for it: `run -
    eval/pass_rate`. Its `…__MIN` and `…__MAX` are not meant. None if `names` has no
    such column; MegarlError if several runs have one.
    """
    if name in names:
        return name
    exported = []
    for column in names:
        metric = column.rpartition(" - ")[2]
        if metric == name or metric.endswith(f"/{name}"):
            exported.append(column)
    if len(exported) > 1:
        several = " and ".join(map(repr, exported[:MOST_LISTED]))
        raise MegarlError(
            f"{place}: any of {several} may be meant by {name}; choose one with --score-column"
        )
    return exported[0] if exported else None


NO_VALUE = {"", "nan", "-nan", "na", "n/a", "#n/a", "<na>", "null", "none", "-", "–"}
"""What programs and people write, in lower case, where there is no value."""


def _is_missing(value: object) -> bool:
    """Return whether a cell has no value: it is empty, NaN, or says so in words."""
    if isinstance(value, str):
        return value.strip().lower() in NO_VALUE
    return value is None or (isinstance(value, float) and math.isnan(value))


def _with_a_score(rows: Sequence[Placed], column: str, place: str) -> list[Placed]:
    """Return the rows that have a score in this column; say how many have none.
    MegarlError if all have none.
    """
    scored = [(row_place, row) for row_place, row in rows if not _is_missing(row[column])]
    left_out = len(rows) - len(scored)
    if not scored:
        raise MegarlError(f"{place}: {column} is empty in each of its {left_out} rows")
    if left_out:
        log.warning(
            "%s: %d of %d rows have no %s and are left out", place, left_out, len(rows), column
        )
    return scored


def _step(place: str, row: Row) -> float | None:
    """Return the row's step, if it has one."""
    for column in STEPS:
        if not _is_missing(row.get(column)):
            return _number(place, row, column)
    return None


def _integer(place: str, row: Row, column: str) -> int | None:
    """Return the whole number in a column, None if the row has none."""
    return None if _is_missing(row.get(column)) else int(_number(place, row, column))


def _unit(place: str, rows: Sequence[Placed], hours_column: str) -> str:
    """Return the unit of compute that the rows state; if none does, GPU-hours, or the
    column's own name if it has no hours.
    """
    values = [row.get("compute_unit") for _, row in rows]
    stated = {str(value) for value in values if not _is_missing(value)}
    if len(stated) > 1 or not stated <= HOURS.keys():
        raise MegarlError(
            f"{place}: compute_unit is {', '.join(sorted(stated))}; it is gpu or core, the same in"
            " all rows"
        )
    if stated:
        return stated.pop()
    return "gpu" if "hour" in hours_column.lower() else hours_column


def _answers(place: str, row: Row, score_column: str) -> int | None:
    """Return the number of answers of which a row's score is the mean: prompts times
    samples in eval.jsonl, else the column `answers`; None if the row has neither.
    """
    suffix = score_column.removeprefix("pass_rate")  # such as /math
    prompts = f"n_prompts{suffix}"
    samples = f"samples{suffix}" if f"samples{suffix}" in row else "samples"
    if all(row.get(name) and not _is_missing(row[name]) for name in (prompts, samples)):
        answers = _number(place, row, prompts) * _number(place, row, samples)
    elif _is_missing(row.get("answers")):
        return None
    else:
        answers = _number(place, row, "answers")
    if answers < 1:
        raise MegarlError(
            f"{place}: answers is {answers:g}; it is how many each score is the mean of"
        )
    return int(answers)


def _point(
    place: str, row: Row, hours_column: str, score_column: str, step: float | None
) -> _Point:
    """Return a row's score. step: None if it has none; the start is then where compute
    is 0. MegarlError if the score is no share, or the compute is negative or, after the
    start, zero.
    """
    compute = _number(place, row, hours_column)
    rate = _number(place, row, score_column)
    if not 0 <= rate <= 1:
        hint = "; if it is in percent, write 54.2% or divide by 100" if 1 < rate <= 100 else ""
        raise MegarlError(
            f"{place}: {score_column} is {rate:g}, not a pass rate between 0 and 1{hint}"
        )
    if compute < 0:
        raise MegarlError(
            f"{place}: {hours_column} is {compute:g}; compute is cumulative and cannot be negative"
        )
    is_start = step == 0 or (step is None and compute == 0)
    if compute == 0 and not is_start:
        raise MegarlError(
            f"{place}: no compute at step {step:g}; only the score before training (step 0) has"
            f" none. Is {hours_column} cumulative hours of all devices?"
        )
    return _Point(compute, rate, is_start, _answers(place, row, score_column))


FALLS = 0.99  # below this share of the step before; a restart's clock may be a little behind


def _curve(
    name: str,
    seed: int | None,
    points: Mapping[float, _Point],
    unit: str,
    hours_column: str,
    place: str,
) -> Curve:
    """Build a curve from points by step; those without a step have negative keys."""
    r0 = _start_score(points, place)
    _refuse_falling_compute(points, hours_column, place)
    _warn_of_several_runs(points, hours_column, place)
    trained = [point for point in points.values() if not point.is_start]
    trained.sort(key=lambda point: (point.hours, point.rate))
    answers = [point.answers for point in trained or points.values()]
    last_answers = None if None in answers else answers[-1]
    pass_rate = np.array([point.rate for point in trained], dtype=np.float64)
    noise = None  # as many answers as `last_answers` everywhere tell it
    if last_answers and len(set(answers)) > 1:
        noise = binomial_noise(pass_rate, np.array(answers))
    return Curve(
        name if seed is None else f"{name} seed {seed}",
        np.array([point.hours for point in trained], dtype=np.float64),
        pass_rate,
        r0,
        unit,
        seed,
        answers=last_answers,
        noise=noise,
    )


def _start_score(points: Mapping[float, _Point], place: str) -> float | None:
    """Return the score before training; None if there is none. MegarlError if several
    differ.
    """
    rates = sorted({point.rate for point in points.values() if point.is_start})
    if len(rates) > 1:
        listed = ", ".join(f"{rate:g}" for rate in rates)
        raise MegarlError(
            f"{place}: {len(rates)} different scores before training ({listed}); several runs need"
            " a column `seed`"
        )
    return rates[0] if rates else None


def _refuse_falling_compute(points: Mapping[float, _Point], hours_column: str, place: str) -> None:
    """Raise MegarlError if a step has less compute than one before it. points: by step,
    negative if they have none.
    """
    by_step = sorted((step, point) for step, point in points.items() if step >= 0)
    for (step, point), (next_step, next_point) in pairwise(by_step):
        if next_point.hours < FALLS * point.hours:
            raise MegarlError(
                f"{place}: {hours_column} falls from {point.hours:g} at step {step:g} to"
                f" {next_point.hours:g} at step {next_step:g}; it is cumulative, also over restarts"
            )


def _warn_of_several_runs(points: Mapping[float, _Point], hours_column: str, place: str) -> None:
    """Warn if points without a step have the same compute: they may be those of several
    runs. points: by step, negative if they have none.
    """
    without_step = Counter(
        point.hours for step, point in points.items() if step < 0 and not point.is_start
    )
    repeated = [f"{compute:g}" for compute, count in without_step.items() if count > 1]
    if repeated:
        log.warning(
            "%s: several scores at %s %s count as those of one run; several runs need a column"
            " `seed`",
            place,
            hours_column,
            ", ".join(repeated[:3]),
        )


def _number(place: str, row: Row, column: str) -> float:
    """Return a finite number from a row's column; MegarlError for anything else."""
    value = row.get(column)
    number = math.nan
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        hint = "; is the comma a decimal mark?" if isinstance(value, str) and "," in value else ""
        raise MegarlError(f"{place}: {column} is {value!r}, not a number{hint}")
    return number
