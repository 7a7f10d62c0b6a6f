"""Writes the results of a study: points, fits, a table and plots, from the files of its
finished runs.

RUN/eval.jsonl of each task ─► points/NAME.csv
  └─► fit (seeds of a variant pooled) ─► table.md, scaling and final .png .svg

scaling: one panel per variant, with its seeds and fit drawn over those of the first
variant, with which all are compared.
final: each variant's last pass rate for each seed, and its fitted asymptote with
interval.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Column, Table

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import latest_rows, latest_scores, write_atomically
from megarl.core.recipe import load
from megarl.core.telemetry.pictures import BLUE, GREY, ORANGE, drawing, save
from megarl.predict.scaling.compare import SAME_CEILING, RunFit, compare
from megarl.predict.scaling.fit import Fit
from megarl.predict.scaling.points import Curve, read_points
from megarl.predict.study.plan import Study, StudyTask
from megarl.run.summary import mean


class EvaluationPoint(NamedTuple):
    """One evaluation of one run: a line of its CSV. tokens: those generated so far;
    lag: the mean over the steps so far.
    """

    compute_hours: float
    pass_rate: float
    step: int
    tokens: int
    seed: int
    compute_unit: str
    lag: float


class VariantResult(NamedTuple):
    """A variant with all its seeds. at_equal_compute [seeds]: pass rates at the compute
    that every run of the study has reached. at_ceiling: the fit with A fixed at the
    ceiling common to all variants, where exponents B are comparable (compare.py).
    """

    variant: str
    runs: tuple[tuple[EvaluationPoint, ...], ...]
    at_equal_compute: np.ndarray
    fit: Fit | None
    at_ceiling: Fit | None
    why_no_fit: str

    @property
    def final(self) -> np.ndarray:
        """The last pass rate of each run, [seeds]."""
        return np.array([run[-1].pass_rate for run in self.runs])


def write(study: Study, console: Console) -> int:
    """Write all files, print the table and return 0. MegarlError while no run has
    finished.
    """
    rows = collect(study)
    done = [task for task in study.tasks if task.state() == "done"]
    points = study.path / "points"
    if points.is_symlink():
        raise MegarlError(
            f"{points}: a link, and files of a study would be written where it leads; remove it"
        )
    points.mkdir(exist_ok=True)
    for task in done:
        write_atomically(points / f"{task.name}.csv", csv(read(task)).encode())
    missing = [task.name for task in study.tasks if task not in done]
    write_atomically(study.path / "table.md", markdown(rows, missing).encode())
    plot_scaling(rows, study.path / "scaling")
    plot_final(rows, study.path / "final")
    columns = [Column(heading, no_wrap=True) for heading in HEADINGS]
    table = Table(*columns, box=None, padding=(0, 2), pad_edge=False)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(f"{study.path}: table.md, scaling.png, final.png, points/", highlight=False)
    return 0


def csv(points: Sequence[EvaluationPoint]) -> str:
    """Return a run's evaluations as CSV for `megarl scaling`; no value has a comma."""
    lines = [",".join(EvaluationPoint._fields)]
    for hours, pass_rate, *values in points:
        lines.append(f"{hours:.6f},{pass_rate:.6f},{','.join(map(str, values))}")
    return "\n".join([*lines, ""])


def collect(study: Study) -> list[VariantResult]:
    """Return the results of each variant that has a finished run. MegarlError if none
    has.
    """
    done = [task for task in study.tasks if task.state() == "done"]
    if not done:
        raise MegarlError(f"{study.path}: no run has finished yet; wait, or look at its logs/")
    common_hours = min(read(task)[-1].compute_hours for task in done)
    tasks_of: dict[str, list[StudyTask]] = {}
    for name in study.variants:
        if tasks := [task for task in done if task.variant == name]:
            tasks_of[name] = tasks
    curves: dict[str, list[Curve]] = {}
    fits: dict[str, RunFit] = {}
    for name, tasks in tasks_of.items():
        try:
            curves[name] = _curves(tasks)
        except MegarlError as error:  # its points are unusable, so it is not compared
            fits[name] = RunFit(name, None, str(error))
    compared = compare(curves)
    for entry in compared.entries:
        fits[entry.name] = entry
    results = []
    for name, tasks in tasks_of.items():
        runs = tuple(read(task) for task in tasks)
        at_equal_compute = np.array([_pass_rate_at(common_hours, run) for run in runs])
        fit = fits[name].fit
        at_ceiling = compared.at_ceiling.get(name, fit)
        problem = fits[name].problem
        results.append(VariantResult(name, runs, at_equal_compute, fit, at_ceiling, problem))
    return results


