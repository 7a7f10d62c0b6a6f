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
from megarl.tasks.data.rows import Raw, UnfitError, abbreviated
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
        """Return a row's problem, with its starter code in a block."""
        problem = text_of(column(path)(raw))
        starter = raw.get("starter_code")
        if not starter:
            return problem
        return f"{problem}\n\nBegin with this code:\n```python\n{starter}\n```"

    return prompt


def unit_tests(raw: Raw) -> str:
    """Read the tests of DeepCoder's four parts; return them in the code grader's
    format, as JSON:

    {"tests": [{"input": "1 2\\n", "output": "3\\n"}]}   a program's stdin and stdout
    {"tests": [{"call": "add(1, 2)", "result": "3"}]}   a function's call
    """
    tests = _decoded(column("tests")(raw), "tests")
    function = None
    if isinstance(tests, Mapping):  # TACO: columns of inputs and outputs
        function = tests.get("fn_name")
        tests = _from_columns(tests.get("inputs", []), tests.get("outputs", []))
    return _as_json([_test(test, function, raw) for test in _checked(tests)])


def _from_columns(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Raw]:
    """Return tests whose inputs and outputs are two lists. UnfitError if these differ
    in length.
    """
    if len(inputs) != len(outputs):
        raise UnfitError("the tests have different numbers of inputs and outputs")
    pairs = zip(inputs, outputs, strict=True)
    return [{"input": test_input, "output": output} for test_input, output in pairs]


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
    """Return the value whose pickle, compressed by zlib, is this base64 text.
    UnfitError if it is malformed, or longer than LARGEST_TESTS.
    """
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(base64.b64decode(text, validate=True), LARGEST_TESTS)
        if decompressor.unconsumed_tail:  # what is left beyond the limit
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
    prompt = text_of(column("prompt")(raw))
    test = text_of(column("test")(raw))
    entry_point = text_of(column("entry_point")(raw))
    return _as_json([{"check": f"{prompt}\n\n{test}", "entry_point": entry_point}])


def mbpp_prompt(raw: Raw) -> str:
    """Read an MBPP prompt: the task (`text`, or `prompt` in the sanitised part) and the
    tests; only these name the function.
    """
    task = text_of(raw["text"] if "text" in raw else column("prompt")(raw))
    tests = "\n".join(_lines_of(raw, "test_list"))
    return f"{task}\nYour code should pass these tests:\n```python\n{tests}\n```"


def mbpp_tests(raw: Raw) -> str:
    """Read MBPP tests, each an assertion; one that needs setup code, or compares no
    call with a literal, becomes a `check`.
    """
    setup = []
    for statement in _lines_of(raw, "test_imports"):
        setup += statement.strip().splitlines()
    setup += str(raw.get("test_setup_code") or "").splitlines()
    tests = []
    for line in _lines_of(raw, "test_list"):
        if not setup and _is_comparison(line):
            tests.append({"assert": line})
        else:
            tests.append(_mbpp_check(line, setup, raw))
    return _as_json(tests)


def _mbpp_check(line: str, setup: Sequence[str], raw: Raw) -> dict[str, str]:
    """Return an assertion as a test of kind `check`: a function of `candidate` with the
    lines of `setup`, then the assertion. The function tested is the last one defined in
    the row's code that the assertion names. UnfitError if it names none, or one of both
    is not Python.
    """
    try:
        code = ast.parse(text_of(column("code")(raw)))
        defined = [node.name for node in code.body if isinstance(node, ast.FunctionDef)]
        nodes = ast.walk(ast.parse(line))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
    except SyntaxError as error:
        raise UnfitError(f"the code or a test is not Python: {error}") from None
    names = [name for name in defined if name in used]
    if not names:
        raise UnfitError(f"a test calls no function of the code: {abbreviated(line)}")
    function = names[-1]
    check = ["def check(candidate):"]
    for statement in (f"{function} = candidate", *setup, line):
        check.append(f"    {statement}")
    return {"check": "\n".join(check), "entry_point": function}


def _is_comparison(line: str) -> bool:
    """Return whether the code grader takes an assertion as it is: `assert CALL ==
    LITERAL`.
    """
    try:
        read_tests(_as_json([{"assert": line}]))
    except ValueError:
        return False
    return True


def _lines_of(raw: Raw, name: str) -> list[str]:
    """Return the texts in a column; [] if the row lacks it. UnfitError if it has
    anything but a list of texts.
    """
    lines = raw.get(name) or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UnfitError(f"{name} is not a list of lines: {abbreviated(lines)}")
    return lines


def _checked(tests: Any) -> list[Raw]:
    """Return the tests. UnfitError if they are not a list of input and output."""
    if not isinstance(tests, list) or not all(map(_is_test, tests)):
        raise UnfitError("the tests are not a list of input and output")
    return tests


def _is_test(test: Any) -> bool:
    return isinstance(test, Mapping) and "input" in test and "output" in test


def _as_json(tests: Sequence[Mapping[str, str]]) -> str:
    """Return the tests as the answer that the code grader reads; "" if there are none:
    such a row is left out for its empty answer.
    """
    if not tests:
        return ""
    return msgspec.json.encode({"tests": tests}).decode()


def _test(test: Raw, function: str | None, raw: Raw) -> dict[str, str]:
    """Convert one test, of a function or of a whole program, to the code grader's
    format. function: the one that all tests call, None if they do not name it. raw: the
    test's row.

    In LiveCodeBench, a functional test's arguments are JSON values, one per line. In
    sets derived from APPS they are a list, and the result is wrapped in a list of one.
    """
    if test.get("testtype") == "functional":
        metadata = _decoded(raw.get("metadata"), "metadata")
        name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
        arguments = [_decoded(line, "arguments") for line in str(test["input"]).split("\n")]
        return _call(name, arguments, _decoded(test["output"], "output"), raw)
    if function or test.get("type") == "function_call":
        result = test["output"]
        if isinstance(result, list) and len(result) == 1:
            result = result[0]
        return _call(function or test.get("fn_name"), test["input"], result, raw)
    return {"input": _lines(test["input"]), "output": _lines(test["output"])}


def _call(function: Any, arguments: Any, result: Any, raw: Raw) -> dict[str, str]:
    """Return a test that calls a function, or a method of `Solution` if the row's
    starter code has this class. result: the value expected. UnfitError if no function
    is named, or the arguments are not a list.
    """
    is_named = isinstance(function, str) and function.isidentifier()
    if not is_named or not isinstance(arguments, list):
        raise UnfitError(
            "the tests call a function, but none is named, or its arguments are not a list"
        )
    prefix = ""
    if "class Solution" in str(raw.get("starter_code") or ""):
        prefix = "Solution()."
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
    raise UnfitError(f"a test reads or prints what is not text: {abbreviated(value)}")


def _decoded(value: Any, name: str) -> Any:
    """Decode JSON text; in some parts of DeepCoder the value is already an object.
    name: for the error.
    """
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise UnfitError(f"the {name} are not JSON: {error}") from None
