"""How often `megarl study search` keeps the best arm, against what it says, and against halving by the last score.

`python -m benchmarks.search [--searches N] [--seed N] [--spread S] [--out FILE]`: four arms with a law each, whose curves
have what real ones have: noise of the answers, a misfit of the law, and the luck of a seed. All three are drawn here, by other
code than the posterior's; their sizes are what its prior names.

`--recorded FOLDER`: the runs of a study instead (`megarl study`), which all went on to the end: searches among four of its
variants with all their seeds, halved where a half and three quarters of their scores are there. The truth is the last score.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.lab.scaling.points import Curve, read_points
from megarl.lab.study.search import judge

END, RUNGS, SCORED = 60, (15, 30), (2, 4, 6, 9, 13, 15, 19, 27, 30)
ANSWERS, R0 = 2048, 0.4
SAME = 0.01  # an arm this close to the best A is as good
MISFIT, SEED = 0.01, 0.04  # deviations, shares of the gain (megarl/lab/scaling/fit.py, PRIOR)


class ArmLaw(NamedTuple):
    """An arm: its pass rate without any noise is R0 + (A - R0) / (1 + (mid / C)^B)."""

    a: float
    b: float
    mid: float


class Halved(NamedTuple):
    """The arm that a way of halving ends with. good: it has the best A, or one as good; lost: how much A it lacks; behind: by
    how much its pass rate at END is below the best arm's there.
    """

    good: bool
    lost: float
    behind: float


class Searched(NamedTuple):
    """A search, by the posterior and by the last scores. stated: the probability that the best arm was kept at all rungs."""

    stated: float
    posterior: Halved
    score: Halved


def drawn_law(rng: np.random.Generator, centre: float, spread: float) -> ArmLaw:
    a = float(np.clip(rng.normal(centre, spread), R0 + 0.05, 0.99))
    return ArmLaw(a, float(np.exp(rng.normal(np.log(1.2), 0.3))), END * float(np.exp(rng.normal(np.log(0.35), 0.5))))


def drawn_curve(rng: np.random.Generator, law: ArmLaw) -> Curve:
    """One run of the arm, scored at SCORED."""
    steps = np.array(SCORED, float)
    gain = (law.a - R0) / (1 + (law.mid / steps) ** law.b)
    apart = np.abs(np.subtract.outer(np.log(steps), np.log(steps)))
    strays = rng.multivariate_normal(np.zeros(len(steps)), (MISFIT * (law.a - R0)) ** 2 * np.exp(-apart / 1.5))
    rates = np.clip(R0 + gain * (1 + rng.normal(0, SEED)) + strays, 0, 1)
    scores, before = rng.binomial(ANSWERS, rates) / ANSWERS, rng.binomial(ANSWERS, R0) / ANSWERS
    return Curve("", steps, scores, before, "core", answers=ANSWERS)


def until(curve: Curve, step: int) -> Curve:
    kept = curve.hours <= step
    return Curve(curve.name, curve.hours[kept], curve.pass_rate[kept], curve.r0, curve.unit, answers=curve.answers)


def searched(laws: Sequence[ArmLaw], curves: Sequence[Curve]) -> Searched:
    """Halve by the posterior, and once more by the last scores."""
    alive, by_score, stated = [str(n) for n in range(len(laws))], list(range(len(laws))), 1.0
    for rung in RUNGS:
        judged = judge({arm: [until(curves[int(arm)], rung)] for arm in alive})
        alive = [one.arm for one in judged.standings[: (len(alive) + 1) // 2]]
        stated *= judged.chance(alive)
        last = {n: until(curves[n], rung).pass_rate[-1] for n in by_score}
        by_score = sorted(last, key=lambda n: -last[n])[: (len(by_score) + 1) // 2]
    return Searched(stated, _found(laws, int(alive[0])), _found(laws, by_score[0]))


def _found(laws: Sequence[ArmLaw], chosen: int) -> Halved:
    at_end = [R0 + (law.a - R0) / (1 + (law.mid / END) ** law.b) for law in laws]
    lost = max(law.a for law in laws) - laws[chosen].a
    return Halved(lost <= SAME, lost, max(at_end) - at_end[chosen])


def simulated(searches: int, seed: int, spread: float) -> list[Searched]:
    """Search among arms whose A differ by this standard deviation."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(searches):
        laws = [drawn_law(rng, centre, spread) for centre in [rng.uniform(0.6, 0.9)] * 4]
        found.append(searched(laws, [drawn_curve(rng, law) for law in laws]))
    return found


