"""The functions that worker processes run: `math`, and the user's own, named `package.module:function`.

A function takes a Submission and returns a number, or a bool for right and wrong; None or NaN if it cannot judge.
"""

import inspect
import logging
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megarl.core.base.contracts import last_box
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import imported
from megarl.tasks.graders.answer import Submission

Function = Callable[[Submission], float | None]
SPACE = re.compile(r"\\[,;: ]|\{\\,\}|[~ \u00a0\u2009\u202f]")
GROUPED = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:{SPACE.pattern})\d{{3}})+(?!\d)")
"""A number with spaces between groups of three digits. To math-verify it is a product: 10 · 000 = 0."""
MIXED = re.compile(r"(?<![\w.,/^])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/^]|[.,]\d)")
"""A mixed number without LaTeX: 1 1/4."""
REPEATING = re.compile(r"(?<![\w.,])(\d{0,9})\.(\d{0,9})\\(?:overline|bar|dot)\{(\d{1,9})\}")
"""A repeating decimal: 0.3 with a line above the 3 would be 0."""
REWRITTEN = (
    # Upright letters are units to it: 5i would be 5, and 1/e nothing.
    (re.compile(r"\\(?:mathrm|text|rm)\{([ei])\}"), r"\1"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),  # 4√(2) would be 4
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\\$(?=\s*[\d.])"), ""),  # a price
    (re.compile(r"(?<=[\d}])(?:\\[,;: ]|\s)+(?=\\?%)"), ""),
    (re.compile(r"(?<=\d)\.(?=\s*\})"), ""),  # a full stop in a box
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{\s*(-?\d[^{}]*)\}"), r"\1"),
)
"""Other things that math-verify does not read: patterns, and what they become."""
EAST_ASIAN = re.compile("[\u3001\u3002\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uff0c\uff1a]+")
MAGNITUDES = frozenset("\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104\u5206")
"""Kana, Han and Hangul without spaces hide numbers from math-verify; but ten, hundred, … belong to a number."""
LABEL = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{\(([A-J])\)[ ~]*\}(?:\\[ ,;]|[ ~:])*(?=.)", re.DOTALL)
CHOICE = re.compile(r"(?:\\\w+\{)?\(?[A-J]\)?\}?")
"""A label before the value of the choice, `\\textbf{(C)}\\ 12`; an expected answer that is a label."""
PLUS_MINUS = r"\pm"
FAR = 1e-3
"""Equal numbers differ by at most this share of the larger. math-verify compares absolute differences: 1e-20 would be 1e-30."""
BELONGING = re.compile(
    r"\\(?:begin|end)\{\w+\}|\\(?:text|mathrm|textbf|mathbf)\{[^{}]*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
    r"|(?:\\?%|\^\{?\\circ\}?)$"
)
"""What looks like PROSE but belongs to a formula: environments, LaTeX's texts, `and` in a list, a percent or degree sign."""
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


