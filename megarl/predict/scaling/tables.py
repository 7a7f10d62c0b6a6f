"""Shows fits in the terminal: tables, and sentences with the warnings."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.predict.scaling.compare import RunComparison
from megarl.predict.scaling.extrapolate import BEFORE, LaterErrors, Reached
from megarl.predict.scaling.fit import Fit, FitOptions, fit
from megarl.predict.scaling.forms import FORMS, Array
from megarl.predict.scaling.points import Curve, amount, unit_name
from megarl.predict.scaling.published import Law
from megarl.predict.scaling.transfer import Transferred

if TYPE_CHECKING:
    from megarl.predict.scaling.slices import Slice  # imports more than a fit needs


SAME_SCORE = 5e-4  # scores are printed with three digits


def show(table: Table) -> None:
    """Print a table, and an empty line."""
    console = terminal.console()
    console.print(table)
    console.print()


def say(fitted: Fit, text: str, warnings: Sequence[str] | None = None) -> None:
    """Print a text, then warnings, by default those of the fit."""
    terminal.say(text)
    if fitted.unit == "core":
        terminal.say(
            "Compute is core-hours of CPUs, not GPU-hours: it compares only with runs on CPUs."
        )
    for warning in fitted.warnings if warnings is None else warnings:
        terminal.say(f"warning: {warning}")


def window(fitted: Fit) -> str:
    """Return a text on R_0 and on the points that were used."""
    start = amount(fitted.window[0])
    end = amount(fitted.window[1], fitted.unit)
    return f"R_0 = {fitted.R_0:.3f} ({_origin(fitted)}). Fitted from {start} to {end}."


def _origin(fitted: Fit) -> str:
    """Return where R_0 comes from. A measured score before training is only evidence of
    it (fit.py), unless the form or the grid takes it as it is.
    """
    if fitted.score_before is None:
        return "estimated from the points"
    if abs(fitted.R_0 - fitted.score_before) >= SAME_SCORE:
        return f"fitted; the score before training is {fitted.score_before:.3f}"
    return "given" if fitted.r0_from == "given" else "as measured before training"


def between_seeds(seeds: Sequence[Fit]) -> str:
    """Return a text on how seeds differ. seeds: the fit of each alone."""
    ceilings = [fitted.A for fitted in seeds]
    return (
        f"A of the {len(seeds)} seeds alone: {min(ceilings):.3f} to {max(ceilings):.3f} (ScaleRL's"
        " three: ±0.015). The interval of each includes the variation between seeds."
    )


def fits(rows: Sequence[tuple[str, Fit]]) -> Table:
    """Make a table with one fit per row, each parameter above its 95 % interval."""
    table = _table("", "A", "B", f"C_mid, {unit_name(rows[0][1].unit)}", "R²", "rmse", "points")
    for name, fitted in rows:
        quality = (f"{fitted.r2:.4f}", f"{fitted.rmse:.4f}", str(fitted.n))
        table.add_row(name, *_parameters(fitted), *quality)
    return table


def forms(curves: Sequence[Curve], options: FitOptions) -> Table:
    """Fit the same points with each form, and make a table that shows which curve they
    follow. A form that cannot be fitted has dashes.
    """
    table = _table("form", "A", "R²", "rmse")
    for form in FORMS:
        with_form: FitOptions = {**options, "form": form}
        try:
            fitted = fit(curves, **with_form)
        except MegarlError:
            table.add_row(form, "–", "–", "–")
            continue
        table.add_row(form, f"{fitted.A:.3f}", f"{fitted.r2:.4f}", f"{fitted.rmse:.4f}")
    return table


def compared(comparison: RunComparison) -> Table:
    """Make a table with one run per row, and B at the common A where there is one."""
    fitted = [entry.fit for entry in comparison.entries if entry.fit]
    unit = f", {unit_name(fitted[0].unit)}" if fitted else ""
    headings = ["A", "B", f"C_mid{unit}"]
    if comparison.at_ceiling:
        headings.append(f"B at A = {comparison.ceiling:.3f}")
    table = _table("", *headings)
    for entry in comparison.entries:
        cells: list[str | Text] = [*_parameters(entry.fit)] if entry.fit else ["no fit"]
        common = comparison.comparable.get(entry.name)
        if common:
            cells.append(_parameters(common)[1])
        table.add_row(entry.name, *cells)
    return table


def laws(rows: Sequence[Law]) -> Table:
    """Make a table of published fits, with an empty line between groups."""
    table = _table("name", "C_mid, GPU-hours", "B", "A")
    table.add_column("what")
    for n, law in enumerate(rows):
        if n and law.group != rows[n - 1].group:
            table.add_row()
        middle = "" if law.C_mid is None else amount(law.C_mid)
        name = f"{law.name}*" if law.mark else law.name
        table.add_row(name, middle, f"{law.B:.2f}", f"{law.A:.3f}", law.about)
    return table


def reached(fitted: Fit, score: float, when: Reached) -> str:
    """Return a sentence on when a score is reached, or why it is not. when: from
    `hours_to`.
    """
    if math.isinf(when.hours):
        return _not_reached(fitted, score, when)
    if when.hours == 0 and score <= fitted.R_0:
        return f"{score:g} is not above R_0 = {fitted.R_0:.3f}: it takes no training."
    if when.hours == 0:
        return (
            f"{score:g} is reached before {amount(fitted.hours[0] / BEFORE, fitted.unit)}, long"
            " before the first point."
        )
    low, high = when.interval
    until = "to never, because A may be below it"
    if math.isfinite(high):
        until = f"to {amount(high)}"
    return (
        f"{score:g} is reached after {amount(when.hours, fitted.unit)} (95 %: {amount(low)}"
        f" {until})."
    )


def _not_reached(fitted: Fit, score: float, when: Reached) -> str:
    """Return a sentence on why the best fit never reaches a score, and whether it could
    with A at the upper end of its interval.
    """
    high = fitted.A_interval[1]
    if score < fitted.A:
        text = (
            f"{score:g} is likely never reached: the best fit's A = {fitted.A:.3f} is above it,"
            " but most curves that the points allow end below"
        )
    else:
        text = f"{score:g} is never reached: the asymptote A = {fitted.A:.3f} is below it"
    if math.isfinite(when.interval[0]):
        earliest = amount(when.interval[0], fitted.unit)
        return (
            f"{text}; with A at the upper end of its interval ({high:.3f}) it could be after"
            f" {earliest}."
        )
    if score > high:
        return f"{text}, and so is its whole interval, up to {high:.3f}."
    return f"{text}."


def transferred(
    size: float, prediction: Transferred, hours: Sequence[float], scores: Array, unit: str
) -> str:
    """Return a text on the law predicted for a model size and its scores. scores: [3,
    hours] median, low and high end.
    """
    lines = [f"{size:.3g} parameters, by a power law in them (95 %):"]
    names = ("A", "B", f"C_mid, {unit_name(unit)}", "R_0")
    for name, interval in zip(names, prediction.intervals.T, strict=True):
        if name.startswith("C_mid"):
            middle, low, high = (amount(value) for value in interval)
        else:
            middle, low, high = (f"{value:.3g}" for value in interval)
        lines.append(f"  {name:<18} {middle} ({low} to {high})")
    for at, (middle, low, high) in zip(hours, scores.T, strict=True):
        lines.append(
            f"At {amount(at, unit)} a pass rate of {middle:.3f} ({low:.3f} to {high:.3f})."
        )
    return "\n".join(lines)


def about_later(fitted: Fit, errors: LaterErrors) -> str:
    """Return a text on how well the fit predicted later points."""
    return (
        f"{errors.n} points are later, up to {amount(errors.until, fitted.unit)}: measured -"
        f" predicted is {errors.mean_error:+.4f} on average, {errors.largest_error:+.4f} at most;"
        f" {errors.inside} of {errors.n} lie in the interval widened by the noise of an evaluation."
    )


def _parameters(fitted: Fit, in_unit: Callable[[float], float] = float) -> tuple[Text, Text, Text]:
    """Return texts of A, B and C_mid, each with its interval. in_unit: converts A,
    which the law has from 0 to 1, to the unit in which it is shown.
    """
    low, high = fitted.A_interval
    return (
        _above_interval("{:.3f}".format, in_unit(fitted.A), (in_unit(low), in_unit(high))),
        _above_interval("{:.3g}".format, fitted.B, fitted.B_interval),
        _above_interval(amount, fitted.C_mid, fitted.C_mid_interval),
    )


def _above_interval(
    formatted: Callable[[float], str], value: float, interval: tuple[float, float]
) -> Text:
    """Return two lines, a value and its interval, as `formatted` writes numbers."""
    low, high = map(formatted, interval)
    return Text.assemble(f"{formatted(value)}\n", (f"{low} … {high}", "dim"))


def _table(first: str, *headings: str) -> Table:
    """Make a table without rows: a column of names, then columns of numbers."""
    columns = [Column(heading, justify="right", no_wrap=True) for heading in headings]
    return Table(
        Column(first, style="bold", overflow="fold"),
        *columns,
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )


def sliced(parts: Sequence["Slice"], unit: str) -> Table:
    """Make a table of slices. For a slice without a law it says why there is none."""
    table = _table("slice", "prompts", "before\nlast", "A", "B", f"C_mid, {unit}")
    ceiling = table.columns[3]  # has the reason instead, which needs several lines
    ceiling.no_wrap = False
    ceiling.min_width = 13
    ceiling.max_width = 24
    for part in parts:
        name = part.task if part.kind == "task" else f"  {part.name}"
        ends = "\n".join(f"{end:.3f}" for end in part.ends)
        law: tuple[str | Text, ...] = (f"no law: {part.problem}", "", "")
        if part.fit:
            law = _parameters(part.fit, part.in_own_unit)
        table.add_row(name, str(part.values.shape[1] or "–"), ends or "–", *law)
    return table


def say_slices(parts: Sequence["Slice"]) -> None:
    """Print each warning once, with the slices to whose laws it applies."""
    names: dict[str, list[str]] = {}
    for part in parts:
        if not part.fit:
            continue
        shares = "" if part.unit == (0, 1) else " (in shares of its range)"
        for warning in part.fit.warnings:
            names.setdefault(warning, []).append(f"{part.task}, {part.name}{shares}")
    for warning, affected in names.items():
        terminal.say(f"warning: {'; '.join(affected)}: {warning}")
