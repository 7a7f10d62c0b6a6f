"""How often does `megarl study search` keep the best arm, compared with its own
probability, and with halving by last scores?

`python -m benchmarks.search [--searches N] [--seed N] [--spread S] [--out FILE]`: four
arms with one law each. Their curves have the errors of real ones: noise of the answers,
a misfit of the law, and the luck of a seed. All three are drawn here, by code other
than the posterior's; their sizes are those of its prior.

`--recorded FOLDER`: uses the runs of a study (`megarl study`) that all went on to the
end, for searches among four of its variants with all their seeds, halved after a half
and after three quarters of the scores. The truth is the last score.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.forecasts import part_of
from megarl.predict.scaling.points import Curve, read_points
from megarl.predict.study.search import judge

END = 60
RUNGS = (15, 30)
SCORED = (2, 4, 6, 9, 13, 15, 19, 27, 30)
ANSWERS = 2048
R0 = 0.4
SAME = 0.01  # an arm this close to the best A counts as equally good
MISFIT = 0.01
SEED = 0.04  # deviations, shares of the gain (megarl/predict/scaling/fit.py, PRIOR)


class ArmLaw(NamedTuple):
    """An arm. Its pass rate without noise is R0 + (A - R0) / (1 + (mid / C)^B)."""

    a: float
    b: float
    mid: float


class Halved(NamedTuple):
    """The arm with which a way of halving ends. good: whether it has the best A, or one
    as good; lost: how far its A is below the best; behind: how far its pass rate at END
    is below the best arm's.
    """

    good: bool
    lost: float
    behind: float


class Searched(NamedTuple):
    """A search, by the posterior and by last scores. stated: the stated probability
    that all rungs kept the best arm.
    """

    stated: float
    posterior: Halved
    score: Halved


def drawn_law(rng: np.random.Generator, centre: float, spread: float) -> ArmLaw:
    a = float(np.clip(rng.normal(centre, spread), R0 + 0.05, 0.99))
    return ArmLaw(
        a,
        float(np.exp(rng.normal(np.log(1.2), 0.3))),
        END * float(np.exp(rng.normal(np.log(0.35), 0.5))),
    )


def drawn_curve(rng: np.random.Generator, law: ArmLaw) -> Curve:
    """Return the curve of one run of the arm, with scores at SCORED."""
    steps = np.array(SCORED, float)
    gain = (law.a - R0) / (1 + (law.mid / steps) ** law.b)
    apart = np.abs(np.subtract.outer(np.log(steps), np.log(steps)))
    strays = rng.multivariate_normal(
        np.zeros(len(steps)), (MISFIT * (law.a - R0)) ** 2 * np.exp(-apart / 1.5)
    )
    rates = np.clip(R0 + gain * (1 + rng.normal(0, SEED)) + strays, 0, 1)
    scores = rng.binomial(ANSWERS, rates) / ANSWERS
    before = rng.binomial(ANSWERS, R0) / ANSWERS
    return Curve("", steps, scores, before, "core", answers=ANSWERS)


def until(curve: Curve, step: int) -> Curve:
    return part_of(curve, curve.hours <= step)


def searched(laws: Sequence[ArmLaw], curves: Sequence[Curve]) -> Searched:
    """Halve by the posterior, and once more by the last scores."""
    alive = [str(n) for n in range(len(laws))]
    by_score = list(range(len(laws)))
    stated = 1.0
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
    """Search among arms whose A have the standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(searches):
        laws = [drawn_law(rng, centre, spread) for centre in [rng.uniform(0.6, 0.9)] * 4]
        found.append(searched(laws, [drawn_curve(rng, law) for law in laws]))
    return found


class Recorded(NamedTuple):
    """A search among recorded runs. good, lost: by the last score, for the posterior
    and for the scores at the rungs; then the hours spent, and those of all runs.
    """

    stated: float
    good: bool
    lost: float
    good_by_score: bool
    lost_by_score: float
    spent: float
    all: float


def recorded(folder: Path, answers: int, searches: int, seed: int) -> list[Recorded]:
    """Search among random sets of four of a study's variants. answers: the number of
    which a score is the mean.
    """
    runs: dict[str, list[Curve]] = {}
    for file in sorted((folder / "points").glob("*-seed*.csv")):
        (curve,) = read_points(file)
        runs.setdefault(file.name.rpartition("-seed")[0], []).append(
            replace(curve, answers=answers)
        )
    fours = list(itertools.combinations(sorted(runs), 4))
    chosen = np.random.default_rng(seed).choice(
        len(fours), min(searches, len(fours)), replace=False
    )
    return [_recorded({arm: runs[arm] for arm in fours[n]}) for n in chosen]


def _recorded(runs: dict[str, list[Curve]]) -> Recorded:
    count = min(len(curve.hours) for curves in runs.values() for curve in curves)
    alive = list(runs)
    by_score = list(runs)
    stated = 1.0
    reached = dict.fromkeys(runs, count)
    for rung in (count // 2, count * 3 // 4):
        first = {
            arm: [part_of(curve, slice(rung)) for curve in curves] for arm, curves in runs.items()
        }
        judged = judge({arm: first[arm] for arm in alive})
        kept = [one.arm for one in judged.standings[: (len(alive) + 1) // 2]]
        reached |= {arm: rung for arm in alive if arm not in kept}
        alive = kept
        stated = stated * judged.chance(kept)
        last = {
            arm: float(np.mean([curve.pass_rate[-1] for curve in first[arm]])) for arm in by_score
        }
        by_score = sorted(last, key=lambda arm: -last[arm])[: (len(by_score) + 1) // 2]
    end = {
        arm: float(np.mean([curve.pass_rate[count - 1] for curve in curves]))
        for arm, curves in runs.items()
    }
    lost, by = (max(end.values()) - end[arm] for arm in (alive[0], by_score[0]))
    spent, whole = (
        sum(float(curve.hours[steps[arm] - 1]) for arm, curves in runs.items() for curve in curves)
        for steps in (reached, dict.fromkeys(runs, count))
    )
    return Recorded(stated, lost <= SAME, lost, by <= SAME, by, spent, whole)


def summary(found: Sequence[Searched]) -> dict[str, float]:
    """Return means over searches, and the stated and true rates in the less certain
    half of them and in the other half.
    """
    means = {"searches": len(found), "stated": float(np.mean([one.stated for one in found]))}
    for way in ("posterior", "score"):
        values = np.array([getattr(one, way) for one in found], float).mean(0)
        means |= {
            f"{way}_{name}": float(value)
            for name, value in zip(Halved._fields, values, strict=True)
        }
    ordered = sorted(found, key=lambda one: one.stated)
    for name, half in (
        ("unsure", ordered[: len(found) // 2]),
        ("sure", ordered[len(found) // 2 :]),
    ):
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
        result = {"spread": given.spread} | summary(
            simulated(given.searches, given.seed, given.spread)
        )
    text = json.dumps(result, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
