"""What of a completion is its answer, what a grader is asked about it, and what its verdicts are worth."""

import math
from collections.abc import Mapping
from typing import NamedTuple

RIGHT, WRONG = 1.0, -1.0


class GraderDown(Exception):
    """There is no grader that could judge this: its processes do not start or die, its service does not answer."""


class Submission(NamedTuple):
    """What a grader sees. All texts: `answer` is what stands after the thinking trace ("": nothing does, or the trace is not
    closed), `completion` all of it, `expected` the answer of the data set."""

    answer: str
    expected: str
    completion: str = ""
    prompt: str = ""
    task: str = ""


class Verdict(NamedTuple):
    """Of one grader. An answer is right if its score is above 0.

    timeout, error (its text): the grader ran out of time, or failed at the answer; the score is then that of a wrong one.
    """

    score: float
    timeout: bool = False
    error: str = ""


class Grade(NamedTuple):
    """reward: the score of the task's grader, ±1 unless that is the user's own, and what the others add by their weights.

    format_ok: thinking was closed and something stands after it. timeout, error: of any of the graders.
    rewards: the score of each by name, where there are several; that of the task's grader is `answer`.
    """

    reward: float
    correct: bool
    format_ok: bool
    timeout: bool = False
    error: bool = False
    rewards: Mapping[str, float] = {}


def answer_of(text: str, end_of_thinking: str) -> str:
    """What stands after the first `end_of_thinking`, blanks around it aside; "" if it is missing or nothing follows.

    With end_of_thinking "", of a model that has no thinking trace, it is all of the text."""
    if not end_of_thinking:
        return text.strip()
    return text.partition(end_of_thinking)[2].strip()


def judged(correct: bool, timeout: bool = False) -> Verdict:
    """The verdict of a grader that knows right and wrong alone."""
    return Verdict(RIGHT if correct else WRONG, timeout)


def graded(answer: str, main: Verdict, others: Mapping[str, Verdict], weights: Mapping[str, float]) -> Grade:
    """The grade of an answer, of the task's grader's verdict and the others' by name. GraderDown if that is no number."""
    verdicts = {"answer": main, **others}
    reward = main.score + sum(weights[name] * verdict.score for name, verdict in others.items())
    if not math.isfinite(reward):
        scores = ", ".join(f"{name} {verdict.score:g}" for name, verdict in verdicts.items())
        raise GraderDown(
            f"the reward is {reward}, which nothing can be learnt from (scores before their weights: {scores})"
        )
    return Grade(
        reward=reward,
        correct=main.score > 0,
        format_ok=bool(answer),
        timeout=any(verdict.timeout for verdict in verdicts.values()),
        error=any(verdict.error for verdict in verdicts.values()),
        rewards={name: verdict.score for name, verdict in verdicts.items()} if others else {},
    )
