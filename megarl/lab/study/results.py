"""Writes the results of a study: points, fits, a table and plots, from the files of its
finished runs.

RUN/eval.jsonl of each task ─► points/NAME.csv ─► fit (seeds of a variant pooled) ─► table.md, scaling and final .png .svg

scaling: one panel per variant, with its seeds and fit drawn over those of the first
variant, with which all are compared.
final:   each variant's last pass rate for each seed, and its fitted asymptote with interval.
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
from megarl.lab.pictures import BLUE, GREY, ORANGE, drawing, save
from megarl.lab.scaling.compare import SAME_CEILING, RunFit, compare
from megarl.lab.scaling.fit import Fit
from megarl.lab.scaling.points import Curve, read_points
from megarl.lab.study.plan import Study, StudyTask
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
    """A variant with all its seeds. common [seeds]: pass rates at the compute that
    every run of the study has reached. at_ceiling: the fit with A fixed at the ceiling
    common to all variants, where exponents B are comparable (compare.py).
    """

    variant: str
    runs: tuple[tuple[EvaluationPoint, ...], ...]
    common: np.ndarray
    fit: Fit | None
    at_ceiling: Fit | None
    why_no_fit: str

    @property
    def final(self) -> np.ndarray:
        """The last pass rate of each run, [seeds]."""
        return np.array([run[-1].pass_rate for run in self.runs])


def write(study: Study, console: Console) -> int:
    """Write all files, and print the table. MegarlError while no run has finished."""
    rows = collect(study)
    done = [task for task in study.tasks if task.state() == "done"]
    points = study.path / "points"
    if points.is_symlink():
        raise MegarlError(
            f"{points}: a link, and files of a study would be written where it leads; remove it"
        )
    points.mkdir(exist_ok=True)
    for task in done:  # for `megarl scaling`; no value has a comma
        lines = [f"{h:.6f},{rate:.6f},{','.join(map(str, rest))}" for h, rate, *rest in read(task)]
        text = "\n".join([",".join(EvaluationPoint._fields), *lines, ""])
        write_atomically(points / f"{task.name}.csv", text.encode())
    missing = [task.name for task in study.tasks if task not in done]
    write_atomically(study.path / "table.md", markdown(rows, missing).encode())
    plot_scaling(rows, study.path / "scaling")
    plot_final(rows, study.path / "final")
    shown = Table(
        *(Column(heading, no_wrap=True) for heading in HEADINGS),
        box=None,
        padding=(0, 2),
        pad_edge=False,
    )
    for row in rows:
        shown.add_row(*cells(row))
    console.print(shown)
    console.print(f"{study.path}: table.md, scaling.png, final.png, points/", highlight=False)
    return 0


def collect(study: Study) -> list[VariantResult]:
    done = [task for task in study.tasks if task.state() == "done"]
    if not done:
        raise MegarlError(f"{study.path}: no run has finished yet; wait, or look at its logs/")
    hours = min(read(task)[-1].compute_hours for task in done)
    tasks = {
        name: own
        for name in study.variants
        if (own := [task for task in done if task.variant == name])
    }
    curves: dict[str, list[Curve]] = {}
    entries: dict[str, RunFit] = {}
    for name, own in tasks.items():
        try:
            curves[name] = [curve for task in own for curve in read_points(task.rundir.path)]
        except MegarlError as error:
            entries[name] = RunFit(name, None, str(error))
    compared = compare(curves)
    entries |= {entry.name: entry for entry in compared.entries}
    results = []
    for name, own in tasks.items():
        runs = tuple(read(task) for task in own)
        entry = entries[name]
        common = [
            np.interp(hours, [p.compute_hours for p in run], [p.pass_rate for p in run])
            for run in runs
        ]
        at_ceiling = compared.at_ceiling.get(name, entry.fit)
        results.append(
            VariantResult(name, runs, np.array(common), entry.fit, at_ceiling, entry.problem)
        )
    return results


def read(task: StudyTask) -> tuple[EvaluationPoint, ...]:
    """Return a run's evaluations by step. The score is the one that its recipe
    forecasts, else that of all tasks together.
    """
    score = load(str(task.recipe)).forecast_column or "pass_rate"
    rows = latest_rows(task.rundir.metrics)
    points = []
    for row in latest_scores(task.rundir.eval):
        made = [earlier for earlier in rows if earlier["step"] < row["step"]]
        tokens = int(sum(earlier["generated_tokens"] for earlier in made))
        lag = round(mean(made, "lag_mean") or 0.0, 3)
        values = (
            row["compute_hours"],
            row[score],
            row["step"],
            tokens,
            task.seed,
            row["compute_unit"],
            lag,
        )
        points.append(EvaluationPoint(*values))
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
    before = np.mean([run[0].pass_rate for run in row.runs])
    hours = np.mean([run[-1].compute_hours for run in row.runs])
    tokens = np.mean([run[-1].tokens for run in row.runs])
    lag = np.mean([run[-1].lag for run in row.runs])
    found = row.fit
    held = row.at_ceiling
    fitted = ["-"] * 3
    if found is not None and held is not None:
        values = (
            (found.A, *found.A_interval),
            (held.B, *held.B_interval),
            (found.C_mid, *found.C_mid_interval),
        )
        forms = ("{:.3f} [{:.3f}, {:.3f}]", "{:.2f} [{:.2f}, {:.2f}]", "{:.3g} [{:.3g}, {:.3g}]")
        fitted = [form.format(*three) for form, three in zip(forms, values, strict=True)]
    rates = [f"{before:.3f}", _spread(row.final), _spread(row.common), f"{lag:.2f}"]
    return [row.variant, str(len(row.runs)), *rates, *fitted, f"{hours:.3g}", f"{tokens:,.0f}"]


def markdown(rows: Sequence[VariantResult], missing: Sequence[str] = ()) -> str:
    """Return the table with explanations below it. missing: names of unfinished runs."""
    unit = rows[0].runs[0][0].compute_unit
    common_hours = min(run[-1].compute_hours for row in rows for run in row.runs)
    ceilings = [row.at_ceiling.A for row in rows if row.at_ceiling is not None]
    held = ""
    if len(ceilings) > 1:
        held = f", B with A held at {ceilings[0]:.3f}, the mean of all variants"
    lines = [
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        (
            "Pass rates are of held-out prompts: mean over seeds ± standard deviation of a seed."
            f" Compute in {unit}-hours. At equal compute: at the {common_hours:.3g} hours that"
            " every run reached, interpolated. Lag: mean over a run. A, B, C_mid: sigmoid fitted"
            f" to all seeds of a variant together{held}; with 95 % intervals."
        ),
    ]
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in [row.why_no_fit] if row.fit is None else row.fit.warnings:
            notes.setdefault(note, []).append(row.variant)
    lines += [f"- {note}: {', '.join(variants)}" for note, variants in notes.items()]
    if apart := [
        row.variant
        for row in rows
        if held and row.fit and abs(row.fit.A - ceilings[0]) > SAME_CEILING
    ]:
        what = f"A is more than {SAME_CEILING} from that at which B is held, so B is no speed"
        lines.append(f"- {what}: {', '.join(apart)}")
    if missing:
        lines.append(f"- not finished: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def _spread(values: np.ndarray) -> str:
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


PANELS_A_LINE = 4
CURVE_POINTS = 200


def plot_scaling(rows: Sequence[VariantResult], path: Path) -> None:
    """Write `path`.png and `path`.svg with one panel per variant."""
    lines = -(-len(rows) // PANELS_A_LINE)
    columns = min(len(rows), PANELS_A_LINE)
    with drawing((3.1 * columns, 2.6 * lines + 0.5), lines, columns, sharex=True, sharey=True) as (
        figure,
        panels,
    ):
        for axes, row in zip(panels, rows, strict=False):
            if row is not rows[0]:
                _curve(axes, rows[0], GREY)
            _curve(axes, row, BLUE)
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
    with drawing((8, 1.2 + 0.42 * len(rows))) as (figure, (axes,)):
        axes.plot([], [], "o", color=BLUE, label="last pass rate of a seed")
        axes.plot([], [], color=ORANGE, linewidth=2, label="asymptote A, 95 %")
        for y, row in enumerate(rows):
            axes.plot(row.final, [y] * len(row.final), "o", color=BLUE, alpha=0.75)
            if row.fit is not None:
                axes.plot(row.fit.A_interval, [y + 0.22] * 2, color=ORANGE, linewidth=2)
                axes.plot([row.fit.A], [y + 0.22], "|", color=ORANGE, markersize=9)
        axes.axvline(rows[0].final.mean(), color=GREY, linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(rows)), [row.variant for row in rows])
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="held-out pass rate")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside lower center", ncol=2)
        save(figure, path, dpi=140)


def _curve(axes: Axes, row: VariantResult, color: str) -> None:
    for run in row.runs:
        hours = [p.compute_hours for p in run]
        rates = [p.pass_rate for p in run]
        axes.plot(hours, rates, "o", color=color, markersize=3, alpha=0.5, markeredgewidth=0)
    if row.fit is not None:
        line = np.linspace(*row.fit.window, CURVE_POINTS)
        axes.plot(line, row.fit(line), color=color)