class Recorded(NamedTuple):
    """A search among recorded runs. good, lost: of the last score, by the posterior and by the score at the rungs; the hours
    that were spent, and those of all runs.
    """

    stated: float
    good: bool
    lost: float
    good_by_score: bool
    lost_by_score: float
    spent: float
    all: float


def recorded(folder: Path, answers: int, searches: int, seed: int) -> list[Recorded]:
    """Search among random fours of the variants of a study; `answers`: that a score is the mean of."""
    runs: dict[str, list[Curve]] = {}
    for file in sorted((folder / "points").glob("*-seed*.csv")):
        (curve,) = read_points(file)
        runs.setdefault(file.name.rpartition("-seed")[0], []).append(replace(curve, answers=answers))
    fours = list(itertools.combinations(sorted(runs), 4))
    chosen = np.random.default_rng(seed).choice(len(fours), min(searches, len(fours)), replace=False)
    return [_recorded({arm: runs[arm] for arm in fours[n]}) for n in chosen]


def _recorded(runs: dict[str, list[Curve]]) -> Recorded:
    count = min(len(curve.hours) for curves in runs.values() for curve in curves)
    alive, by_score, stated, reached = list(runs), list(runs), 1.0, dict.fromkeys(runs, count)
    for rung in (count // 2, count * 3 // 4):
        first = {arm: [_first(curve, rung) for curve in curves] for arm, curves in runs.items()}
        judged = judge({arm: first[arm] for arm in alive})
        kept = [one.arm for one in judged.standings[: (len(alive) + 1) // 2]]
        reached |= {arm: rung for arm in alive if arm not in kept}
        alive, stated = kept, stated * judged.chance(kept)
        last = {arm: float(np.mean([curve.pass_rate[-1] for curve in first[arm]])) for arm in by_score}
        by_score = sorted(last, key=lambda arm: -last[arm])[: (len(by_score) + 1) // 2]
    end = {arm: float(np.mean([curve.pass_rate[count - 1] for curve in curves])) for arm, curves in runs.items()}
    lost, by = (max(end.values()) - end[arm] for arm in (alive[0], by_score[0]))
    spent, whole = (
        sum(float(curve.hours[steps[arm] - 1]) for arm, curves in runs.items() for curve in curves)
        for steps in (reached, dict.fromkeys(runs, count))
    )
    return Recorded(stated, lost <= SAME, lost, by <= SAME, by, spent, whole)


def _first(curve: Curve, count: int) -> Curve:
    return replace(curve, hours=curve.hours[:count], pass_rate=curve.pass_rate[:count])


def summary(found: Sequence[Searched]) -> dict[str, float]:
    """Return means over searches, and what was stated and true in the half of them that was less sure, and in the other."""
    means = {"searches": len(found), "stated": float(np.mean([one.stated for one in found]))}
    for way in ("posterior", "score"):
        values = np.array([getattr(one, way) for one in found], float).mean(0)
        means |= {f"{way}_{name}": float(value) for name, value in zip(Halved._fields, values, strict=True)}
    ordered = sorted(found, key=lambda one: one.stated)
    for name, half in (("unsure", ordered[: len(found) // 2]), ("sure", ordered[len(found) // 2 :])):
        means[f"{name}_stated"] = float(np.mean([one.stated for one in half]))
        means[f"{name}_good"] = float(np.mean([one.posterior.good for one in half]))
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", type=float, default=0.06, help="deviation of the arms' A")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER")
    parser.add_argument("--answers", type=int, default=400, help="of each recorded score")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result: dict[str, float]
    if given.recorded:
        found = recorded(given.recorded, given.answers, given.searches, given.seed)
        means = np.array(found, float).mean(0).tolist()
        result = {"searches": len(found)} | dict(zip(Recorded._fields, means, strict=True))
    else:
        result = {"spread": given.spread} | summary(simulated(given.searches, given.seed, given.spread))
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
