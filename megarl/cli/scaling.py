"""`megarl scaling`: arguments in, tables and pictures out. Everything heavy is imported when a command runs."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cli.commands import Commands, add_command, add_group, at_least
from megarl.core.base.errors import MegarlError

if TYPE_CHECKING:
    from megarl.lab.scaling.compare import Comparison
    from megarl.lab.scaling.fit import Fit
    from megarl.lab.scaling.points import Curve

FORM_NAMES = ("sigmoid", "logistic", "power")


def add(commands: Commands) -> None:
    """The subcommand `scaling` and its own."""
    inner = add_group(commands, "scaling", "what a run will reach, from its evaluations")

    found = add_command(inner, "fit", _fit, "A, B and C_mid of a run, with 95 % intervals")
    _points(found, "a run directory, or a CSV or JSONL of points")
    found.add_argument("--json", action="store_true", help="the fit as one JSON object")

    beyond = add_command(inner, "extrapolate", _extrapolate, "the score at some compute, or the compute of a score")
    _points(beyond, "a run directory, or a CSV or JSONL of points")
    asked = beyond.add_mutually_exclusive_group(required=True)
    asked.add_argument("--to", type=float, metavar="H", help="predict the pass rate at this many hours")
    asked.add_argument("--reach", type=float, metavar="R", help="predict the hours at which this pass rate is reached")
    beyond.add_argument("--json", action="store_true")

    against = add_command(inner, "compare", _compare, "which run has the higher ceiling, which is quicker")
    _points(against, "two or more run directories or files of points; the first is the reference", several=True)
    against.add_argument("--json", action="store_true")
    _picture(against, None, "also draw BASE.png, .svg, .html, and the efficiency plot beside them")

    picture = add_command(inner, "plot", _plot, "points, fits and what they predict, as PNG, SVG and interactive HTML")
    _points(picture, "run directories or files of points", several=True)
    _picture(picture, Path("scaling"), "draw BASE.png, BASE.svg, BASE.html (default: scaling)")

    paper = add_command(inner, "published", _published, "the fits of ScaleRL's paper")
    paper.add_argument("--json", action="store_true")
    paper.add_argument(
        "--synthetic",
        metavar="NAME",
        help="print a CSV of points drawn from this fit instead, with an evaluation's noise",
    )
    paper.add_argument("--hours", type=float, default=16_000, help="compute of the synthetic run")
    paper.add_argument("--evaluations", type=at_least(1), default=32, help="of the synthetic run")
    paper.add_argument("--seeds", type=at_least(1), default=1, help="synthetic runs")


def _picture(command: argparse.ArgumentParser, base: Path | None, about: str) -> None:
    command.add_argument("-o", "--output", type=Path, metavar="BASE", default=base, help=about)
    command.add_argument("--to", type=float, metavar="H", help="draw curves to this many hours")
    command.add_argument(
        "--published", action="append", default=[], metavar="NAME", help="lay it over this published fit"
    )


def _points(command: argparse.ArgumentParser, about: str, several: bool = False) -> None:
    """Where points are and how they are fitted: the same for all commands."""
    command.add_argument("points", nargs="+" if several else None, help=about)
    command.add_argument("--r0", type=float, metavar="X", help="pass rate before training, if the points have none")
    command.add_argument(
        "--from",
        dest="start",
        type=float,
        metavar="H",
        help="leave out points before (default: 1,500 GPU-hours, or a shorter first epoch)",
    )
    command.add_argument("--until", type=float, metavar="H", help="leave out points after")
    command.add_argument("--form", choices=FORM_NAMES, default="sigmoid")
    command.add_argument(
        "--grid", choices=("free", "paper"), default="free", help="A in 0 … 1, or 0.450, 0.455 … 0.800"
    )
    command.add_argument("--seed", type=at_least(0), help="only this seed of the file")
    command.add_argument(
        "--hours-column", metavar="NAME", help="header of the compute (default: gpu_hours or compute_hours)"
    )
    command.add_argument(
        "--score-column",
        metavar="NAME",
        help="header of the score, such as pass_rate/math (default: pass_rate; of a run what evaluation.forecast names)",
    )


def _read(options: argparse.Namespace, source: str) -> list["Curve"]:
    from megarl.lab.scaling.points import Columns, read_points

    curves = read_points(source, Columns(options.hours_column, options.score_column))
    if options.seed is None:
        return curves
    chosen = [curve for curve in curves if curve.seed == options.seed]
    if not chosen:
        raise MegarlError(f"{source}: no seed {options.seed} in it")
    return chosen


def _named(options: argparse.Namespace) -> dict[str, list["Curve"]]:
    """Curves of all sources; two files of one name keep their paths."""
    sources = [Path(source) for source in options.points]
    names = [source.stem if source.is_file() else source.resolve().name for source in sources]
    return {
        name if names.count(name) == 1 else str(source): _read(options, str(source))
        for name, source in zip(names, sources, strict=True)
    }


def _how(options: argparse.Namespace) -> dict[str, Any]:
    return {"r0": options.r0, "start": options.start, "end": options.until, "form": options.form, "grid": options.grid}


def _fit(options: argparse.Namespace) -> int:
    from megarl.lab.scaling import tables
    from megarl.lab.scaling.fit import fit, fit_each

    curves = _read(options, options.points)
    found = fit(curves, **_how(options))
    if options.json:
        print(json.dumps(found.record(), allow_nan=False))
        return 0
    each = fit_each(curves, **_how(options)) if len(curves) > 1 else []
    rows = [(f"seed {curve.seed}", one) for curve, one in zip(curves, each, strict=False)]
    tables.show(tables.fits([("pooled" if each else curves[0].name, found), *rows]))
    tables.show(tables.forms(curves, _how(options)))
    tables.say(found, tables.window(found) + (f"\n{tables.between_seeds(each)}" if each else ""))
    return 0


def _extrapolate(options: argparse.Namespace) -> int:
    from megarl.lab.scaling import tables
    from megarl.lab.scaling.extrapolate import hours_to, later_points
    from megarl.lab.scaling.fit import fit

    if options.to is not None and not options.to > 0:
        raise MegarlError(f"--to is {options.to:g}; it is compute in hours, above 0")
    curves = _read(options, options.points)
    found = fit(curves, **_how(options))
    record: dict[str, Any]
    if options.to is not None:
        record, text = _score_at(found, options.to)
    else:
        reached = hours_to(found, options.reach)
        interval = [_json(hours) for hours in reached.interval]
        record = {"pass_rate": options.reach, "hours": _json(reached.hours), "interval": interval}
        text = tables.reached(found, options.reach, reached)
    later = later_points(found, curves)
    if later is not None:
        record["later"] = asdict(later)
        text += "\n" + tables.later(found, later)
    if options.json:
        print(json.dumps(record | {"unit": found.unit, "warnings": list(found.warnings)}, allow_nan=False))
    else:
        tables.say(found, text)
    return 0


def _score_at(found: "Fit", hours: float) -> tuple[dict[str, Any], str]:
    import numpy as np

    from megarl.lab.scaling.extrapolate import predict
    from megarl.lab.scaling.points import amount

    there = predict(found, np.array([hours]))
    value, low, high = (float(part[0]) for part in (there.pass_rate, there.low, there.high))
    text = (
        f"At {amount(hours, found.unit)} the fit predicts a pass rate of {value:.3f} (95 %: {low:.3f} to {high:.3f})."
    )
    return {"hours": hours, "pass_rate": value, "interval": [low, high]}, text


def _compare(options: argparse.Namespace) -> int:
    from megarl.lab.scaling import tables
    from megarl.lab.scaling.compare import compare

    runs = _named(options)
    if len(runs) < 2:
        raise MegarlError("compare needs two runs or more; for one there is `megarl scaling fit`")
    comparison = compare(runs, **_how(options))
    if options.json:
        print(json.dumps({"runs": comparison.rows(), "verdict": comparison.verdict.splitlines()}, allow_nan=False))
    else:
        tables.show(tables.compared(comparison))
        tables.say_verdict(comparison)
    if options.output:
        _draw(options, runs, comparison, comparison.fits)
    return 0


def _plot(options: argparse.Namespace) -> int:
    from megarl.lab.scaling.compare import compare

    runs = _named(options)
    comparison = compare(runs, **_how(options))
    for entry in comparison.entries:
        if entry.fit is None:
            print(f"{entry.name}: points without a curve: {entry.problem}", file=sys.stderr)
    _draw(options, runs, comparison, {})
    return 0


def _draw(
    options: argparse.Namespace, runs: dict[str, list["Curve"]], comparison: "Comparison", efficiency: dict[str, "Fit"]
) -> None:
    """All pictures; the efficiency plot of the fits that are given for it."""
    from megarl.lab.scaling.plot import plot_efficiency, plot_fits, write_page
    from megarl.lab.scaling.published import law_named

    base: Path = options.output
    base.parent.mkdir(parents=True, exist_ok=True)
    laws = [law_named(name) for name in options.published]
    series = {entry.name: (runs[entry.name], entry.fit) for entry in comparison.entries}
    written = [*plot_fits(series, base, until=options.to, laws=laws)]
    written.append(write_page(series, base, until=options.to, laws=laws))
    if efficiency:
        written += plot_efficiency(efficiency, base.with_name(f"{base.name}-efficiency"))
    print(*written, sep="\n", file=sys.stderr)


def _published(options: argparse.Namespace) -> int:
    import msgspec

    from megarl.lab.scaling import tables
    from megarl.lab.scaling.published import published

    if options.synthetic:
        return _synthetic(options)
    if options.json:
        print(json.dumps([msgspec.to_builtins(law) for law in published()]))
        return 0
    tables.show(tables.laws(published()))
    for law in published():
        if law.mark:
            print(f"* {law.name}: {law.mark}.")
    return 0


def _synthetic(options: argparse.Namespace) -> int:
    import numpy as np

    from megarl.lab.scaling.published import SAMPLES, csv_of, law_named, synthetic

    law = law_named(options.synthetic)
    hours = np.linspace(options.hours / options.evaluations, options.hours, options.evaluations)
    about = (
        f"SYNTHETIC, no run: drawn from the published fit {law.name} with the noise of {SAMPLES:,} samples; "
        f"R_0 = {law.r0:g} is read off its figure 1"
    )
    print(csv_of([synthetic(law, hours, seed) for seed in range(options.seeds)], about), end="")
    return 0


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