def _curves(tasks: Sequence[StudyTask]) -> list[Curve]:
    """Return the learning curve of each run."""
    curves = []
    for task in tasks:
        curves += read_points(task.rundir.path)
    return curves


def _pass_rate_at(hours: float, run: Sequence[EvaluationPoint]) -> float:
    """Return a run's pass rate at this compute, interpolated between evaluations."""
    compute = [point.compute_hours for point in run]
    pass_rates = [point.pass_rate for point in run]
    return float(np.interp(hours, compute, pass_rates))


def read(task: StudyTask) -> tuple[EvaluationPoint, ...]:
    """Return a run's evaluations in the order of their steps. The score is the one that
    its recipe forecasts, else that of all tasks together.
    """
    score = load(str(task.recipe)).forecast_column or "pass_rate"
    rows = latest_rows(task.rundir.metrics)
    points = []
    for row in latest_scores(task.rundir.eval):
        steps_before = [earlier for earlier in rows if earlier["step"] < row["step"]]
        point = EvaluationPoint(
            compute_hours=row["compute_hours"],
            pass_rate=row[score],
            step=row["step"],
            tokens=int(sum(step["generated_tokens"] for step in steps_before)),
            seed=task.seed,
            compute_unit=row["compute_unit"],
            lag=round(mean(steps_before, "lag_mean") or 0.0, 3),
        )
        points.append(point)
    return tuple(points)


HEADINGS = (
    "variant",
    "seeds",
    "before",
    "after",
    "at equal compute",
    "lag",
    "A",
    "B",
    "C_mid",
    "hours a run",
    "tokens a run",
)


def cells(row: VariantResult) -> list[str]:
    """Return the variant's line of the table, a text for each of HEADINGS. Numbers of
    runs are means over them.
    """
    first = np.mean([run[0].pass_rate for run in row.runs])
    last_points = [run[-1] for run in row.runs]
    lag = np.mean([point.lag for point in last_points])
    hours = np.mean([point.compute_hours for point in last_points])
    tokens = np.mean([point.tokens for point in last_points])
    return [
        row.variant,
        str(len(row.runs)),
        f"{first:.3f}",
        _spread(row.final),
        _spread(row.at_equal_compute),
        f"{lag:.2f}",
        *_fitted_cells(row),
        f"{hours:.3g}",
        f"{tokens:,.0f}",
    ]


def _fitted_cells(row: VariantResult) -> list[str]:
    """Return the texts under A, B and C_mid, with 95 % intervals; dashes without a
    fit.
    """
    fit = row.fit
    at_ceiling = row.at_ceiling
    if fit is None or at_ceiling is None:
        return ["-", "-", "-"]
    # Exponents B are comparable only at one A: here the ceiling common to all variants.
    return [
        "{:.3f} [{:.3f}, {:.3f}]".format(fit.A, *fit.A_interval),
        "{:.2f} [{:.2f}, {:.2f}]".format(at_ceiling.B, *at_ceiling.B_interval),
        "{:.3g} [{:.3g}, {:.3g}]".format(fit.C_mid, *fit.C_mid_interval),
    ]


