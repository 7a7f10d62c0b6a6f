"""The commands of `megarl scaling`. Everything that is slow to import is imported when
a command runs.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from megarl.cli import parameters as p
from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError

if TYPE_CHECKING:
    from megarl.predict.scaling.compare import RunComparison
    from megarl.predict.scaling.fit import Fit, FitOptions, Grid
    from megarl.predict.scaling.points import Curve

app = typer.Typer(name="scaling", help="What a run will reach, from its evaluations.")


@app.command()
def fit(
    points: p.Points,
    r0: p.R0 = None,
    start: p.Start = None,
    until: p.Until = None,
    form: p.FormName = "sigmoid",
    grid: p.GridName = "free",
    seed: p.Seed = None,
    hours_column: p.HoursColumn = None,
    score_column: p.ScoreColumn = None,
    as_json: p.Json = False,
) -> int:
    """Fit A, B and C_mid of a run, with 95 % intervals."""
    from megarl.predict.scaling import tables
    from megarl.predict.scaling.fit import fit

    options = _options(r0, start, until, form, grid)
    curves = _read(points, seed, hours_column, score_column)
    fitted = fit(curves, **options)  # all seeds together
    if as_json:
        terminal.say(json.dumps(fitted.record(), allow_nan=False))
        return 0
    text = tables.window(fitted)
    rows = [(curves[0].name, fitted)]
    if len(curves) > 1:
        seed_fits = [fit([curve], **options) for curve in curves]
        rows = [("pooled", fitted)]
        for curve, seed_fit in zip(curves, seed_fits, strict=True):
            rows.append((f"seed {curve.seed}", seed_fit))
        text += f"\n{tables.between_seeds(seed_fits)}"
    tables.show(tables.fits(rows))
    tables.show(tables.forms(curves, options))
    tables.say(fitted, text)
    return 0


@app.command()
def extrapolate(
    points: p.Points,
    r0: p.R0 = None,
    start: p.Start = None,
    until: p.Until = None,
    form: p.FormName = "sigmoid",
    grid: p.GridName = "free",
    seed: p.Seed = None,
    hours_column: p.HoursColumn = None,
    score_column: p.ScoreColumn = None,
    as_json: p.Json = False,
    to: Annotated[
        float | None, Option(metavar="H", help="predict the pass rate at this many hours")
    ] = None,
    reach: Annotated[
        float | None, Option(metavar="R", help="or the hours at which this pass rate is reached")
    ] = None,
) -> int:
    """Predict the score at some compute, or the compute of a score."""
    import numpy as np

    from megarl.predict.scaling import tables
    from megarl.predict.scaling.extrapolate import doubts, errors_of_later_points, hours_to, predict
    from megarl.predict.scaling.fit import fit
    from megarl.predict.scaling.points import amount

    if (to is None) == (reach is None):
        raise MegarlError("give one of --to and --reach")
    _check_hours("--to", to)
    if reach is not None and not 0 <= reach <= 1:
        raise MegarlError(f"--reach is {reach:g}; it is a pass rate, from 0 to 1")
    curves = _read(points, seed, hours_column, score_column)
    fitted = fit(curves, **_options(r0, start, until, form, grid))
    record: dict[str, object]
    warnings = [*doubts(fitted, to), *fitted.warnings]
    if to is not None:
        prediction = predict(fitted, np.array([to]))
        score = float(prediction.pass_rate[0])
        low = float(prediction.low[0])
        high = float(prediction.high[0])
        record = {"hours": to, "pass_rate": score, "interval": [low, high]}
        text = f"At {amount(to, fitted.unit)} the fit predicts a pass rate of {score:.3f}"
        text += f" (95 %: {low:.3f} to {high:.3f})."
    elif reach is not None:
        reached = hours_to(fitted, reach)
        # JSON has no infinity.
        hours = [h if math.isfinite(h) else None for h in (reached.hours, *reached.interval)]
        record = {"pass_rate": reach, "hours": hours[0], "interval": hours[1:]}
        text = tables.reached(fitted, reach, reached)
    later = errors_of_later_points(fitted, curves)
    if later is not None:
        record["later"] = asdict(later)
        text += "\n" + tables.about_later(fitted, later)
    if as_json:
        terminal.say(
            json.dumps(record | {"unit": fitted.unit, "warnings": warnings}, allow_nan=False)
        )
    else:
        tables.say(fitted, text, warnings)
    return 0


@app.command()
def compare(
    points: p.AllPoints,
    published: p.PublishedNames,
    r0: p.R0 = None,
    start: p.Start = None,
    until: p.Until = None,
    form: p.FormName = "sigmoid",
    grid: p.GridName = "free",
    seed: p.Seed = None,
    hours_column: p.HoursColumn = None,
    score_column: p.ScoreColumn = None,
    to: p.DrawTo = None,
    as_json: p.Json = False,
    output: Annotated[Path | None, p.PICTURE] = None,
    ceiling: Annotated[
        float | None,
        Option(
            min=0.01,
            max=1,
            metavar="A",
            help="compare B of all runs at this A; left out: at their mean A",
        ),
    ] = None,
) -> int:
    """Say which run has the higher ceiling, and which is quicker."""
    from megarl.predict.scaling import tables
    from megarl.predict.scaling.compare import compare

    _check_hours("--to", to)
    runs = _named(points, seed, hours_column, score_column)
    if len(runs) < 2:
        raise MegarlError("compare needs two runs or more; for one use `megarl scaling fit`")
    comparison = compare(runs, **_options(r0, start, until, form, grid) | {"ceiling": ceiling})
    if as_json:
        terminal.say(
            json.dumps(
                {"runs": comparison.rows(), "verdict": comparison.verdict.splitlines()},
                allow_nan=False,
            )
        )
    else:
        tables.show(tables.compared(comparison))
        terminal.say(comparison.verdict)
        for entry in comparison.entries:
            for warning in entry.fit.warnings if entry.fit else ():
                terminal.say(f"warning: {entry.name}: {warning}")
    if output:
        fits = {entry.name: entry.fit for entry in comparison.entries if entry.fit}
        # Slopes B compare only at one ceiling: such fits replace a run's own.
        efficiency = fits | comparison.comparable if len(fits) > 1 else {}
        _draw(output, to, published, runs, comparison, efficiency)
    return 0


PARAMETERS = ("A", "B", "C_mid", "R_0")
"""A learning curve's, in the order of `Transfer.intervals`."""


