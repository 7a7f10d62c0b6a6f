"""Compares runs: ceilings, speed, and at how much compute which run is ahead.

    {name: curves} ──► a fit each ──► all refitted at one A ──► each against the first ──► table, verdict

Exponents B of two fits are comparable only at one ceiling. ScaleRL compares those of
all arms at one fixed A (section 4; .605) if the arms' A agree within 0.02, the
difference between three seeds of one recipe (arXiv 2510.13786, section 2). That A is
given, or the mean of all runs' A. Two runs that agree with each other, but not with
that mean, are compared at their own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Unpack

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.lab.scaling.extrapolate import inverse as hours_of
from megarl.lab.scaling.fit import WIDE_INTERVAL, Fit, FitOptions, fit
from megarl.lab.scaling.points import Curve, amount, unit_name

SAME_CEILING = 0.02


class RunFit(NamedTuple):
    """One run in the table. fit: None if there is none; `problem` then says why."""

    name: str
    fit: Fit | None
    problem: str = ""


class Pair(NamedTuple):
    """The reference and another run."""

    reference: str
    other: str
    same_ceiling: bool
    overtakes: tuple[tuple[str, float], ...]
    """(name, hours) at which a run takes the lead, in order; the first entry is the run
    that leads at the start.
    """
    text: str


class RunComparison(NamedTuple):
    """A comparison of runs. at_ceiling: the fits at the common A, `ceiling`, where
    exponents B are comparable.
    """

    entries: tuple[RunFit, ...]
    pairs: tuple[Pair, ...]
    ceiling: float
    at_ceiling: Mapping[str, Fit]

    @property
    def comparable(self) -> dict[str, Fit]:
        """Those of `at_ceiling` whose own A is near that ceiling."""
        own = {entry.name: entry.fit.A for entry in self.entries if entry.fit}
        return {
            name: fit
            for name, fit in self.at_ceiling.items()
            if abs(own[name] - self.ceiling) <= SAME_CEILING
        }

    @property
    def verdict(self) -> str:
        """The comparison in plain words, one group of sentences per pair."""
        failed = [
            f"{entry.name} was not fitted: {entry.problem}"
            for entry in self.entries
            if entry.fit is None
        ]
        return "\n".join([*(pair.text for pair in self.pairs), *failed])

    def rows(self) -> list[dict[str, object]]:
        """Return the table as records: a run's name, its fit, and its B, with an
        interval, and C_mid at the common A.
        """
        records = []
        for entry in self.entries:
            row: dict[str, object] = {"name": entry.name}
            row |= {"problem": entry.problem} if entry.fit is None else entry.fit.record()
            if refitted := self.at_ceiling.get(entry.name):
                row |= {
                    "A_common": self.ceiling,
                    "B_at_A_common": refitted.B,
                    "C_mid_at_A_common": refitted.C_mid,
                }
                row["B_at_A_common_interval"] = list(refitted.B_interval)
            records.append(row)
        return records


def compare(runs: Mapping[str, Sequence[Curve]], **options: Unpack[FitOptions]) -> RunComparison:
    """Compare all runs with the first that can be fitted. options: of `fit`; ceiling:
    the common A, by default their mean.
    """
    if len(units := {unit_name(curve.unit) for curves in runs.values() for curve in curves}) > 1:
        raise MegarlError(
            f"runs whose compute is in {' and in '.join(sorted(units))} cannot be compared by it"
        )
    entries = []
    fits = {}
    alone: FitOptions = {**options, "ceiling": None}
    for name, curves in runs.items():
        try:
            fits[name] = fit(curves, **alone)
            entries.append(RunFit(name, fits[name]))
        except MegarlError as error:
            entries.append(RunFit(name, None, str(error).removeprefix(f"{name}: ")))
    if given := options.get("ceiling"):
        for name, found in fits.items():
            if (reached := float(found(found.hours[-1:])[0])) > given + SAME_CEILING:
                advice = "give one that no run has passed"
                raise MegarlError(
                    f"--ceiling is {given:g}, and {name} has reached {reached:.3f}; {advice}"
                )
    ceiling = given or _mean_ceiling(fits.values())
    common: FitOptions = {**options, "ceiling": ceiling}
    at_ceiling = {name: fit(runs[name], **common) for name in fits} if len(fits) > 1 else {}
    pairs = []
    for other, second in list(fits.items())[1:]:
        reference, first = next(iter(fits.items()))
        named = (reference, first, other, second)
        same = abs(first.A - second.A) <= SAME_CEILING
        ahead = overtakes(*named)
        both = {name: at_ceiling[name] for name in (reference, other)}
        if (
            same
            and not given
            and max(abs(one.A - ceiling) for one in (first, second)) > SAME_CEILING
        ):
            at: FitOptions = {**options, "ceiling": _mean_ceiling((first, second))}
            both = {name: fit(runs[name], **at) for name in both}
        said = _exponents(*named, both) if same else _ceiling(*named)
        text = f"{said} {_speed(*named)} {_lead(ahead, first, second)}"
        pairs.append(Pair(reference, other, same, ahead, text))
    return RunComparison(tuple(entries), tuple(pairs), ceiling, at_ceiling)


def _mean_ceiling(fits: Iterable[Fit]) -> float:
    """Return the mean A of the fits; 0 of none."""
    ceilings = [fit.A for fit in fits]
    return float(np.mean(ceilings)) if ceilings else 0.0


def overtakes(name_a: str, a: Fit, name_b: str, b: Fit) -> tuple[tuple[str, float], ...]:
    """Return (name, hours) for each change of lead, up to ten times the compute seen;
    differences below noise do not count.
    """
    hours = np.geomspace(max(a.window[0], b.window[0]), 10 * max(a.window[1], b.window[1]), 2000)
    difference = a(hours) - b(hours)
    clear = np.flatnonzero(np.abs(difference) > max(a.rmse, b.rmse, 1e-3))
    ahead: list[tuple[str, float]] = []
    for n in clear:
        leader = name_a if difference[n] > 0 else name_b
        if not ahead:
            ahead.append((leader, float(hours[n])))
        elif ahead[-1][0] != leader:
            before = np.flatnonzero(np.sign(difference[: n + 1]) != np.sign(difference[n]))
            ahead.append((leader, float(hours[before[-1]])))
    return tuple(ahead)


def efficiency(fit: Fit, hours: np.ndarray, pass_rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return points (log10 C, log10 F) with F(R) = C_mid^B / ((A − R_0)/(R − R_0) − 1),
    which lie on a line of slope B. Scores outside R_0 … A give no point.
    """
    share = (pass_rate - fit.R_0) / max(fit.A - fit.R_0, 1e-300)
    inside = (share > 0) & (share < 1)
    log_f = fit.B * math.log10(fit.C_mid) - np.log10(1 / share[inside] - 1)
    return np.log10(hours[inside]), log_f


