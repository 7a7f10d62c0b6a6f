"""Published sets of programming problems: reads a row's prompt, and its tests in the
format of the code grader.
"""

import ast
import base64
import binascii
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megarl.tasks.data.columns import Getter, column, text_of
from megarl.tasks.data.rows import Raw, UnfitError, shown
from megarl.tasks.graders.code import read_tests
from megarl.tasks.graders.inside import unpickled

LARGEST_TESTS = 1 << 30
"""Most bytes that compressed tests become; published ones reach hundreds of megabytes,
but a megabyte may become a thousand.
"""


def with_starter_code(path: str) -> Getter:
    """Read a DeepCoder or LiveCodeBench prompt: the problem in this column, and the
    starter code if the row has some.
    """

    def prompt(raw: Raw) -> str:
        problem = text_of(column(path)(raw))
        starter = raw.get("starter_code")
        return (
            f"{problem}\n\nBegin with this code:\n```python\n{starter}\n```" if starter else problem
        )

    return prompt


def unit_tests(raw: Raw) -> str:
    """Read the tests of DeepCoder's four parts; return them in the code grader's
    format, as JSON:

    {"tests": [{"input": "1 2\\n", "output": "3\\n"}]}           the program reads stdin, writes stdout
    {"tests": [{"call": "add(1, 2)", "result": "3"}]}           a function is called
    """
    tests = _decoded(column("tests")(raw), "tests")
    named = None
    if isinstance(tests, Mapping):  # TACO: columns of inputs and outputs
        named = tests.get("fn_name")
        inputs = tests.get("inputs", [])
        outputs = tests.get("outputs", [])
        if len(inputs) != len(outputs):
            raise UnfitError("the tests have different numbers of inputs and outputs")
        tests = [
            {"input": given, "output": wanted}
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
    return _as_json([_test(test, named, raw) for test in _checked(tests)])


def livecodebench_tests(raw: Raw) -> str:
    """Read LiveCodeBench tests, public and private; the latter are JSON, possibly
    pickled, compressed and base64-encoded.
    """
    private = column("private_test_cases")(raw)
    if isinstance(private, str) and not private.lstrip().startswith("["):
        private = _unpickled(private)
    public = _decoded(column("public_test_cases")(raw), "public tests")
    tests = [*_checked(public), *_checked(_decoded(private, "private tests"))]
    return _as_json([_test(test, None, raw) for test in tests])


def _unpickled(text: str) -> Any:
    whole = zlib.decompressobj()
    try:
        data = whole.decompress(base64.b64decode(text, validate=True), LARGEST_TESTS)
        if whole.unconsumed_tail:
            raise UnfitError(f"the private tests are longer than {LARGEST_TESTS:,} bytes")
        return unpickled(data)
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise UnfitError(
            f"the private tests are neither JSON nor a compressed pickle of it: {error}"
        ) from None


def humaneval_check(raw: Raw) -> str:
    """Read HumanEval tests: the function `check`, after the prompt whose helpers it
    calls, and the tested function's name.
    """
    prompt, test, entry_point = (
        text_of(column(name)(raw)) for name in ("prompt", "test", "entry_point")
    )
    return _as_json([{"check": f"{prompt}\n\n{test}", "entry_point": entry_point}])


def mbpp_prompt(raw: Raw) -> str:
    """Read an MBPP prompt: the task (`text`, or `prompt` in the sanitised part) and the
    tests; only these name the function.
    """
    task = text_of(raw["text"] if "text" in raw else column("prompt")(raw))
    return (
        f"{task}\nYour code should pass these"
        f" tests:\n```python\n{'\n'.join(_lines_of(raw, 'test_list'))}\n```"
    )


def mbpp_tests(raw: Raw) -> str:
    """Read MBPP tests, each an assertion; one that needs setup code, or compares no
    call with a literal, becomes a `check`.
    """
    setup = [*_lines_of(raw, "test_imports"), *str(raw.get("test_setup_code") or "").splitlines()]
    tests = [
        {"assert": line} if not setup and _is_comparison(line) else _mbpp_check(line, setup, raw)
        for line in _lines_of(raw, "test_list")
    ]
    return _as_json(tests)


def _mbpp_check(line: str, setup: Sequence[str], raw: Raw) -> dict[str, str]:
    try:
        code = ast.parse(text_of(column("code")(raw)))
        defined = [node.name for node in code.body if isinstance(node, ast.FunctionDef)]
        used = {node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)}
    except SyntaxError as error:
        raise UnfitError(f"the code or a test is not Python: {error}") from None
    names = [name for name in defined if name in used]
    if not names:
        raise UnfitError(f"a test calls no function of the code: {shown(line)}")
    body = [f"{names[-1]} = candidate", *setup, line]
    return {
        "check": "def check(candidate):\n" + "\n".join(f"    {part}" for part in body),
        "entry_point": names[-1],
    }


def _is_comparison(line: str) -> bool:
    try:
        read_tests(_as_json([{"assert": line}]))
    except ValueError:
        return False
    return True


def _lines_of(raw: Raw, name: str) -> list[str]:
    lines = raw.get(name) or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UnfitError(f"{name} is not a list of lines: {shown(lines)}")
    return (
        [part for line in lines for part in line.strip().splitlines()]
        if name == "test_imports"
        else lines
    )


def _checked(tests: Any) -> list[Raw]:
    if not isinstance(tests, list) or not all(
        isinstance(t, Mapping) and "input" in t and "output" in t for t in tests
    ):
        raise UnfitError("the tests are not a list of input and output")
    return tests


def _as_json(tests: Sequence[Mapping[str, str]]) -> str:
    """Return the tests as the answer that the code grader reads; "" if there are none."""
    return msgspec.json.encode({"tests": tests}).decode() if tests else ""


def _test(test: Raw, named: str | None, raw: Raw) -> dict[str, str]:
    """Convert one test. In LiveCodeBench, a functional test's arguments are JSON
    values, one per line. In sets derived from APPS they are a list, and the result is
    wrapped in a list of one.
    """
    if test.get("testtype") == "functional":
        function = _decoded(raw.get("metadata"), "metadata")
        function = function.get("func_name") if isinstance(function, Mapping) else None
        arguments = [_decoded(line, "arguments") for line in str(test["input"]).split("\n")]
        return _call(function, arguments, _decoded(test["output"], "output"), raw)
    if named or test.get("type") == "function_call":
        wanted = test["output"]
        wanted = wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted
        return _call(named or test.get("fn_name"), test["input"], wanted, raw)
    return {"input": _lines(test["input"]), "output": _lines(test["output"])}


def _call(function: Any, arguments: Any, result: Any, raw: Raw) -> dict[str, str]:
    if (
        not isinstance(function, str)
        or not function.isidentifier()
        or not isinstance(arguments, list)
    ):
        raise UnfitError(
            "the tests call a function, but none is named, or its arguments are not a list"
        )
    prefix = "Solution()." if "class Solution" in str(raw.get("starter_code") or "") else ""
    return {
        "call": f"{prefix}{function}({', '.join(map(repr, arguments))})",
        "result": repr(result),
    }


def _lines(value: Any) -> str:
    """Return a program's input or output as text, from a text or a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, str):
        return value
    raise UnfitError(f"a test reads or prints what is not text: {shown(value)}")


def _decoded(value: Any, what: str) -> Any:
    """Decode JSON text; in some parts of DeepCoder the value is already an object."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise UnfitError(f"the {what} are not JSON: {error}") from None