@app.command()
def transfer(
    points: p.SizedPoints,
    size: Annotated[
        float, Option(metavar="N", help="active parameters of the policy that is predicted")
    ],
    to: Annotated[list[float], p.repeated("H", "predict its pass rate at this many hours")],
    r0: Annotated[
        float | None, Option("--r0", help="its pass rate before training; else by a power law too")
    ] = None,
    start: p.Start = None,
    until: p.Until = None,
    hours_column: p.HoursColumn = None,
    score_column: p.ScoreColumn = None,
    as_json: p.Json = False,
) -> int:
    """Predict A, B and C_mid of a larger policy from smaller ones."""
    import numpy as np

    from megarl.predict.scaling import tables
    from megarl.predict.scaling.fit import fit
    from megarl.predict.scaling.transfer import doubts, named_size
    from megarl.predict.scaling.transfer import transfer as transferred

    _check_hours("--to", *to)
    curves: dict[float, list[Curve]] = {}
    for source in points:
        parameters, path = named_size(source)
        curves.setdefault(parameters, []).extend(_read(path, None, hours_column, score_column))
    # Several sources of one size are taken as seeds of one recipe.
    fits = {n: fit(curves[n], start=start, end=until) for n in sorted(curves)}
    prediction = transferred(fits, size, r0)
    scores = prediction.scores(np.array(to))
    unit = next(iter(fits.values())).unit
    warnings = [*doubts(fits, size, r0)]
    if as_json:
        record: dict[str, object] = {}
        intervals = prediction.intervals.T.tolist()
        for key, (middle, low, high) in zip(PARAMETERS, intervals, strict=True):
            record |= {key: middle, f"{key}_interval": [low, high]}
        predicted = []
        for hours, (middle, low, high) in zip(to, scores.T.tolist(), strict=True):
            predicted.append({"hours": hours, "pass_rate": middle, "interval": [low, high]})
        record |= {"scores": predicted, "unit": unit, "warnings": warnings}
        terminal.say(json.dumps(record, allow_nan=False))
        return 0
    tables.show(tables.fits([(f"{n:.3g} parameters", fitted) for n, fitted in fits.items()]))
    terminal.say(tables.transferred(size, prediction, to, scores, unit))
    for warning in warnings:
        terminal.say(f"warning: {warning}")
    return 0


@app.command()
def plot(
    points: p.AllPoints,
    published: p.PublishedNames,
    r0: p.R0 = None,
    start: p.Start = None,
    until: p.Until = None,
    form: p.FormName = "sigmoid",
    grid: p.GridName = "free",
    seed: p.Seed = None,
    hours_column: p.HoursColumn = None,
    score_column: p.ScoreColumn = None,
    to: p.DrawTo = None,
    output: Annotated[Path, p.PICTURE] = Path("scaling"),
) -> int:
    """Draw points, fits and what they predict, as PNG, SVG and interactive HTML."""
    from megarl.predict.scaling.compare import compare

    _check_hours("--to", to)
    runs = _named(points, seed, hours_column, score_column)
    comparison = compare(runs, **_options(r0, start, until, form, grid))
    for entry in comparison.entries:
        if entry.fit is None:
            terminal.say(f"{entry.name}: points without a curve: {entry.problem}", file=sys.stderr)
    _draw(output, to, published, runs, comparison, {})
    return 0


