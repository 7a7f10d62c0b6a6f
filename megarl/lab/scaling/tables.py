"""Shows fits in the terminal: tables, and sentences with the warnings."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Column, Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.lab.scaling.compare import RunComparison
from megarl.lab.scaling.extrapolate import BEFORE, Later, Reached
from megarl.lab.scaling.fit import Fit, FitOptions, fit
from megarl.lab.scaling.forms import FORMS, Array
from megarl.lab.scaling.points import Curve, amount, unit_name
from megarl.lab.scaling.published import Law
from megarl.lab.scaling.transfer import Transferred

if TYPE_CHECKING:
    from megarl.lab.scaling.slices import Slice  # imports more than a fit needs


SAME_SCORE = 5e-4  # scores are printed with three digits


def show(table: Table) -> None:
    console = terminal.console()
    console.print(table)
    console.print()


def say(found: Fit, text: str, warnings: Sequence[str] | None = None) -> None:
    """Print a text, then warnings, by default those of the fit."""
    terminal.say(text)
    if found.unit == "core":
        terminal.say(
            "Compute is core-hours of CPUs, not GPU-hours: it compares only with runs on CPUs."
        )
    for warning in found.warnings if warnings is None else warnings:
        terminal.say(f"warning: {warning}")


def window(found: Fit) -> str:
    begin = amount(found.window[0])
    end = amount(found.window[1], found.unit)
    return f"R_0 = {found.R_0:.3f} ({_origin(found)}). Fitted from {begin} to {end}."


def _origin(found: Fit) -> str:
    """Return where R_0 comes from. A measured score before training is only evidence of
    it (fit.py), unless the form or the grid takes it as it is.
    """
    if found.score_before is None:
        return "estimated from the points"
    if abs(found.R_0 - found.score_before) < SAME_SCORE:
        return "given" if found.r0_from == "given" else "as measured before training"
    return f"fitted; the score before training is {found.score_before:.3f}"


def between_seeds(each: Sequence[Fit]) -> str:
    """Return a text on how seeds differ."""
    ceilings = [found.A for found in each]
    return (
        f"A of the {len(each)} seeds alone: {min(ceilings):.3f} to {max(ceilings):.3f} (ScaleRL's"
        " three: ±0.015). The interval of each includes the variation between seeds."
    )


def fits(rows: Sequence[tuple[str, Fit]]) -> Table:
    """Make a table with one fit per row, each parameter above its 95 % interval."""
    table = _table("", "A", "B", f"C_mid, {unit_name(rows[0][1].unit)}", "R²", "rmse", "points")
    for name, found in rows:
        table.add_row(
            name, *_parameters(found), f"{found.r2:.4f}", f"{found.rmse:.4f}", str(found.n)
        )
    return table


def forms(curves: Sequence[Curve], how: FitOptions) -> Table:
    """Fit the same points with each form, to show which curve they follow."""
    table = _table("form", "A", "R²", "rmse")
    for form in FORMS:
        options: FitOptions = {**how, "form": form}
        try:
            found = fit(curves, **options)
            table.add_row(form, f"{found.A:.3f}", f"{found.r2:.4f}", f"{found.rmse:.4f}")
        except MegarlError:
            table.add_row(form, "–", "–", "–")
    return table


def compared(comparison: RunComparison) -> Table:
    unit = next((f", {unit_name(entry.fit.unit)}" for entry in comparison.entries if entry.fit), "")
    common_a = [f"B at A = {comparison.ceiling:.3f}"] if comparison.at_ceiling else []
    table = _table("", "A", "B", f"C_mid{unit}", *common_a)
    for entry in comparison.entries:
        common = comparison.comparable.get(entry.name)
        at_common = [_parameters(common)[1]] if common else []
        table.add_row(
            entry.name, *(_parameters(entry.fit) if entry.fit else ["no fit"]), *at_common
        )
    return table


def laws(rows: Sequence[Law]) -> Table:
    table = _table("name", "C_mid, GPU-hours", "B", "A")
    table.add_column("what")
    for n, law in enumerate(rows):
        if n and law.group != rows[n - 1].group:
            table.add_row()
        middle = "" if law.C_mid is None else amount(law.C_mid)
        table.add_row(
            law.name + "*" * bool(law.mark), middle, f"{law.B:.2f}", f"{law.A:.3f}", law.about
        )
    return table


def reached(found: Fit, score: float, when: Reached) -> str:
    """Return a sentence on when a score is reached, or why it is not."""
    if math.isfinite(when.hours):
        if when.hours == 0:
            if score <= found.R_0:
                return f"{score:g} is not above R_0 = {found.R_0:.3f}: it takes no training."
            return (
                f"{score:g} is reached before {amount(found.hours[0] / BEFORE, found.unit)}, long"
                " before the first point."
            )
        low, high = when.interval
        until = (
            f"to {amount(high)}" if math.isfinite(high) else "to never, because A may be below it"
        )
        return (
            f"{score:g} is reached after {amount(when.hours, found.unit)} (95 %: {amount(low)}"
            f" {until})."
        )
    high = found.A_interval[1]
    if score < found.A:
        most = "but most curves that the points allow end below"
        text = (
            f"{score:g} is likely never reached: the best fit's A = {found.A:.3f} is above it,"
            f" {most}"
        )
    else:
        text = f"{score:g} is never reached: the asymptote A = {found.A:.3f} is below it"
    if math.isinf(when.interval[0]):
        return (
            f"{text}, and so is its whole interval, up to {high:.3f}."
            if score > high
            else f"{text}."
        )
    earliest = amount(when.interval[0], found.unit)
    return (
        f"{text}; with A at the upper end of its interval ({high:.3f}) it could be after"
        f" {earliest}."
    )


def transferred(
    size: float, found: Transferred, hours: Sequence[float], scores: Array, unit: str
) -> str:
    """Return a text on the law predicted for a model size and its scores. scores: [3,
    hours] median, low and high end.
    """
    said = [f"{size:.3g} parameters, by a power law in them (95 %):"]
    names = ("A", "B", f"C_mid, {unit_name(unit)}", "R_0")
    for name, (middle, low, high) in zip(names, found.intervals.T, strict=True):
        say = amount if name.startswith("C_mid") else "{:.3g}".format
        said.append(f"  {name:<18} {say(middle)} ({say(low)} to {say(high)})")
    for at, (middle, low, high) in zip(hours, scores.T, strict=True):
        said.append(f"At {amount(at, unit)} a pass rate of {middle:.3f} ({low:.3f} to {high:.3f}).")
    return "\n".join(said)


def later(found: Fit, after: Later) -> str:
    return (
        f"{after.n} points are later, up to {amount(after.until, found.unit)}: measured - predicted"
        f" is {after.mean_error:+.4f} on average, {after.largest_error:+.4f} at most;"
        f" {after.inside} of {after.n} lie in the interval widened by the noise of an evaluation."
    )


def _parameters(found: Fit, score: Callable[[float], float] = float) -> tuple[Text, Text, Text]:
    """Return texts of A, B and C_mid, each with its interval. score: converts A to its
    own unit.
    """

    def over(text: Callable[[float], str], value: float, ends: tuple[float, float]) -> Text:
        low, high = map(text, ends)
        return Text.assemble(f"{text(value)}\n", (f"{low} … {high}", "dim"))

    return (
        over(
            "{:.3f}".format,
            score(found.A),
            (score(found.A_interval[0]), score(found.A_interval[1])),
        ),
        over("{:.3g}".format, found.B, found.B_interval),
        over(amount, found.C_mid, found.C_mid_interval),
    )


def _table(first: str, *headings: str) -> Table:
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
    table.columns[3].no_wrap, table.columns[3].min_width, table.columns[3].max_width = False, 13, 24
    for part in parts:
        name = part.task if part.kind == "task" else f"  {part.name}"
        ends = "\n".join(f"{end:.3f}" for end in part.ends)
        law = _parameters(part.fit, part.shown) if part.fit else (f"no law: {part.problem}", "", "")
        table.add_row(name, str(part.values.shape[1] or "–"), ends or "–", *law)
    return table


def say_slices(parts: Sequence["Slice"]) -> None:
    """Print each warning once, with the slices to whose laws it applies."""
    names: dict[str, list[str]] = {}
    for part in parts:
        for warning in part.fit.warnings if part.fit else ():
            shares = "" if part.unit == (0, 1) else " (in shares of its range)"
            names.setdefault(warning, []).append(f"{part.task}, {part.name}{shares}")
    for warning, those in names.items():
        terminal.say(f"warning: {'; '.join(those)}: {warning}")
