"""Compares runs: ceilings, speed, and at how much compute which run is ahead.

    {name: curves} ──► a fit each ──► all refitted at one A
                                  ──► each against the first ──► table, verdict

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
from megarl.predict.scaling.extrapolate import inverse as hours_of
from megarl.predict.scaling.fit import WIDE_INTERVAL, Fit, FitOptions, fit
from megarl.predict.scaling.points import Curve, amount, unit_name

SAME_CEILING = 0.02
SAME_HOURS = 0.03  # of the larger amount

Runs = Mapping[str, Sequence[Curve]]
Overtakes = tuple[tuple[str, float], ...]
"""(name, hours) at which a run takes the lead, in order; the first entry is the run
that leads at the start.
"""


class RunFit(NamedTuple):
    """One run in the table. fit: None if there is none; `problem` then says why."""

    name: str
    fit: Fit | None
    problem: str = ""


class NamedFit(NamedTuple):
    """A run that was fitted."""

    name: str
    fit: Fit


class RunComparison(NamedTuple):
    """A comparison of runs. against_first: what is said of the first fitted run and
    each other one; at_ceiling: the fits at the common A, `ceiling`, where exponents B
    are comparable.
    """

    entries: tuple[RunFit, ...]
    against_first: tuple[str, ...]
    ceiling: float
    at_ceiling: Mapping[str, Fit]

    @property
    def comparable(self) -> dict[str, Fit]:
        """Those of `at_ceiling` whose own A is near that ceiling."""
        own_ceilings = {entry.name: entry.fit.A for entry in self.entries if entry.fit}
        return {
            name: fit
            for name, fit in self.at_ceiling.items()
            if abs(own_ceilings[name] - self.ceiling) <= SAME_CEILING
        }

    @property
    def verdict(self) -> str:
        """The comparison in plain words, one group of sentences per pair."""
        sentences = list(self.against_first)
        for entry in self.entries:
            if entry.fit is None:
                sentences.append(f"{entry.name} was not fitted: {entry.problem}")
        return "\n".join(sentences)

    def rows(self) -> list[dict[str, object]]:
        """Return the table as records: a run's name, its fit, and its B, with an
        interval, and C_mid at the common A.
        """
        records = []
        for entry in self.entries:
            row: dict[str, object] = {"name": entry.name}
            if entry.fit is None:
                row["problem"] = entry.problem
            else:
                row |= entry.fit.record()
            if refitted := self.at_ceiling.get(entry.name):
                row["A_common"] = self.ceiling
                row["B_at_A_common"] = refitted.B
                row["C_mid_at_A_common"] = refitted.C_mid
                row["B_at_A_common_interval"] = list(refitted.B_interval)
            records.append(row)
        return records


def compare(runs: Runs, **options: Unpack[FitOptions]) -> RunComparison:
    """Compare each run with the first that can be fitted. options: of `fit`, but each
    run is fitted with an A of its own, and `ceiling` is the common A, by default the
    mean of all. MegarlError if runs have different units of compute, or if one has
    passed that ceiling.
    """
    units = {unit_name(curve.unit) for curves in runs.values() for curve in curves}
    if len(units) > 1:
        raise MegarlError(
            f"runs whose compute is in {' and in '.join(sorted(units))} cannot be compared by it"
        )
    entries = _fit_each(runs, options)
    fitted = [NamedFit(entry.name, entry.fit) for entry in entries if entry.fit]
    fixed_ceiling = options.get("ceiling")
    if fixed_ceiling:
        _refuse_passed_ceiling(fixed_ceiling, fitted)
    ceiling = fixed_ceiling or _mean_ceiling(run.fit for run in fitted)
    at_ceiling: dict[str, Fit] = {}
    if len(fitted) > 1:
        at_ceiling = _refitted(runs, fitted, options, ceiling)
    texts = []
    for challenger in fitted[1:]:
        reference = fitted[0]
        if abs(reference.fit.A - challenger.fit.A) <= SAME_CEILING:
            both = [reference, challenger]
            both_at_ceiling = at_ceiling
            distances = [abs(run.fit.A - ceiling) for run in both]
            if not fixed_ceiling and max(distances) > SAME_CEILING:
                # The two agree with each other, but not with the mean of all runs.
                their_ceiling = _mean_ceiling(run.fit for run in both)
                both_at_ceiling = _refitted(runs, both, options, their_ceiling)
            text = _exponents(reference, challenger, both_at_ceiling)
        else:
            text = _ceiling(reference, challenger)
        speed = _speed(reference, challenger)
        lead = _lead(overtakes(*reference, *challenger), reference, challenger)
        texts.append(f"{text} {speed} {lead}")
    return RunComparison(tuple(entries), tuple(texts), ceiling, at_ceiling)


def _fit_each(runs: Runs, options: FitOptions) -> list[RunFit]:
    """Fit each run with a ceiling of its own; return also runs that cannot be fitted,
    with the problem.
    """
    free: FitOptions = {**options, "ceiling": None}
    entries = []
    for name, curves in runs.items():
        try:
            entries.append(RunFit(name, fit(curves, **free)))
        except MegarlError as error:
            entries.append(RunFit(name, None, str(error).removeprefix(f"{name}: ")))
    return entries


def _refitted(
    runs: Runs, fitted: Sequence[NamedFit], options: FitOptions, ceiling: float
) -> dict[str, Fit]:
    """Fit these runs with this A."""
    common: FitOptions = {**options, "ceiling": ceiling}
    return {run.name: fit(runs[run.name], **common) for run in fitted}


def _refuse_passed_ceiling(ceiling: float, fitted: Sequence[NamedFit]) -> None:
    """Raise MegarlError if a run's own curve ends clearly above this A."""
    for name, run_fit in fitted:
        last_score = float(run_fit(run_fit.hours[-1:])[0])
        if last_score > ceiling + SAME_CEILING:
            raise MegarlError(
                f"--ceiling is {ceiling:g}, and {name} has reached {last_score:.3f}; give one that"
                " no run has passed"
            )


