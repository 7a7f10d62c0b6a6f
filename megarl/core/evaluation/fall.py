"""Whether a run's held-out score has fallen for certain.

    RUN/evaluations/step-N/TASK/result.json ─► each prompt's pass rate
                                            ─► judge ─► columns of eval.jsonl

Each evaluation asks the same prompts, so two of them are compared prompt by prompt: how
hard a prompt is cancels out. The mean of the newest 1, 2, 4, … evaluations is compared
with that of as many earlier ones in a row, whichever these are, so that a small fall
shows once it has lasted.

A run with N evaluations makes C(N) such comparisons in all, and each may err with
probability RATE / C(N) (Bonferroni). The chance of any false alarm in a whole run is
then at most RATE, however the comparisons depend on each other, if the policy never
gets worse: the more it rises, the smaller. Student's t with prompts - 1 degrees of
freedom is the law of a comparison.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import UNSET

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import CHECKPOINT, Row, step_of
from megarl.core.evaluation.answers import SuiteDir

RATE = 0.05
"""Largest chance of any false alarm in a whole run."""
LEAST = 0.03
"""Falls of less are not reported: with many answers they are certain, but a policy
strays that far and comes back.
"""
WARNING_COLUMN = "warning_fall"
"""A column of eval.jsonl, or the prefix of one per task if there are several."""


@dataclass(frozen=True)
class ScoreFall:
    """since: step of the newest of the better evaluations; fall: of the mean pass rate;
    error: its standard error.
    """

    since: int
    fall: float
    error: float


def judge(
    steps: Sequence[int], scores: np.ndarray, planned: int, rate: float = RATE
) -> ScoreFall | None:
    """Return the most certain fall that lasts at the newest of these evaluations; None
    if there is none.

    steps: [evaluations], ascending. scores: [evaluations, prompts], pass rates of the
    same prompts. planned: evaluations of the whole run. rate: the chance of a false
    alarm in it.
    """
    # Slow to import, and 35 MB that a GPU benchmark's archive can leave out.
    from scipy.special import stdtrit

    evaluations, prompts = scores.shape
    if evaluations < 2 or prompts < 2:
        return None
    certain = 1 - rate / comparisons(max(planned, evaluations))
    limit = float(stdtrit(prompts - 1, certain))
    falls = []
    for fall in _falls(steps, scores):
        if fall.fall > max(LEAST, limit * fall.error):
            falls.append(fall)
    return max(falls, key=lambda fall: fall.fall / fall.error, default=None)


def comparisons(evaluations: int) -> int:
    """Return how many comparisons are made in a run of so many evaluations."""
    count = 0
    for end in range(2, evaluations + 1):
        for width in _widths(end):
            count += end - 2 * width + 1  # where the earlier stretch may start
    return count


def _widths(evaluations: int) -> list[int]:
    """Return 1, 2, 4, … up to half of the evaluations."""
    return [1 << power for power in range((evaluations // 2).bit_length())]


def _falls(steps: Sequence[int], scores: np.ndarray) -> Iterator[ScoreFall]:
    """Yield, for each earlier stretch of evaluations, how far the newest ones are below
    it.
    """
    evaluations, prompts = scores.shape
    # [evaluations + 1, prompts]: sums over all earlier evaluations
    running_sums = np.cumsum(scores, axis=0)
    sums_before = np.concatenate([np.zeros((1, prompts)), running_sums])
    for width in _widths(evaluations):
        newest = (sums_before[-1] - sums_before[-1 - width]) / width
        for start in range(evaluations - 2 * width + 1):
            end = start + width
            earlier = (sums_before[end] - sums_before[start]) / width
            yield _fall(steps[end - 1], earlier - newest)


def _fall(since: int, differences: np.ndarray) -> ScoreFall:
    """Return a fall from each prompt's. Its error is never below that of one prompt
    that turns from right to wrong.
    """
    prompts = len(differences)
    error = float(differences.std(ddof=1)) / math.sqrt(prompts)
    return ScoreFall(since, float(differences.mean()), max(error, 1 / prompts))


def fall_columns(evaluations: Path, version: int, tasks: Sequence[str], planned: int) -> Row:
    """Return the columns of eval.jsonl for the evaluation of this version, whose
    results must be on disk.

    evaluations: RUN/evaluations. With several tasks the columns end in `/TASK`, and the
    tasks share RATE.
    """
    row: Row = {}
    for task in tasks:
        by_step = _pass_rates(evaluations, version, task)
        if version not in by_step:
            continue
        scores = _scores_of_same_prompts(list(by_step.values()))
        fall = judge(list(by_step), scores, planned, RATE / len(tasks))
        row |= _columns(fall, suffix=f"/{task}" if len(tasks) > 1 else "")
    return row


def _scores_of_same_prompts(evaluations: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Return the pass rates [evaluations, prompts] of the prompts that are in all."""
    prompts = sorted(set.intersection(*(set(rates) for rates in evaluations)))
    scores = np.zeros((len(evaluations), len(prompts)))
    for i, rates in enumerate(evaluations):
        scores[i] = [rates[prompt] for prompt in prompts]
    return scores


def _columns(fall: ScoreFall | None, suffix: str) -> Row:
    """Return a judgement as columns whose names end in `suffix`."""
    if fall is None:
        return {f"{WARNING_COLUMN}{suffix}": 0.0}
    return {
        f"{WARNING_COLUMN}{suffix}": 1.0,
        f"fall{suffix}": fall.fall,
        f"fall_error{suffix}": fall.error,
        f"fall_since{suffix}": fall.since,
    }


def _pass_rates(evaluations: Path, version: int, task: str) -> dict[int, Mapping[str, float]]:
    """Return each prompt's pass rate in all evaluations up to this version, by step."""
    rates: dict[int, Mapping[str, float]] = {}
    for folder in sorted(evaluations.glob("step-*")):
        if not CHECKPOINT.fullmatch(folder.name) or step_of(folder) > version:
            continue
        with suppress(OSError, MegarlError):  # not written, or damaged
            by_prompt = SuiteDir(folder, task).read_result().pass_rates
            if by_prompt is not UNSET:
                rates[step_of(folder)] = by_prompt
    return rates
