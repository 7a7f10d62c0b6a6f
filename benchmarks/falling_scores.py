"""How often is a run called falling that is not, and how many that fall are noticed,
when?

    python -m benchmarks.falling_scores [--runs 1000]

Simulated runs of nine evaluations of 120 prompts with two answers each. A prompt's pass
rate is drawn anew at each evaluation, from a Beta law around the run's score. So two
scores near .8 differ with a standard error of .043, as between evaluations of a real
model (SmolLM2-135M: .042, .045). A run is flat, rises as that one did, has its scores,
or falls at once after its seventh evaluation. `strays`: how far the policy wanders
besides, from one evaluation to the next.

The table has the share of runs with an alarm at any evaluation, and at the first and
the second one after the seventh.
"""

import argparse
from dataclasses import dataclass

import numpy as np

from megarl.core.evaluation.fall import judge

PROMPTS = 120
SAMPLES = 2
EVALUATIONS = 9
BEST = 6
"""The number of the last evaluation before a fall, from 0."""
RECORDED = np.array([0.117, 0.487, 0.633, 0.683, 0.733, 0.821, 0.863, 0.746, 0.679])
RISING = np.array([0.117, 0.487, 0.633, 0.683, 0.733, 0.80, 0.82, 0.84, 0.85])
LEVELS = (0.1, 0.5, 0.8, 0.95, 0.99)
CONCENTRATION = 1.5


@dataclass(frozen=True)
class ScoreCourse:
    """A kind of run. course: the true score at each evaluation, [EVALUATIONS]."""

    name: str
    course: np.ndarray
    strays: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    print("| runs | strays | any alarm | one after | two after |\n" + "|---" * 5 + "|")
    for kind in kinds():
        alarms = np.array([alarms_of(kind, np.random.default_rng(seed)) for seed in range(runs)])
        after = [BEST + 1, BEST + 2]
        shares = [alarms.any(1).mean(), *alarms[:, after].mean(0)]
        print(
            f"| {kind.name} | {kind.strays:g} | "
            + " | ".join(f"{share:.3f}" for share in shares)
            + " |",
            flush=True,
        )


def kinds() -> list[ScoreCourse]:
    flat = [ScoreCourse(f"flat at {level:g}", np.full(EVALUATIONS, level)) for level in LEVELS]
    straying = [
        ScoreCourse("flat at 0.8", np.full(EVALUATIONS, 0.8), strays) for strays in (0.02, 0.04)
    ]
    rising = [ScoreCourse("rising", RISING), ScoreCourse("the recorded scores", RECORDED)]
    falls = [ScoreCourse(f"falls by {fall:g}", falling(fall)) for fall in (0.05, 0.10, 0.15)]
    return [*flat, *straying, *rising, *falls]


def falling(fall: float) -> np.ndarray:
    course = np.minimum(RISING, RISING[BEST])
    course[BEST + 1 :] -= fall
    return course


def alarms_of(kind: ScoreCourse, draw: np.random.Generator) -> np.ndarray:
    """Return at which evaluations a simulated run has an alarm, [EVALUATIONS]."""
    scores = simulated(kind, draw)
    steps = [10 * number for number in range(EVALUATIONS)]
    alarms = [
        judge(steps[:end], scores[:end], EVALUATIONS) is not None
        for end in range(1, EVALUATIONS + 1)
    ]
    return np.array(alarms)


def simulated(kind: ScoreCourse, draw: np.random.Generator) -> np.ndarray:
    """Return pass rates, [EVALUATIONS, PROMPTS]."""
    course = np.clip(kind.course + draw.normal(0, 1, EVALUATIONS) * kind.strays, 0.001, 0.999)[
        :, None
    ]
    chance = draw.beta(CONCENTRATION * course, CONCENTRATION * (1 - course), (EVALUATIONS, PROMPTS))
    return draw.binomial(SAMPLES, chance) / SAMPLES


if __name__ == "__main__":
    main()