def _mean_ceiling(fits: Iterable[Fit]) -> float:
    """Return the mean A of the fits; 0 of none."""
    ceilings = [fit.A for fit in fits]
    return float(np.mean(ceilings)) if ceilings else 0.0


def overtakes(name_a: str, a: Fit, name_b: str, b: Fit) -> Overtakes:
    """Return (name, hours) for each change of lead, up to ten times the compute seen.
    A lead counts if it comes to exceed the noise, and then from where the curves cross.
    """
    starts, ends = zip(a.window, b.window, strict=True)
    hours = np.geomspace(max(starts), 10 * max(ends), 2000)
    difference = a(hours) - b(hours)
    noise = max(a.rmse, b.rmse, 1e-3)
    points_above_noise = np.flatnonzero(np.abs(difference) > noise)
    changes: list[tuple[str, float]] = []
    for n in points_above_noise:
        leader = name_a if difference[n] > 0 else name_b
        if not changes:
            changes.append((leader, float(hours[n])))
        elif changes[-1][0] != leader:
            signs = np.sign(difference[: n + 1])
            opposite = np.flatnonzero(signs != signs[n])
            last_opposite = opposite[-1]
            changes.append((leader, float(hours[last_opposite])))
    return tuple(changes)


def efficiency(fit: Fit, hours: np.ndarray, pass_rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return points (log10 C, log10 F) with F(R) = C_mid^B / ((A − R_0)/(R − R_0) − 1),
    which lie on a line of slope B. Scores outside R_0 … A give no point.
    """
    gain = max(fit.A - fit.R_0, 1e-300)  # of a constant fit not 0
    share = (pass_rate - fit.R_0) / gain
    inside = (share > 0) & (share < 1)
    log_odds_against = np.log10(1 / share[inside] - 1)
    log_f = fit.B * math.log10(fit.C_mid) - log_odds_against
    return np.log10(hours[inside]), log_f


def _exponents(a: NamedFit, b: NamedFit, at_ceiling: Mapping[str, Fit]) -> str:
    """Return sentences on the exponents of two runs of one ceiling. at_ceiling: their
    fits at that ceiling, by name.
    """
    fit_a = at_ceiling[a.name]
    fit_b = at_ceiling[b.name]
    differs = "B does not differ measurably"
    conjunction = "and"
    low_a, high_a = fit_a.B_interval
    low_b, high_b = fit_b.B_interval
    if high_a < low_b or high_b < low_a:
        differs = "B differs"
        conjunction = "against"
    uncertain = ""
    for run in (a, b):
        low, high = run.fit.A_interval
        if high - low > WIDE_INTERVAL:
            uncertain += f" But A of {run.name} may be anywhere in {low:.3f} … {high:.3f}."
    return (
        f"{a.name} and {b.name} have the same ceiling within {SAME_CEILING} (A {a.fit.A:.3f} and"
        f" {b.fit.A:.3f}); with both at {fit_a.A:.3f}, {differs}: {fit_a.B:.2f} ({a.name})"
        f" {conjunction} {fit_b.B:.2f} ({b.name}).{uncertain}"
    )


def _ceiling(a: NamedFit, b: NamedFit) -> str:
    """Return a sentence on which run has the higher ceiling."""
    lower, higher = sorted((a, b), key=lambda run: run.fit.A)
    uncertain = ""
    highest_of_lower = lower.fit.A_interval[1]
    lowest_of_higher = higher.fit.A_interval[0]
    if highest_of_lower >= lowest_of_higher:
        uncertain = "; their 95 % intervals overlap, so this is not certain"
    return (
        f"{higher.name} has the higher ceiling: A {higher.fit.A:.3f} against {lower.fit.A:.3f} of"
        f" {lower.name}{uncertain}."
    )


def _speed(a: NamedFit, b: NamedFit) -> str:
    """Return a sentence on which run needs less compute for half of the gain that both
    can make. Differences of up to SAME_HOURS are none.
    """
    r0 = max(a.fit.R_0, b.fit.R_0)
    ceiling = min(a.fit.A, b.fit.A)
    halfway = (r0 + ceiling) / 2
    hours_a = hours_of(a.fit, halfway)
    hours_b = hours_of(b.fit, halfway)
    fewer = min(hours_a, hours_b)
    more_hours = max(hours_a, hours_b)
    if halfway <= r0 or more_hours - fewer <= SAME_HOURS * more_hours:
        return "Neither is quicker to half of the gain both can make."
    quicker = a.name if hours_a < hours_b else b.name
    return (
        f"{quicker} is quicker: {halfway:.3f}, half of the gain both can make, after"
        f" {amount(fewer, a.fit.unit)} instead of {amount(more_hours)}."
    )


def _lead(changes: Overtakes, a: NamedFit, b: NamedFit) -> str:
    """Return a sentence on which run is ahead, and from how much compute on. changes:
    from `overtakes`.
    """
    if not changes:
        return "Their curves stay within the noise of the fits."
    measured_until = min(a.fit.window[1], b.fit.window[1])
    (first_name, _), *later = changes
    period = "at first" if later else "throughout"
    clauses = [f"{first_name} is ahead {period}"]
    for name, hours in later:
        clause = f"{name} overtakes at {amount(hours, a.fit.unit)}"
        if hours > measured_until:
            clause += f" (extrapolated: the points end at {amount(measured_until)})"
        clauses.append(clause)
    return "; ".join(clauses) + "."
