"""Over-optimisation: the trusted score of held-out prompts has passed its peak while the reward that is trained still rises.

    RUN/evaluations/step-N/TASK/result.json ─► reward (the proxy) and trusted score of each prompt ─► judge ─► eval.jsonl

Gao, Schulman and Hilton (arXiv 2210.10760) find R = d (α − β ln d) for the trusted score of RL, where d² is the KL divergence
from the initial policy: it rises to a peak and then falls for good. Only runs with a reference model measure d, so compute
stands for it: from each evaluation that may be the peak, a line in ln(1 + step / first step) is fitted to all later scores.
Where scores never fall, no such slope is negative, whatever their shape: a curve that rises to its ceiling is no alarm.

Errors are over prompts, each with its own line, so they are paired; and never below what a policy strays with all its prompts.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, step_of
from megarl.core.evaluation.answers import SuiteDir

FALSE_ALARMS = 0.05
"""Chance of any in a run whose trusted score never falls, however often it is evaluated, if noise is Gaussian and known."""
LEAST = 3  # evaluations on a line
STRAYS = 0.1  # of the deviation between prompts; of right and wrong, a pass rate that strays by about 0.04
PRIOR = 2  # second differences
RISES = 2.0  # standard errors by which what rises must have risen


class PassedPeak(NamedTuple):
    """What fitted lines changed since `step`. errors: standard errors of the trusted score's fall."""

    step: int
    trusted_fall: float
    proxy_rise: float
    errors: float


def judge(steps: np.ndarray, proxy: np.ndarray, trusted: np.ndarray) -> PassedPeak | None:
    """Judge the newest of these evaluations; None if the trusted score has not certainly fallen while the proxy rose.

    steps: [evaluations] ascending; proxy, trusted: [evaluations, prompts] mean scores of the same prompts.
    """
    from scipy.special import stdtrit  # slow to import, and few runs have a trusted grader

    number, prompts = len(steps) - 1, trusted.shape[1]
    if number < LEAST or prompts < 2:
        return None
    # The newest evaluation gets a share 1 / (n (n + 1)) of the false alarms, n being its number; all shares sum to 1. Each of
    # the at most n lines that end there gets an n-th of it.
    limit = float(stdtrit(prompts - 1, 1 - FALSE_ALARMS / (number**2 * (number + 1))))
    strays, found = (straying(trusted), straying(proxy)), []
    for since in range(number + 2 - LEAST):
        fall, fallen = trend(steps, -trusted, strays[0], since)
        rise, risen = trend(steps, proxy, strays[1], since)
        if fallen > limit and risen > RISES:
            found.append(PassedPeak(int(steps[since]), fall, rise, fallen))
    return max(found, key=lambda one: one.errors, default=None)


def trend(steps: np.ndarray, scores: np.ndarray, strays: float, since: int = 0) -> tuple[float, float]:
    """Return by how much a line through scores [evaluations, prompts] from number `since` on changes, and how many standard
    errors that is.
    """
    x = np.log1p(steps / steps[1])[since:]
    line = x - x.mean()
    weights = line * (x[-1] - x[0]) / (line @ line)
    each = weights @ scores[since:]
    error = max(each.std(ddof=1) / math.sqrt(len(each)), strays * float(np.linalg.norm(weights)))
    rounding = 1e-9 * float(np.abs(scores).max())
    return float(each.mean()), float(each.mean() / max(error, rounding)) if error + rounding > 0 else 0.0


def straying(scores: np.ndarray) -> float:
    """Return by how much mean scores [evaluations, prompts] stray around a smooth curve: the median |second difference| is
    0.674 times its deviation, whose variance is six times that of a score. A collapse within few evaluations looks like
    straying, so it is at most STRAYS of the deviation between prompts; few evaluations can look calm by chance, so that much
    counts like PRIOR second differences more.
    """
    bends, bound = np.diff(scores.mean(1), 2), STRAYS * float(scores.std(1, ddof=1).mean())
    found = min(float(np.median(np.abs(bends))) / (0.6745 * math.sqrt(6)), bound)
    return math.sqrt((len(bends) * found**2 + PRIOR * bound**2) / (len(bends) + PRIOR))


def watch(rundir: RunDir, version: int, tasks: Sequence[str]) -> Row:
    """Return the columns of eval.jsonl for the evaluation of this version, whose results are written; none of tasks without a
    trusted grader. With several tasks they end in `/TASK`.
    """
    folders = {step_of(path): path for path in sorted(rundir.evaluations.glob("step-*")) if step_of(path) <= version}
    row: Row = {}
    for name in tasks:
        scores = {step: found for step, folder in folders.items() if (found := _scores(SuiteDir(folder, name)))}
        if version not in scores:
            continue
        same = sorted(set.intersection(*(set(each) for each in scores.values())))
        proxy, trusted = np.array([[each[id] for id in same] for each in scores.values()]).transpose(2, 0, 1)
        passed, end = judge(np.array(list(scores)), proxy, trusted), f"/{name}" if len(tasks) > 1 else ""
        row[f"warning_overoptimisation{end}"] = float(passed is not None)
        if passed:
            row |= {f"trusted_peak_step{end}": passed.step, f"trusted_fall{end}": passed.trusted_fall}
            row |= {f"proxy_rise{end}": passed.proxy_rise}
    return row


def _scores(place: SuiteDir) -> dict[str, tuple[float, float]]:
    """Return proxy and trusted score of each prompt by id; empty if that evaluation asked no trusted grader."""
    with suppress(OSError, MegarlError):  # not written, or damaged
        if (scores := place.read_result().proxy_and_trusted) is not UNSET:
            return scores
    return {}