def markdown(rows: Sequence[VariantResult], missing: Sequence[str] = ()) -> str:
    """Return the table with explanations below it, for table.md. missing: names of
    unfinished runs.
    """
    unit = rows[0].runs[0][0].compute_unit
    common_hours = min(run[-1].compute_hours for row in rows for run in row.runs)
    ceilings = [row.at_ceiling.A for row in rows if row.at_ceiling is not None]
    how_b = ""
    if len(ceilings) > 1:
        how_b = f", B with A held at {ceilings[0]:.3f}, the mean of all variants"
    lines = [
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        (
            "Pass rates are of held-out prompts: mean over seeds ± standard deviation of a seed."
            f" Compute in {unit}-hours. At equal compute: at the {common_hours:.3g} hours that"
            " every run reached, interpolated. Lag: mean over a run. A, B, C_mid: sigmoid fitted"
            f" to all seeds of a variant together{how_b}; with 95 % intervals."
        ),
    ]
    lines += _notes(rows)
    if len(ceilings) > 1:
        lines += _far_from_ceiling(rows, ceilings[0])
    if missing:
        lines.append(f"- not finished: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def _notes(rows: Sequence[VariantResult]) -> list[str]:
    """Return the warnings of all fits, each with the variants that have it."""
    variants_of: dict[str, list[str]] = {}
    for row in rows:
        notes = [row.why_no_fit] if row.fit is None else row.fit.warnings
        for note in notes:
            variants_of.setdefault(note, []).append(row.variant)
    return [f"- {note}: {', '.join(variants)}" for note, variants in variants_of.items()]


def _far_from_ceiling(rows: Sequence[VariantResult], ceiling: float) -> list[str]:
    """Return a line with the variants whose A is not the common one, if any."""
    variants = []
    for row in rows:
        if row.fit and abs(row.fit.A - ceiling) > SAME_CEILING:
            variants.append(row.variant)
    if not variants:
        return []
    return [
        f"- A is more than {SAME_CEILING} from that at which B is held, so B is no speed:"
        f" {', '.join(variants)}"
    ]


def _spread(values: np.ndarray) -> str:
    """Return the mean of the seeds' values and, if there are several, their standard
    deviation.
    """
    if len(values) == 1:
        return f"{values.mean():.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


PANELS_A_LINE = 4
CURVE_POINTS = 200


def plot_scaling(rows: Sequence[VariantResult], path: Path) -> None:
    """Write `path`.png and `path`.svg with one panel per variant, in lines of
    PANELS_A_LINE. The first variant is drawn in grey in the panels of all others.
    """
    lines = -(-len(rows) // PANELS_A_LINE)
    columns = min(len(rows), PANELS_A_LINE)
    size = (3.1 * columns, 2.6 * lines + 0.5)
    with drawing(size, lines, columns, sharex=True, sharey=True) as (figure, panels):
        for axes, row in zip(panels, rows, strict=False):
            if row is not rows[0]:
                _draw_variant(axes, rows[0], GREY)
            _draw_variant(axes, row, BLUE)
            axes.set_title(row.variant)
        for axes in panels[len(rows) :]:
            axes.set_visible(False)
        for axes in panels[len(rows) - columns : len(rows)]:  # the lowest of each column
            axes.tick_params(labelbottom=True)
        unit = rows[0].runs[0][0].compute_unit
        figure.supxlabel(f"compute, {unit}-hours", fontsize=9)
        figure.supylabel("held-out pass rate", fontsize=9)
        save(figure, path, dpi=140)


def plot_final(rows: Sequence[VariantResult], path: Path) -> None:
    """Write `path`.png and `path`.svg, with the first variant on top and a dotted line
    at its mean.
    """
    height = 1.2 + 0.42 * len(rows)
    with drawing((8, height)) as (figure, (axes,)):
        axes.plot([], [], "o", color=BLUE, label="last pass rate of a seed")
        axes.plot([], [], color=ORANGE, linewidth=2, label="asymptote A, 95 %")
        for y, row in enumerate(rows):  # downwards: ylim is reversed below
            axes.plot(row.final, [y] * len(row.final), "o", color=BLUE, alpha=0.75)
            if row.fit is None:
                continue
            below = y + 0.22
            axes.plot(row.fit.A_interval, [below, below], color=ORANGE, linewidth=2)
            axes.plot([row.fit.A], [below], "|", color=ORANGE, markersize=9)
        mean_of_first = rows[0].final.mean()
        axes.axvline(mean_of_first, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [row.variant for row in rows])
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="held-out pass rate")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncol=2)
        save(figure, path, dpi=140)


def _draw_variant(axes: Axes, row: VariantResult, color: str) -> None:
    """Draw the evaluations of all seeds, and the fitted law if there is one."""
    for run in row.runs:
        hours = [point.compute_hours for point in run]
        rates = [point.pass_rate for point in run]
        axes.plot(hours, rates, "o", color=color, markersize=3, alpha=0.5, markeredgewidth=0)
    if row.fit is not None:
        line = np.linspace(*row.fit.window, CURVE_POINTS)
        axes.plot(line, row.fit(line), color=color)
