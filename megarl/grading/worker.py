"""A grading process: JSON lines on stdin, one verdict a line on stdout. `python -m megarl.grading.worker LIMIT_S`.

    {"answer": "\\\\frac{2}{4}", "expected": "1/2"}   ──►   {"correct": true, "timeout": false}

It says `ready` first, for importing math-verify takes longer than most answers. Ends with its parent or its stdin.
"""

import json
import signal
import sys
from typing import Any

from megarl.process import die_with_parent


class TimeUp(BaseException):
    """The answer took too long. Not an Exception: sympy and math-verify catch those and try something else."""


def is_equal(answer: str, expected: str) -> bool:
    """Whether math-verify holds the answer for mathematically equal to what is expected, boxed, in dollars or bare."""
    from math_verify import parse, verify

    gold = parse(f"${expected}$", parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None):
        return True
    bare = "\n" not in answer and "$" not in answer and "\\boxed" not in answer
    return bare and bool(verify(gold, parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None))


def check(answer: str, expected: str, limit_s: float) -> dict[str, bool]:
    """The verdict, within `limit_s` unless a single C call hangs (then the pool ends this process)."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return {"correct": is_equal(answer, expected), "timeout": False}
    except TimeUp:
        return {"correct": False, "timeout": True}
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, AttributeError, NotImplementedError):
        return {"correct": False, "timeout": False}  # what sympy raises on nonsense
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(limit_s: float) -> None:
    die_with_parent()
    import math_verify  # noqa: F401  (before `ready`)

    def time_up(*_: Any) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, time_up)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(check(request["answer"], request["expected"], limit_s)), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