def is_equal(answer: str, expected: str) -> bool | None:
    """Return whether math-verify finds the answer mathematically equal to the expected one: boxed, in dollars or bare. None if
    it cannot read the expected one. Only one reading of the answer is compared: with two, a policy could give two answers."""
    from math_verify import parse, verify

    if "<answer>" in answer:
        answer = answer.rpartition("<answer>")[2].partition("</answer>")[0]
    answer, expected = normal(answer), normal(expected)
    if (box := last_box(answer)) and (label := LABEL.match(box)):
        answer = rf"\boxed{{{label[1] if CHOICE.fullmatch(expected) else box[label.end() :]}}}"
    elif box and PLUS_MINUS in box:
        answer = rf"\boxed{{{_both(box)}}}"
    gold = parse(f"${expected}$", parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if not gold:
        return None
    if PLUS_MINUS in expected:
        gold += parse(f"${_both(expected)}$", parsing_timeout=None)[:1]
    bare = "\n" not in answer and "$" not in answer.replace("\\$", "") and "\\boxed" not in answer
    formula = answer.lstrip("*_` ").rstrip("*_` .")
    *prose, last = PROSE.split(formula) if PROSE.search(BELONGING.sub("", formula)) else [formula]
    whole = not prose or (BUILT.fullmatch(last) and not any(map(str.isdigit, "".join(prose))))
    # The whole formula counts, not its first number.
    found = bare and whole and parse(f"${last}$", parsing_timeout=None)
    found = found or parse(answer, parsing_timeout=None) or (bare and parse(f"${formula}$", parsing_timeout=None)) or []
    equal = verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(equal) and _close(gold[:1], found[:1])


def normal(text: str) -> str:
    """Return the text with numbers written as math-verify reads them."""

    def improper(number: re.Match[str]) -> str:
        whole, above, below = map(int, number.groups())
        return f"{whole * below + above}/{below}" if above < below else number[0]

    def fraction(number: re.Match[str]) -> str:
        whole, once, again = number.groups()
        above = int(whole + once + again) - int((whole + once) or "0")
        return rf"\frac{{{above}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"

    text = GROUPED.sub(lambda number: SPACE.sub("", number[0]), text)
    for pattern, written in REWRITTEN:
        text = pattern.sub(written, text)
    plain = EAST_ASIAN.sub(" ", text)
    if any(map(str.isalnum, plain)) and MAGNITUDES.isdisjoint(text):
        text = plain
    return REPEATING.sub(fraction, MIXED.sub(improper, text)).strip()


def _both(formula: str) -> str:
    """Return the two values of a formula with ±, which math-verify knows only at the beginning, and of a sum."""
    return f"{formula.replace(PLUS_MINUS, '+')},{formula.replace(PLUS_MINUS, '-')}"


def _close(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """Return False if both are numbers that math-verify takes for equal only because both are small."""
    from sympy import Expr, simplify

    if gold == found or not all(isinstance(value, Expr) and value.is_number for value in (*gold, *found)):
        return True
    a, b = (value.evalf() for value in (*gold, *found))
    try:
        return bool(abs(a - b) <= FAR * max(abs(a), abs(b)) or simplify(gold[0] - found[0]) == 0)
    except TypeError:  # what cannot be ordered: percent, or gcd(a, b)
        return True


def same_in_mathematics(submission: Submission) -> bool | None:
    """Return whether the answer equals the expected one: the grader `math`."""
    return is_equal(submission.answer, submission.expected)


def named(grader: str) -> Function:
    """Return the function that a recipe names `math`, `reasoning-gym` or `package.module:function`."""
    if grader == "math":
        import math_verify  # noqa: F401  (imported before `ready`)

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing limits its time; we do
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return same_in_mathematics
    if grader == "reasoning-gym":
        import reasoning_gym  # noqa: F401  (imported before `ready`)

        from megarl.tasks.graders.reasoning_gym import is_right

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        return is_right
    return imported(grader)


def environment() -> dict[str, str]:
    """Return a worker's environment variables; with them it finds this process's modules and the working directory's, and a
    folder for temporary files even if TMPDIR names one that this node does not have."""
    path = os.pathsep.join([*(p for p in sys.path if p), os.getcwd()])
    return os.environ | {"PYTHONPATH": path, "TMPDIR": tempfile.gettempdir()}


def import_problem(code: str, *arguments: str) -> str:
    """Run this code in another process, since importing may do anything; return its error's text if it fails, else ""."""
    placed = "import sys; sys.excepthook = lambda kind, error, _: print(f'{kind.__name__}: {error}', file=sys.stderr)"
    words = [
        sys.executable,
        "-c",
        f"{placed}\n{code}",
        *arguments,
    ]  # a traceback's last line has no place of a SyntaxError
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_LIMIT_S:g} s"
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1] if done.returncode else ""


def check_importable(what: str, function: str, may_be_async: bool = False) -> None:
    """Raise MegarlError if this function cannot be imported and called. what: its description in the message."""
    code = f"from {__name__} import usable; usable({function!r}, {may_be_async})"
    if said := import_problem(code):
        must = f"it must be a function of one argument in a module on PYTHONPATH or in {os.getcwd()}"
        raise MegarlError(f"{what} {function} cannot be used: {said}; {must}")


def usable(function: str, may_be_async: bool) -> None:
    """Import a function; TypeError if it cannot be called with one argument, or returns a coroutine and must not."""
    found = named(function)
    if not callable(found):
        raise TypeError("it cannot be called")
    if inspect.iscoroutinefunction(found) and not may_be_async:
        raise TypeError("it is async; the score must be what it returns")
    with suppress(ValueError):  # some builtins have no signature
        inspect.signature(found).bind(None)
