"""Grades a program by tests: each runs in the sandbox, its result is compared outside,
and the first failure ends the grading.

    answer ─► program (fences.py) ─► for each test ─► Sandbox ─► printed result
                                                         ═?═ the test's expected result

The prompt's `answer` is the JSON text of the tests, of four kinds, which may be mixed:

    {"tests": [
        {"input": "1 2\\n", "output": "3\\n"},
            a program: stdin, stdout
        {"call": "add(1, 2)", "result": "3"},
            a function: an expression, and the literal that it must equal
        {"assert": "assert add(1, 2) == 3"},
            the same, as MBPP writes it
        {"check": "def check(candidate): …", "entry_point": "add"}]}
            code with asserts, as in HumanEval

The program can never reach the expected result: that stays outside or, for a check, in
a separate sandbox that calls the function through a pipe. A program that exits before
its tests, reads its own memory or lies about its success gains nothing.
"""

import ast
import asyncio
import cmath
import json
import math
import sys
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from megarl.core.base.contracts import Verdict
from megarl.tasks.graders.answer import Submission, judged
from megarl.tasks.graders.fences import program_of
from megarl.tasks.graders.sandbox import Ran, Sandbox

SHOWN_BYTES = 1 << 16
"""A result longer than this plus 4 times the expected one is not parsed: that would
take too much of the controller's time.
"""
PASSED = "passed"
"""The output of a check's sandbox if no assert failed."""
UNREADABLE = (
    ValueError,
    SyntaxError,
    TypeError,
    KeyError,
    MemoryError,
    RecursionError,
    OverflowError,
)
"""The exceptions from parsing a text that is malformed, or made to break its parser."""
NON_FINITE: dict[str, complex] = {
    "inf": math.inf,
    "nan": math.nan,
    "infj": complex(0, math.inf),
    "nanj": complex(0, math.nan),
}
"""How `repr` writes numbers that are not finite; those with j are imaginary."""
FLOATS_AGREE = 1e-6
"""Tolerance for float results, and for printed numbers with a decimal point: relative
or absolute, as most judges have it.
"""


class UnitTest(NamedTuple):
    """One test: `stdin` with `printed`, `call` with `result`, or `check` with
    `entry_point`.
    """

    stdin: str = ""
    printed: str = ""
    call: str = ""
    result: Any = None
    check: str = ""
    entry_point: str = ""


class Code:
    """The code grader. TaskGraders calls its `check`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def check(self, submission: Submission) -> Verdict:
        """Return whether the program in the answer passes all tests; timeout: whether a
        test timed out.
        """
        # A long answer takes a while, for which the event loop need not wait.
        program = await asyncio.to_thread(program_of, submission.answer, submission.truncated)
        if program is None:
            return judged(False)
        for test in read_tests(submission.expected):
            if test.check:
                ran = await self._sandbox.run_checked(program, test.entry_point, test.check)
            else:
                ran = await self._sandbox.run(
                    program, test.stdin, test.call, expected=4 * len(test.printed)
                )
            if not passed(test, ran):
                return judged(False, timeout=ran.ended == "time")
        return judged(True)


def passed(test: UnitTest, ran: Ran) -> bool:
    """Return whether the program exited by itself and gave the result that the test
    expects.
    """
    if ran.ended != "exit":
        return False
    if test.check:
        return ran.stdout == PASSED
    if not test.call:
        return ran.status == 0 and same_text(ran.stdout, test.printed)
    if len(ran.stdout) > SHOWN_BYTES + 4 * len(repr(test.result)):
        return False
    try:
        return same_value(literal(ran.stdout), test.result)
    except UNREADABLE:
        return False


def same_text(printed: str, expected: str) -> bool:
    """Compare word by word within each line, and ignore empty lines around all; equal
    numbers may be written differently.
    """
    printed_lines = printed.strip().splitlines()
    expected_lines = expected.strip().splitlines()
    return len(printed_lines) == len(expected_lines) and all(
        map(_same_line, printed_lines, expected_lines)
    )


def _same_line(printed: str, expected: str) -> bool:
    """Compare two lines word by word, whatever blanks are between the words."""
    printed_words = printed.split()
    expected_words = expected.split()
    return len(printed_words) == len(expected_words) and all(
        map(_same_word, printed_words, expected_words)
    )


def _same_word(printed: str, expected: str) -> bool:
    return printed == expected or _same_number(printed, expected)


def same_value(value: Any, expected: Any) -> bool:
    """Compare like Python's ==, but a tuple equals a list, NaN equals NaN, and floats
    and complex numbers may differ within FLOATS_AGREE.
    """
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            same_value(value[key], expected[key]) for key in value
        )
    if _may_be_inexact(value, expected):
        if cmath.isnan(value) or cmath.isnan(expected):
            return cmath.isnan(value) and cmath.isnan(expected)
        return cmath.isclose(value, expected, rel_tol=FLOATS_AGREE, abs_tol=FLOATS_AGREE)
    return bool(value == expected)


def _may_be_inexact(value: Any, expected: Any) -> bool:
    """Return whether both are numbers, and at least one is a float or complex."""
    if not isinstance(value, int | float | complex):
        return False
    if not isinstance(expected, int | float | complex):
        return False
    return isinstance(value, float | complex) or isinstance(expected, float | complex)


@lru_cache(maxsize=256)
def read_tests(text: str) -> tuple[UnitTest, ...]:
    """Parse the tests in a prompt's answer; ValueError says what is wrong with them."""
    try:
        rows = json.loads(text)["tests"]
    except UNREADABLE:
        raise ValueError('is not {"tests": [...]}') from None
    if not isinstance(rows, list) or not rows:
        raise ValueError("has no tests")
    return tuple(_test(row, number) for number, row in enumerate(rows))


