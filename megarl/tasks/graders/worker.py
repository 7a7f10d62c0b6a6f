"""A grading process: JSON lines on stdin, one verdict per line on stdout.

    python -m megarl.tasks.graders.worker LIMIT_S GRADER
    a Submission: ["\\\\frac{2}{4}", "1/2", …]
    ──► a Verdict: [1.0, false, ""]; null instead of a number is NaN

It prints `ready` first, because importing takes longer than grading. It ends when its
parent ends or its stdin is closed. The time and memory of a `math` answer are limited,
because an answer can be a huge power or factorial.
"""

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from megarl.core.base.contracts import WRONG, Verdict, score_of
from megarl.core.base.process import die_with_parent
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import Function, named


class TimeUp(BaseException):
    """The answer took too long. This is not an Exception, because a function may catch
    those and try something else.
    """


def judge(function: Function, submission: Submission, limit_s: float) -> Verdict:
    """Return the function's verdict within `limit_s`, unless a single C call hangs
    (then the pool kills this process). An error of its own makes the answer wrong; an
    OSError, None or NaN leaves it without a score.
    """
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM then raises TimeUp
    try:
        value = function(submission)
        score = math.nan if value is None else score_of(value)
        if math.isinf(score):
            raise ValueError(f"the grader returned {score}")
        if math.isnan(score):
            return Verdict(score, error="it cannot judge this answer")
        return Verdict(score)
    except TimeUp:
        return Verdict(WRONG, timeout=True)
    except OSError as error:  # of a connection or a file, for which no answer is to blame
        return Verdict(math.nan, error=f"{type(error).__name__}: {error}"[:200])
    except Exception as error:  # a user's function may raise almost anything
        return Verdict(WRONG, error=f"{type(error).__name__}: {error}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(limit_s: float, grader: str) -> None:
    """Answer submissions with verdicts until stdin ends."""
    die_with_parent()
    # If memory runs out, this dies first, and is replaced.
    Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the parent
    submissions = os.fdopen(os.dup(0), "rb")
    verdicts = os.fdopen(os.dup(1), "w")
    process = os.getpid()
    # A program that a grader starts must not read the submissions.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a grader prints is not a verdict
    function = named(grader)

    def time_up(*_: Any) -> None:
        """Handle SIGALRM."""
        raise TimeUp

    signal.signal(signal.SIGALRM, time_up)
    print("ready", file=verdicts, flush=True)
    for line in submissions:
        verdict = judge(function, msgspec.json.decode(line, type=Submission), limit_s)
        if os.getpid() != process:
            # A child that the grader forked; its verdict would be taken for the next
            # answer's.
            os._exit(0)
        print(msgspec.json.encode(verdict).decode(), file=verdicts, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