def _exponents(name_a: str, a: Fit, name_b: str, b: Fit, at_ceiling: Mapping[str, Fit]) -> str:
    x = at_ceiling[name_a]
    y = at_ceiling[name_b]
    apart = x.B_interval[1] < y.B_interval[0] or y.B_interval[1] < x.B_interval[0]
    says, against = ("B differs", "against") if apart else ("B does not differ measurably", "and")
    wide = [
        (n, f.A_interval)
        for n, f in ((name_a, a), (name_b, b))
        if np.ptp(f.A_interval) > WIDE_INTERVAL
    ]
    unsure = "".join(
        f" But A of {n} may be anywhere in {low:.3f} … {high:.3f}." for n, (low, high) in wide
    )
    same = (
        f"{name_a} and {name_b} have the same ceiling within {SAME_CEILING} (A {a.A:.3f} and"
        f" {b.A:.3f})"
    )
    return (
        f"{same}; with both at {x.A:.3f}, {says}: {x.B:.2f} ({name_a}) {against} {y.B:.2f}"
        f" ({name_b}).{unsure}"
    )


def _ceiling(name_a: str, a: Fit, name_b: str, b: Fit) -> str:
    (low_name, low), (high_name, high) = sorted(
        ((name_a, a), (name_b, b)), key=lambda pair: pair[1].A
    )
    sure = (
        ""
        if low.A_interval[1] < high.A_interval[0]
        else "; their 95 % intervals overlap, so this is not certain"
    )
    return (
        f"{high_name} has the higher ceiling: A {high.A:.3f} against {low.A:.3f} of"
        f" {low_name}{sure}."
    )


def _speed(name_a: str, a: Fit, name_b: str, b: Fit) -> str:
    """Return a sentence on which run needs less compute for half of the gain that both
    can make.
    """
    r0 = max(a.R_0, b.R_0)
    halfway = (r0 + min(a.A, b.A)) / 2
    hours_a = hours_of(a, halfway)
    hours_b = hours_of(b, halfway)
    if halfway <= r0 or abs(hours_a - hours_b) <= 0.03 * max(hours_a, hours_b):
        return "Neither is quicker to half of the gain both can make."
    name, few, many = (
        (name_a, hours_a, hours_b) if hours_a < hours_b else (name_b, hours_b, hours_a)
    )
    half = f"{halfway:.3f}, half of the gain both can make,"
    return f"{name} is quicker: {half} after {amount(few, a.unit)} instead of {amount(many)}."


def _lead(ahead: tuple[tuple[str, float], ...], a: Fit, b: Fit) -> str:
    if not ahead:
        return "Their curves stay within the noise of the fits."
    seen = min(a.window[1], b.window[1])
    said = [f"{ahead[0][0]} is ahead {'at first' if len(ahead) > 1 else 'throughout'}"]
    for name, hours in ahead[1:]:
        beyond = f" (extrapolated: the points end at {amount(seen)})" if hours > seen else ""
        said.append(f"{name} overtakes at {amount(hours, a.unit)}{beyond}")
    return "; ".join(said) + "."