def _test(row: Any, number: int) -> UnitTest:
    """Return the test that a row describes. number: its place among the tests, for the
    ValueError if it is none.
    """
    match row:
        case {"input": str(stdin), "output": str(printed), **others} if not others:
            return UnitTest(stdin=stdin, printed=printed)
        case {"call": str(call), "result": str(result), **others} if not others and call.strip():
            return UnitTest(call=call, result=_literal(result, number))
        case {"check": str(check), "entry_point": str(name), **others} if (
            not others and name.isidentifier()
        ):
            return UnitTest(check=_checked(check, number), entry_point=name)
        case {"assert": str(line), **others} if not others:
            return _asserted(line, number)
    pairs = "input and output, call and result, check and entry_point, or assert"
    raise ValueError(f"test {number}: give {pairs}, all of them strings")


def _checked(source: str, number: int) -> str:
    """Return the source if it can run, else raise ValueError: programs must not fail
    because of a faulty check.
    """
    try:
        tree = ast.parse(source)
    except UNREADABLE as error:
        raise ValueError(f"test {number}: the check is not Python: {error}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise ValueError(f"test {number}: the check defines no function `check`")
    packages = {name.partition(".")[0] for name in _imports(tree)}
    foreign = sorted(packages - sys.stdlib_module_names)
    if foreign:
        raise ValueError(
            f"test {number}: the check imports {', '.join(foreign)}; only the standard library is"
            " there"
        )
    return source


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of imported modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _asserted(line: str, number: int) -> UnitTest:
    """Return `assert CALL == LITERAL` as a test of kind `call`. ValueError if the line
    is anything else.
    """
    try:
        (statement,) = ast.parse(line.strip()).body
    except UNREADABLE:  # not Python, or several statements
        statement = ast.Pass()
    match statement:
        case ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[result])):
            return UnitTest(call=ast.unparse(call), result=_literal(ast.unparse(result), number))
    raise ValueError(f"test {number}: {line!r} is not `assert CALL == LITERAL`")


def _literal(text: str, number: int) -> Any:
    """Return the value of an expected result. ValueError, which names the test by its
    number, if it is no literal.
    """
    try:
        return literal(text)
    except UNREADABLE:
        raise ValueError(
            f"test {number}: the result {text[:80]!r} is not a Python literal"
        ) from None


def literal(text: str) -> Any:
    """Return the value of a Python literal, in which inf and nan may stand for numbers:
    as `repr` writes them, or as `float("inf")`, `math.inf` or `np.inf`. One of
    UNREADABLE if it is none.
    """
    try:
        return ast.literal_eval(text)
    except ValueError:
        expression = ast.parse(text.strip(), mode="eval")
        return ast.literal_eval(ast.fix_missing_locations(_NonFinite().visit(expression)))


class _NonFinite(ast.NodeTransformer):
    """Replaces names of numbers that are not finite by these numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace `inf` and its like."""
        value = NON_FINITE.get(node.id)
        return node if value is None else ast.Constant(value)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace `math.inf` and its like."""
        match node:
            case ast.Attribute(
                value=ast.Name(id="math" | "np" | "numpy"), attr="inf" | "nan" as name
            ):
                return ast.Constant(NON_FINITE[name])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace `float("inf")` and its like."""
        match node:
            case ast.Call(
                func=ast.Name(id="float"), args=[ast.Constant(value=str(written))], keywords=[]
            ):
                return ast.Constant(float(written))
        return node


def _same_number(printed: str, expected: str) -> bool:
    """Return whether both are numbers and the same; NaN is the same as NaN. Only if the
    expected one has a decimal point may the other differ, within FLOATS_AGREE.
    """
    try:
        a = Decimal(printed)
        b = Decimal(expected)
        if a.is_nan() or b.is_nan():
            return a.is_qnan() and b.is_qnan()
        if a == b:
            return True
        if "." not in expected:
            return False
        scale = max(Decimal(1), abs(b))
        return abs(a - b) <= Decimal(FLOATS_AGREE) * scale
    except ArithmeticError:  # a word, or a number of a million digits
        return False
