"""Detects over-optimisation: the trusted score of held-out prompts has passed its peak
while the trained reward still rises.

    RUN/evaluations/step-N/TASK/result.json
        ─► reward (the proxy) and trusted score of each prompt ─► judge ─► eval.jsonl

Gao, Schulman and Hilton (arXiv 2210.10760) find R = d (α − β ln d) for the trusted
score in RL, where d² is the KL divergence from the initial policy: the score rises to a
peak and then falls for good. Only runs with a reference model measure d, so steps stand
in for it: from each evaluation that may be the peak, a line in ln(1 + step / first
step) is fitted to all later scores. If scores never fall, no such line has a negative
slope, whatever their shape, so a curve that rises to its ceiling is no alarm.

Standard errors are over prompts, each with its own line, so scores are paired. They are
never below the error that follows from how far the mean score strays from one
evaluation to the next.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import CHECKPOINT, Row, RunDir, step_of
from megarl.core.evaluation.answers import SuiteDir

FALSE_ALARMS = 0.05
"""Chance of any alarm in a run whose trusted score never falls, however often it is
evaluated, for known Gaussian noise.
"""
LEAST = 3  # fewest evaluations for a line
# most by which mean scores are taken to stray, as a share of the deviation between
# prompts; with right and wrong answers, about 0.04 of pass rate
STRAYS = 0.1
PRIOR = 2  # second differences whose weight the bound STRAYS has in an estimate
RISES = 2.0  # standard errors by which a score must have risen to count as rising


class PassedPeak(NamedTuple):
    """How much the fitted lines have changed since `step`. errors: the trusted score's
    fall in standard errors.
    """

    step: int
    trusted_fall: float
    proxy_rise: float
    errors: float


def judge(steps: np.ndarray, proxy: np.ndarray, trusted: np.ndarray) -> PassedPeak | None:
    """Judge the newest of these evaluations. None if it is not certain that the trusted
    score fell while the proxy rose. steps: [evaluations] ascending; proxy, trusted:
    [evaluations, prompts] mean scores of the same prompts.
    """
    from scipy.special import stdtrit  # slow to import, and few runs have a trusted grader

    number = len(steps) - 1  # of the newest evaluation, counted from 0
    prompts = trusted.shape[1]
    if number < LEAST or prompts < 2:
        return None
    # Evaluation number n may cause a share 1 / (n (n + 1)) of the false alarms; all
    # shares sum to 1. Each of the at most n lines that end there may cause an n-th of
    # that share.
    false_alarms = FALSE_ALARMS / (number**2 * (number + 1))
    limit = float(stdtrit(prompts - 1, 1 - false_alarms))
    trusted_strays = straying(trusted)
    proxy_strays = straying(proxy)
    alarms = []
    for since in range(number + 2 - LEAST):
        fall, fall_errors = trend(steps, -trusted, trusted_strays, since)
        rise, rise_errors = trend(steps, proxy, proxy_strays, since)
        if fall_errors > limit and rise_errors > RISES:
            alarms.append(PassedPeak(int(steps[since]), fall, rise, fall_errors))
    return max(alarms, key=lambda alarm: alarm.errors, default=None)


def trend(
    steps: np.ndarray, scores: np.ndarray, strays: float, since: int = 0
) -> tuple[float, float]:
    """Return the change of a line through the scores [evaluations, prompts] from
    evaluation `since` (counted from 0) to the last, and that change in standard errors.
    steps: [evaluations], the first of which may be 0; strays: from `straying`.
    """
    log_steps = np.log1p(steps / steps[1])
    x = log_steps[since:]
    from_middle = x - x.mean()
    length = x[-1] - x[0]
    # A least-squares line's slope is from_middle @ scores / from_middle @ from_middle.
    weights = from_middle * length / (from_middle @ from_middle)
    changes = weights @ scores[since:]  # [prompts]
    change = float(changes.mean())
    over_prompts = changes.std(ddof=1) / math.sqrt(len(changes))
    over_evaluations = strays * float(np.linalg.norm(weights))
    error = max(over_prompts, over_evaluations)
    rounding = 1e-9 * float(np.abs(scores).max())  # a change this small is none
    if error + rounding <= 0:  # all scores are 0
        return change, 0.0
    return change, change / max(error, rounding)


def straying(scores: np.ndarray) -> float:
    """Return by how much the mean over prompts of scores [evaluations, prompts] strays
    around a smooth curve.

    The median |second difference| is 0.674 times its deviation, and its variance is six
    times that of a score. A collapse in a few evaluations looks like straying, so this
    estimate is at most STRAYS times the deviation between prompts. A few evaluations
    can look calm by chance, so that bound is counted like PRIOR more second
    differences.
    """
    bends = np.diff(scores.mean(1), 2)
    between_prompts = scores.std(1, ddof=1)
    bound = STRAYS * float(between_prompts.mean())
    median = float(np.median(np.abs(bends)))
    estimate = median / (0.6745 * math.sqrt(6))
    estimate = min(estimate, bound)
    squares = len(bends) * estimate**2 + PRIOR * bound**2
    return math.sqrt(squares / (len(bends) + PRIOR))


def watch(rundir: RunDir, version: int, tasks: Sequence[str]) -> Row:
    """Return the columns of eval.jsonl for the evaluation of this version, whose
    results must be on disk. Tasks without a trusted grader have none. With several
    tasks the columns end in `/TASK`.
    """
    folders: dict[int, Path] = {}  # by step; a restarted run may have later ones, too
    for path in sorted(rundir.evaluations.glob("step-*")):
        if CHECKPOINT.fullmatch(path.name) and step_of(path) <= version:
            folders[step_of(path)] = path
    row: Row = {}
    for name in tasks:
        if version not in folders or not _scores(SuiteDir(folders[version], name)):
            continue  # there is nothing to judge, so earlier results are not read
        passed = _judged(name, folders)
        suffix = f"/{name}" if len(tasks) > 1 else ""
        row[f"warning_overoptimisation{suffix}"] = float(passed is not None)
        if passed:
            row[f"trusted_peak_step{suffix}"] = passed.step
            row[f"trusted_fall{suffix}"] = passed.trusted_fall
            row[f"proxy_rise{suffix}"] = passed.proxy_rise
    return row


def _judged(task: str, folders: Mapping[int, Path]) -> PassedPeak | None:
    """Judge a task from the results of its evaluations, as `judge` does. folders: of
    all evaluations, by ascending step; at least one must have scores.
    """
    by_step = {}
    for step, folder in folders.items():
        if scores := _scores(SuiteDir(folder, task)):
            by_step[step] = scores
    common = set.intersection(*(set(scores) for scores in by_step.values()))
    prompts = sorted(common)  # in every evaluation
    pairs = [scores[prompt] for scores in by_step.values() for prompt in prompts]
    both = np.array(pairs).reshape(len(by_step), len(prompts), 2)  # (proxy, trusted)
    proxy, trusted = both.transpose(2, 0, 1)  # [evaluations, prompts] each
    return judge(np.array(list(by_step)), proxy, trusted)


def _scores(place: SuiteDir) -> dict[str, tuple[float, float]]:
    """Return each prompt's proxy and trusted scores by id; empty if that evaluation
    used no trusted grader.
    """
    with suppress(OSError, MegarlError):  # not written, or damaged
        scores = place.read_result().proxy_and_trusted
        if scores is not UNSET:
            return scores
    return {}
