"""A grading process: JSON lines on stdin, one verdict a line on stdout. `python -m megarl.tasks.graders.worker LIMIT_S GRADER`.

    ["\\\\frac{2}{4}", "1/2", …]: a Submission   ──►   [1.0, false, ""]: a Verdict

It prints `ready` first, because importing math-verify takes longer than most answers. It ends with its parent or its stdin.
Both the time and the memory of a `math` answer are limited: huge powers and factorials are answers too.
"""

import math
import os
import signal
import sys
from typing import Any

import msgspec

from megarl.core.base.contracts import RIGHT, WRONG, Verdict
from megarl.core.base.process import die_with_parent
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import Function, named


class TimeUp(BaseException):
    """The answer took too long. Not an Exception: sympy and math-verify catch those and try something else."""


def judge(function: Function, submission: Submission, limit_s: float) -> Verdict:
    """Return the verdict, within `limit_s` unless a single C call hangs (then the pool ends this process)."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return Verdict(_score(function(submission)))
    except TimeUp:
        return Verdict(WRONG, timeout=True)
    except Exception as error:  # sympy, on nonsense, and a user's function may raise nearly anything
        return Verdict(WRONG, error=f"{type(error).__name__}: {error}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(limit_s: float, grader: str) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the parent
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a grader prints is not a verdict
    function = named(grader)

    def time_up(*_: Any) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, time_up)
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        verdict = judge(function, msgspec.json.decode(line, type=Submission), limit_s)
        print(msgspec.json.encode(verdict).decode(), file=verdicts, flush=True)


def _score(value: float) -> float:
    if isinstance(value, bool):
        return RIGHT if value else WRONG
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the grader returned {score}")
    return score


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
