"""The functions that worker processes run: `math`, and the user's own, named `package.module:function`.

A function takes a Submission and returns a number, or a bool for right and wrong.
"""

import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable

from megarl.core.base.errors import MegarlError
from megarl.core.base.process import imported
from megarl.tasks.graders.answer import Submission

Function = Callable[[Submission], float]
SPACE = re.compile(r"\\[,;: ]|\{\\,\}|[~ \u00a0\u2009\u202f]")
GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:{SPACE.pattern})\d{{3}})+(?!\d)")
"""A number with spaces between groups of three digits. To math-verify it is a product: 10 · 000 = 0."""
# A number, then a unit of one letter (metres, litres), possibly with a power or divided by another unit.
UNIT = r"(?:^|= ?)-?[\d.,]+(?:\\,| )[dghlmsACFJKLNTVW](?:\^\{?\d\}?|[²³])?(?:/[A-Za-z])?$"
PROSE = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{2,}}|[%€£°]|\\circ|: |^- |\*\*|\\[(\[]|{UNIT}")
"""Things that a bare formula does not contain: a word, a unit, a label, a bullet, `**` as in Python, a LaTeX delimiter."""
OPERATION = r"\\(?:[dt]?frac|sqrt|binom|pi|cdot|times|log|ln|sin|cos|tan|left|right)(?![A-Za-z])"
BUILT = re.compile(rf"[^\\,;!]*{OPERATION}(?:[^\\,;!]|{OPERATION})*")
"""A value built from numbers with LaTeX commands, without units or lists. In prose without dollar signs it comes at the end."""
MEMORY_BYTES = 4 << 30
"""Address space of a `math` process. An answer that needs more gets an error."""
IMPORT_LIMIT_S = 120.0


def is_equal(answer: str, expected: str) -> bool:
    """Return whether math-verify finds the answer mathematically equal to the expected one: boxed, in dollars or bare."""
    from math_verify import parse, verify

    answer, expected = (GROUPED.sub(lambda number: SPACE.sub("", number[0]), text) for text in (answer, expected))
    gold = parse(f"${expected}$", parsing_timeout=None) or parse(expected, parsing_timeout=None)
    bare = "\n" not in answer and "$" not in answer.replace("\\$", "") and "\\boxed" not in answer
    formula = answer.lstrip("*_` ").rstrip("*_` .")
    *prose, last = PROSE.split(formula)
    whole = not prose or (BUILT.fullmatch(last) and not any(map(str.isdigit, "".join(prose))))
    if bare and whole and (found := parse(f"${last}$", parsing_timeout=None)):
        return bool(verify(gold, found, timeout_seconds=None))  # the whole formula counts, not its first number
    if verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None):
        return True
    return bare and bool(verify(gold, parse(f"${formula}$", parsing_timeout=None), timeout_seconds=None))


def same_in_mathematics(submission: Submission) -> bool:
    """Return whether the answer equals the expected one: the grader `math`."""
    return is_equal(submission.answer, submission.expected)


def named(grader: str) -> Function:
    """Return the function that a recipe names `math` or `package.module:function`."""
    if grader == "math":
        import math_verify  # noqa: F401  (imported before `ready`)

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time; we do
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return same_in_mathematics
    return imported(grader)


def environment() -> dict[str, str]:
    """Return a worker's environment variables; with them it finds this process's modules and the working directory's."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*(p for p in sys.path if p), os.getcwd()])}


def import_problem(code: str, *arguments: str) -> str:
    """Run this code in another process, since importing may do anything; return its last line if it fails, else ""."""
    words = [sys.executable, "-c", code, *arguments]
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_LIMIT_S:g} s"
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1] if done.returncode else ""


def check_importable(what: str, function: str) -> None:
    """Raise MegarlError if this function cannot be imported and called. what: its description in the message."""
    code = f"from {__name__} import named; assert callable(named({function!r})), 'it cannot be called'"
    if said := import_problem(code):
        must = f"it must be a function in a module on PYTHONPATH or in {os.getcwd()}"
        raise MegarlError(f"{what} {function} cannot be used: {said}; {must}")