@app.command()
def slices(
    run: p.RunDirectory,
    start: p.Start = None,
    until: p.Until = None,
    hours_column: p.HoursColumn = None,
    as_json: p.Json = False,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="BASE", help="draw BASE.png and .svg")
    ] = None,
) -> int:
    """Fit the parts of a run: by task, difficulty, objective and pass@n."""
    from megarl.predict.scaling import tables
    from megarl.predict.scaling.points import unit_name
    from megarl.predict.scaling.slices import slices

    parts = slices(run, hours_column, start=start, end=until)
    if as_json:
        terminal.say(json.dumps([part.record() for part in parts], allow_nan=False))
    else:
        unit = next((unit_name(part.curve.unit) for part in parts if part.curve), "hours")
        tables.show(tables.sliced(parts, unit))
        tables.say_slices(parts)
    if output:
        from megarl.predict.scaling.plot import plot_slices

        output.parent.mkdir(parents=True, exist_ok=True)
        terminal.say(*plot_slices(parts, output), sep="\n", file=sys.stderr)
    return 0


@app.command("published")
def show_published(
    as_json: p.Json = False,
    synthetic: Annotated[
        str | None, Option(metavar="NAME", help="print a CSV of noisy points of this fit instead")
    ] = None,
    hours: Annotated[float, Option(help="compute of the synthetic run")] = 16_000,
    evaluations: Annotated[int, Option(min=1, help="evaluations of the synthetic run")] = 32,
    seeds: Annotated[int, Option(min=1, help="synthetic runs")] = 1,
) -> int:
    """Show the fits of ScaleRL's paper."""
    import msgspec
    import numpy as np

    from megarl.predict.scaling import tables
    from megarl.predict.scaling.points import amount
    from megarl.predict.scaling.published import SAMPLES, csv_of, law_named, published
    from megarl.predict.scaling.published import synthetic as points_of

    if synthetic:
        _check_hours("--hours", hours)
        law = law_named(synthetic)
        compute = np.linspace(hours / evaluations, hours, evaluations)
        about = (
            f"SYNTHETIC, no run: drawn from the published fit {law.name} with the noise of"
            f" {SAMPLES:,} samples; R_0 = {law.r0:g} is read off its figure 1"
        )
        print(csv_of([points_of(law, compute, seed) for seed in range(seeds)], about), end="")
        return 0
    if as_json:
        terminal.say(json.dumps([msgspec.to_builtins(law) for law in published()]))
        return 0
    tables.show(tables.laws(published()))
    for law in published():
        if law.mark:
            terminal.say(f"* {law.name}: {law.mark}.")
    for law in published():
        if law.fitted and law.hours:
            ends = f"fitted up to {amount(law.fitted, 'gpu')} and run to {amount(law.hours)}"
            terminal.say(f"{law.name}: {ends} (figure {law.figure}).")
    return 0


def _check_hours(option: str, *values: float | None) -> None:
    """Raise MegarlError if a value is not a finite amount of compute above 0."""
    for hours in values:
        if hours is not None and not 0 < hours < math.inf:
            raise MegarlError(f"{option} is {hours:g}; it is compute in hours, finite and above 0")


def _read(
    source: str | Path, seed: int | None, hours_column: str | None, score_column: str | None
) -> list["Curve"]:
    """Read a run's curves; with a seed, only that seed's. Columns: None for the usual
    names. MegarlError if no curve is of that seed.
    """
    from megarl.predict.scaling.points import PointColumns, read_points

    curves = read_points(source, PointColumns(hours_column, score_column))
    if seed is None:
        return curves
    of_seed = [curve for curve in curves if curve.seed == seed]
    if of_seed:
        return of_seed
    raise MegarlError(f"{source}: no seed {seed} in it")


def _named(sources: Sequence[Path], *selection: Any) -> dict[str, list["Curve"]]:
    """Read the curves of all sources by name; sources with the same name go by their
    paths. selection: seed and columns, as in `_read`.
    """
    from megarl.predict.scaling.table_files import name_of

    names = [name_of(source) if source.is_file() else source.resolve().name for source in sources]
    curves = {}
    for name, source in zip(names, sources, strict=True):
        is_unique = names.count(name) == 1
        curves[name if is_unique else str(source)] = _read(source, *selection)
    return curves


def _options(
    r0: float | None, start: float | None, until: float | None, form: str, grid: "Grid"
) -> "FitOptions":
    """Return these options of the command line as those of `fit`."""
    return {"r0": r0, "start": start, "end": until, "form": form, "grid": grid}


def _draw(
    base: Path,
    to: float | None,
    published: Sequence[str],
    runs: dict[str, list["Curve"]],
    comparison: "RunComparison",
    efficiency: "Mapping[str, Fit]",
) -> None:
    """Draw all pictures, and print on stderr where they are. base: their path without
    a suffix; to: hours up to which curves are drawn; published: names of fits to draw
    too; efficiency: the fits in the efficiency plot, which is left out if there are
    none.
    """
    from megarl.predict.scaling.plot import plot_efficiency, plot_fits
    from megarl.predict.scaling.published import law_named

    base.parent.mkdir(parents=True, exist_ok=True)
    laws = [law_named(name) for name in published]
    series = {entry.name: (runs[entry.name], entry.fit) for entry in comparison.entries}
    written = plot_fits(series, base, until=to, laws=laws)
    if efficiency:
        written += plot_efficiency(efficiency, base.with_name(f"{base.name}-efficiency"))
    terminal.say(*written, sep="\n", file=sys.stderr)
