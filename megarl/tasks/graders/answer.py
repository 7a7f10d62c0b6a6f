"""What a grader is shown (`Submission`), and how graders' verdicts become a grade
(`graded`).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from megarl.core.base.contracts import RIGHT, WRONG, Grade, GraderDown, Verdict


class Submission(NamedTuple):
    """What a grader sees.

    answer: the text after the thinking trace ("" if there is none, or the trace is not
    closed); completion: the whole text; expected: the data set's answer. If a row
    accepts several, the grader is asked with one after the other until it finds the
    answer right. truncated: whether a length limit cut the text off.
    """

    answer: str
    expected: str
    completion: str = ""
    prompt: str = ""
    task: str = ""
    truncated: bool = False


def judged(correct: bool, timeout: bool = False) -> Verdict:
    """Return the verdict of a grader that knows only right and wrong. timeout: whether
    it ran out of time.
    """
    return Verdict(RIGHT if correct else WRONG, timeout)


def graded(
    answer: str, main: Verdict, others: Mapping[str, Verdict], weights: Mapping[str, float]
) -> Grade:
    """Return the grade of an answer. Its reward is the main verdict's score plus the
    others' times their weights, both by name; it is NaN, and an error, if a verdict has
    no score. GraderDown if all have one, but the square of the sum is not finite.
    """
    verdicts = {"answer": main, **others}
    weighted = [weights[name] * verdict.score for name, verdict in others.items()]
    reward = main.score + sum(weighted)
    has_all_scores = not any(math.isnan(verdict.score) for verdict in verdicts.values())
    error = any(verdict.error for verdict in verdicts.values())
    rewards: dict[str, float] = {}
    if not has_all_scores:
        reward = math.nan
        error = True
    elif not math.isfinite(reward * reward):  # in a deviation it is squared
        scores = ", ".join(f"{name} {verdict.score:g}" for name, verdict in verdicts.items())
        raise GraderDown(
            f"the reward is {reward}, not a number of magnitude below 1e154 (scores before their"
            f" weights: {scores})"
        )
    elif others:
        rewards = {name: verdict.score for name, verdict in verdicts.items()}
    return Grade(
        reward,
        main.score > 0,
        bool(answer),
        any(verdict.timeout for verdict in verdicts.values()),
        error,
        rewards,
    )
