"""How often `megarl study search` keeps the best arm, against what it says, and against halving by the last score.

`python -m benchmarks.search [--searches N] [--seed N] [--out FILE]`: four arms with a law each, whose curves have what real
ones have: noise of the answers, a misfit of the law, and the luck of a seed. All three are drawn here, by other code than the
posterior's; their sizes are what its prior names.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.lab.scaling.points import Curve
from megarl.lab.study.search import judge

END, RUNGS, SCORED = 60, (15, 30), (2, 4, 6, 9, 13, 15, 19, 27, 30)
ANSWERS, R0 = 2048, 0.4
SAME = 0.01  # an arm this close to the best A is as good
MISFIT, SEED = 0.01, 0.04  # deviations, shares of the gain (megarl/lab/scaling/fit.py, PRIOR)


class Law(NamedTuple):
    """An arm: its pass rate without any noise is R0 + (A - R0) / (1 + (mid / C)^B)."""

    a: float
    b: float
    mid: float


class Searched(NamedTuple):
    """stated: the probability that the best arm was kept at all rungs; kept: whether it, or one as good, was; lost: in A."""

    stated: float
    kept: bool
    lost: float
    kept_by_score: bool
    lost_by_score: float


def drawn_law(rng: np.random.Generator, centre: float, spread: float) -> Law:
    a = float(np.clip(rng.normal(centre, spread), R0 + 0.05, 0.99))
    return Law(a, float(np.exp(rng.normal(np.log(1.2), 0.3))), END * float(np.exp(rng.normal(np.log(0.35), 0.5))))


def drawn_curve(rng: np.random.Generator, law: Law) -> Curve:
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


def searched(laws: Sequence[Law], curves: Sequence[Curve]) -> Searched:
    """Halve by the posterior, and once more by the last scores."""
    alive, by_score, stated = [str(n) for n in range(len(laws))], list(range(len(laws))), 1.0
    for rung in RUNGS:
        judged = judge({arm: [until(curves[int(arm)], rung)] for arm in alive})
        alive = [one.arm for one in judged.standings[: (len(alive) + 1) // 2]]
        stated *= judged.chance(alive)
        last = {n: until(curves[n], rung).pass_rate[-1] for n in by_score}
        by_score = sorted(last, key=lambda n: -last[n])[: (len(by_score) + 1) // 2]
    lost, lost_by_score = (max(law.a for law in laws) - laws[int(chosen)].a for chosen in (alive[0], by_score[0]))
    return Searched(stated, lost <= SAME, lost, lost_by_score <= SAME, lost_by_score)


def simulated(searches: int, seed: int, spread: float) -> list[Searched]:
    """Search among arms whose A differ by this standard deviation."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(searches):
        laws = [drawn_law(rng, centre, spread) for centre in [rng.uniform(0.6, 0.9)] * 4]
        found.append(searched(laws, [drawn_curve(rng, law) for law in laws]))
    return found


def summary(found: Sequence[Searched]) -> dict[str, float]:
    """Return means over searches; kept_apart: of the likelier and of the less likely half, by what was stated."""
    means = dict(zip(Searched._fields, np.array(found, float).mean(0).tolist(), strict=True))
    halves = np.array_split(np.array(sorted(found), float), 2)
    for name, half in zip(("unsure", "sure"), halves, strict=True):
        means |= {f"stated_when_{name}": float(half[:, 0].mean()), f"kept_when_{name}": float(half[:, 1].mean())}
    return {"searches": len(found)} | means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--searches", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = {f"{spread:g}": summary(simulated(given.searches, given.seed, spread)) for spread in (0.02, 0.06, 0.12)}
    text = json.dumps(results, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
