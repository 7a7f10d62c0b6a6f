"""The functions that worker processes run: `math`, and the user's own by `package.module:function`.

A function is given a Submission and returns a number, or a bool for right and wrong.
"""

import importlib
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable

from megarl.core.base.errors import MegarlError
from megarl.tasks.graders.answer import Submission

Function = Callable[[Submission], float]
MEMORY_BYTES = 4 << 30
"""Address space of a process of `math`; what wants more is an error of the answer."""
IMPORT_LIMIT_S = 120.0


def is_equal(answer: str, expected: str) -> bool:
    """Whether math-verify holds the answer for mathematically equal to what is expected, boxed, in dollars or bare."""
    from math_verify import parse, verify

    gold = parse(f"${expected}$", parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None):
        return True
    bare = "\n" not in answer and "$" not in answer.replace("\\$", "") and "\\boxed" not in answer
    return bare and bool(verify(gold, parse(f"${answer}$", parsing_timeout=None), timeout_seconds=None))


def same_in_mathematics(submission: Submission) -> bool:
    """The grader `math`."""
    return is_equal(submission.answer, submission.expected)


def named(grader: str) -> Function:
    """The function that a recipe means by `math` or `package.module:function`."""
    if grader == "math":
        import math_verify  # noqa: F401  (before `ready`)

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time is kept by others: by us
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return same_in_mathematics
    module, _, name = grader.partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return function


def environment() -> dict[str, str]:
    """Of a worker: it finds the modules that this process finds, and those in the working directory."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*(p for p in sys.path if p), os.getcwd()])}


def check_importable(grader: str) -> None:
    """MegarlError if there is no such function; it is looked for in another process, for importing it may do anything."""
    code = (
        f"from megarl.tasks.graders.functions import named; assert callable(named({grader!r})), 'it cannot be called'"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S
        )
        said = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = f"not imported within {IMPORT_LIMIT_S:g} s"
    if said:
        raise MegarlError(
            f"data.tasks: the grader {grader} cannot be used: {said}; it must be a function in a module on PYTHONPATH or in "
            f"{os.getcwd()}"
        )
