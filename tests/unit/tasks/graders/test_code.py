"""Programs graded by their tests: what is taken for the program, what passes, how tests
are written down.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.contracts import Grade
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.recipe import from_tree
from megarl.tasks.data import arithmetic_models
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.graders.code import UnitTest, passed, read_tests, same_text, same_value
from megarl.tasks.graders.fences import program_of
from megarl.tasks.graders.sandbox import Ran, Sandbox
from tests.unit.tasks.graders.asking import graders_of, prompt_of

PRINT = "print(1)\n"


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\nprint(1)\n```", PRINT),
        ("```\nprint(1)\n```", PRINT),
        ("Try\n```py\nprint(2)\n```\nBetter:\n```python\nprint(1)\n```\nDone.", PRINT),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("print(1)", None),
        ("`print(1)`", None),
        ("```print(1)```", None),
        ("```python\n```", None),
        ("```python\n```\n\n```\nprint(1)\n```\n```", PRINT),
        ("```python\nprint(1)\n```\nIt prints\n```\n1\n```", PRINT),
        # containers
        ("- here:\n  ```python\n  print(1)\n  ```", PRINT),
        ("- ```python\n  print(1)\n  ```", PRINT),
        ("1. here:\n\n    ```python\n    print(1)\n    ```\n\n2. Done.", PRINT),
        ("-\t```python\n\tprint(1)\n\t```", PRINT),
        ("> ```python\n> print(1)\n> ```", PRINT),
        ("- a\n  - ```python\n    print(1)\n    ```", PRINT),
        ("  ```python\n  print(1)\n  ```", PRINT),
        ("<answer>\n```python\nprint(1)\n```\n</answer>", PRINT),
        ("### Solution\n```python\nprint(1)\n```", PRINT),
        ("- item:\n    ```python\n    if x:\n    \ty()\n    ```", "if x:\n\ty()\n"),
        # fences
        ("````python\nprint(1)\n````", PRINT),
        ("~~~python\nprint(1)\n~~~", PRINT),
        ("```python\r\nprint(1)\r\n```\r\n", PRINT),
        ("```python\nprint(1)\n`````", PRINT),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("````markdown\n```python\nprint(1)\n```\n````", "```python\nprint(1)\n```\n"),
        ("~~~python\n```\n~~~", "```\n"),
        ("```python\n'''\n    ```\n'''\n```", "'''\n    ```\n'''\n"),
        ("```py\n1\n```py\n2\n```", "1\n```py\n2\n"),
        ("```py `1`\n```\n2\n```", "2\n"),
        ("```python\nprint(1)", "print(1)"),
        ("```python\nprint(2)\n```\nFinally:\n```python\nprint(1)\n", PRINT),
        # info strings
        ("```python3\nprint(1)\n```\nRun it:\n```bash\npython solution.py\n```", PRINT),
        ("``` Python 3\nprint(1)\n```\n```\n1\n```", PRINT),
        ("```{.python .numberLines}\nprint(1)\n```\n```\n1\n```", PRINT),
        ("```{python}\nprint(1)\n```\n```\n1\n```", PRINT),
        ("```python:solution.py\nprint(1)\n```\n```\n1\n```", PRINT),
        ('```PYTHON title="a"\nprint(1)\n```\n```\n1\n```', PRINT),
        ("```python\nprint(1)\n```\n```pycon\n>>> 1\n1\n```", PRINT),
    ],
)
def test_the_program_is_the_last_block_of_python(answer: str, program: str | None) -> None:
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("```python\nprint(1)\n```", PRINT),
        ("```python\nprint(1)\n```\nThis works, since", PRINT),
        ("```python\nprint(1)", None),
        ("```python\nprint(1)\n", None),
        ("```python\nprint(1)\n``", None),
        ("```python\nprint(1)\n```\nFinally:\n```python\nprint(2)\n", PRINT),
        ("- ```python\n  print(1)\n  ```", PRINT),
        ("```python", None),
    ],
)
def test_of_a_truncated_answer_only_closed_blocks_count(answer: str, program: str | None) -> None:
    assert program_of(answer, truncated=True) == program


def test_blocks_that_are_never_closed_take_no_longer_than_others() -> None:
    """An hour, if each searched all the text for its end."""
    fences = "```a\n" * 200_000
    assert program_of(fences, truncated=True) is None
    assert program_of(fences + "```", truncated=True) == "```a\n" * 199_999


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        (" 3 \n\n", "3", True),
        ("1 2\n3", "1  2\n3\n", True),
        ("0.50", "0.5", True),
        ("1e3", "1000", True),
        ("1\n2", "1 2", False),
        ("1 2", "1\n2", False),
        ("\n3", "3", True),
        ("0.5001", "0.5", False),
        # LiveCodeBench, issues 129 and 133; judges allow this much. A whole number is
        # exact.
        ("0.333333", "0.333333333333", True),
        ("6.000000000000001", "6.0", True),
        ("1000000.4", "1000000.0", True),
        ("0.33333", "0.333333333333", False),
        ("50000000000000001", "50000000000000000", False),
        ("3.0000001", "3", False),
        ("inf", "1.5", False),
        ("nan", "1.5", False),
        ("3 4", "3", False),
        ("", "3", False),
        ("", "", True),
        ("Yes", "yes", False),
        ("nan", "nan", True),
        ("NaN", "nan", True),
        ("nan", "1", False),
        ("sNaN", "nan", False),
        ("inf", "inf", True),
        ("Infinity 1", "inf 1.0", True),
        ("-inf", "inf", False),
        ("1e400", "inf", False),
        ("sNaN", "1", False),
        ("1e1000000", "1.5", False),  # beyond Decimal's range, as `print(2**3_400_000)` is
        ("1" * 1_000_002, "1.5", False),
    ],
)
def test_what_is_printed(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, [2]), [1, (2,)], True),
        ({"a": (1,)}, {"a": [1]}, True),
        (0.1 + 0.2, 0.3, True),
        (0.1, 0.2, False),
        (1, 1.0, True),
        (10**20, 10**20 + 1, False),
        ("1", 1, False),
        ([1], [1, 1], False),
        ({1, 2}, {2, 1}, True),
        (float("nan"), 1.0, False),
        (float("nan"), 1, False),
        ([float("nan")], (float("nan"),), True),
        (float("inf"), float("inf"), True),
        (float("-inf"), float("inf"), False),
        (1e308, float("inf"), False),
        (
            (-2 + 1e-16j,),
            (-2 + 2.4492935982947064e-16j,),
            True,
        ),  # MBPP's polar_rect, by another way
        (complex(-2), -2, True),
        (1 + 1e-3j, 1, False),
        (None, 0, False),
    ],
)
def test_values(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) is same


LEAVES = st.integers() | st.text() | st.floats() | st.complex_numbers() | st.none()


@given(st.recursive(LEAVES, st.lists, max_leaves=20))
def test_a_value_is_the_same_as_itself_and_its_repr_passes(value: Any) -> None:
    assert same_value(value, value)
    assert passed(UnitTest(call="f()", result=value), Ran(repr(value), "exit"))


@pytest.mark.parametrize(
    ("result", "shown", "passes"),
    [
        ("inf", "inf", True),
        ("-inf", "-inf", True),
        ("float('inf')", "inf", True),
        ("-float('inf')", "-inf", True),
        ("math.inf", "inf", True),
        ("[1, float('nan')]", "(1, nan)", True),
        ("{'a': np.nan}", "{'a': nan}", True),
        ("1e999", "inf", True),
        ("inf", "-inf", False),
        ("inf", "nan", False),
        ("inf", "'inf'", False),
        ("'inf'", "inf", False),
        ("nan", "0.0", False),
        ("inf", "float", False),
    ],
)
def test_a_result_that_is_not_finite(result: str, shown: str, passes: bool) -> None:
    rows = [{"call": "f()", "result": result}, {"assert": f"assert f() == {result}"}]
    for test in read_tests(written(*rows)):
        assert passed(test, Ran(shown, "exit")) is passes


@pytest.mark.parametrize(
    "shown",
    [
        "",
        "[",
        "f(1)",
        "9" * 5000,
        "[" * 5000,
        "__import__('os')",
        "\x00",
        "1 +",
        "{[]: 1}",
        "7" + " " * 100_000,
        "-" * 9999 + "7",
    ],
)
def test_what_is_no_literal_fails(shown: str) -> None:
    assert not passed(UnitTest(call="f()", result=7), Ran(shown, "exit"))


def test_a_number_that_no_float_can_be_is_another_one() -> None:
    assert not passed(UnitTest(call="f()", result=1.5), Ran("1" + "0" * 400, "exit"))


def test_a_program_that_met_a_limit_or_failed_does_not_pass() -> None:
    test = UnitTest(printed="7")
    assert passed(test, Ran("7\n", "exit"))
    assert not passed(test, Ran("7\n", "exit", status=1))
    assert not passed(test, Ran("7\n", "time"))
    assert not passed(test, Ran("7\n", "output"))


def written(*rows: dict[str, str]) -> str:
    return json.dumps({"tests": rows})


def test_four_kinds_of_tests() -> None:
    check = "import math\n\ndef check(candidate):\n    assert math.isclose(candidate(1), 2)\n"
    assert read_tests(
        written(
            {"input": "1 2", "output": "3"},
            {"call": "f(1)", "result": "[1, 2]"},
            {"assert": "assert f(1, 'a') == {'x': -1}"},
            {"check": check, "entry_point": "f"},
        )
    ) == (
        UnitTest(stdin="1 2", printed="3"),
        UnitTest(call="f(1)", result=[1, 2]),
        UnitTest(call="f(1, 'a')", result={"x": -1}),
        UnitTest(check=check, entry_point="f"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("7", "is not"),
        ("{", "is not"),
        (written(), "has no tests"),
        (written({"input": "1"}), "test 0: give input and output"),
        (written({"input": "1", "output": "2", "timeout": "3"}), "test 0: give"),
        (written({"call": "", "result": "2"}), "test 0: give"),
        (written({"call": "f()", "result": "g()"}), "'g\\(\\)' is not a Python literal"),
        (
            written({"input": "", "output": ""}, {"assert": "assert f(1)"}),
            "test 1: .* is not `assert CALL == LITERAL`",
        ),
        (written({"assert": "assert f(1) == 1; x = 2"}), "is not `assert"),
        (written({"assert": "assert f(1) == g(1)"}), "is not a Python literal"),
        (
            written({"check": "def check(c): pass"}),
            "test 0: give input and output, call and result, check and entry_point",
        ),
        (written({"check": "def check(c): pass", "entry_point": "f()"}), "test 0: give"),
        (
            written({"check": "def check(c)", "entry_point": "f"}),
            "test 0: the check is not Python: expected ':'",
        ),
        (
            written({"check": "assert f(1) == 2", "entry_point": "f"}),
            "test 0: the check defines no function `check`",
        ),
        (
            written(
                {
                    "check": "import os.path\nfrom numpy import array\ndef check(c): pass",
                    "entry_point": "f",
                }
            ),
            "test 0: the check imports numpy; only the standard library is there",
        ),
    ],
)
def test_tests_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tests(text)


def test_a_data_set_with_such_tests_is_refused(tmp_path: Path) -> None:
    made = arithmetic_models.character_tokenizer()
    tokenizer = Tokenizer(made.backend_tokenizer, made.eos_token_id, Path())
    rows = [{"id": "a", "prompt": "1+1=", "answer": written({"call": "f()", "result": "2"})}]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(rows[0]))
    heldout = tmp_path / "h.jsonl"
    heldout.write_text(json.dumps(rows[0] | {"prompt": "1+2="}))
    task = {"train": str(file), "heldout": str(heldout), "grader": "code"}
    recipe = from_tree({"data": {"tasks": {"code": task}}, "length": {"prompt_tokens": 16}})
    assert len(load_tasks(recipe, tokenizer)["code"].train) == 1
    file.write_text(json.dumps(rows[0] | {"answer": "2"}))
    with pytest.raises(MegarlError, match=r"p.jsonl:1: the answer of 'a' is not \{"):
        load_tasks(recipe, tokenizer)


def test_answers_are_graded() -> None:
    try:
        Sandbox("bubblewrap", 1).check()
    except MegarlError as error:
        pytest.skip(str(error))
    add = written({"call": "add(1, 2)", "result": "3"}, {"call": "add('a', 'b')", "result": "'ab'"})
    sums = written({"input": "1 2\n", "output": "3\n"}, {"input": "3 4\n", "output": "7\n"})
    least = written({"call": "least([])", "result": "inf"}, {"call": "least([2])", "result": "2"})
    right = Grade(1.0, True, True)
    wrong = Grade(-1.0, False, True)
    cases = [
        ("```python\ndef add(a, b):\n    print('hello')\n    return a + b\n```", add, right),
        ("```python\ndef add(a, b):\n    return 3\n```", add, wrong),
        ("```python\ndef add(a, b:\n```", add, wrong),
        ("```python\nprint(sum(map(int, input().split())))\n```", sums, right),
        ("```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```", sums, right),
        ("```python\nprint(3)\n```", sums, wrong),
        ("```python\nprint(sum(map(int, input().split())))\nraise SystemExit(1)\n```", sums, wrong),
        ("the sum", sums, wrong),
        ("- ```python\n  def add(a, b):\n      return a + b\n  ```", add, right),
        ("~~~py\ndef least(xs):\n    return min(xs, default=float('inf'))\n~~~", least, right),
        (
            f"```python\nprint('7' * {(1 << 20) + 7})\n```",
            written({"input": "", "output": "7" * ((1 << 20) + 7)}),
            right,
        ),
        (
            "```python\nprint('7' * (1 << 22))\n```",
            written({"input": "", "output": "7" * 7}),
            wrong,
        ),
    ]

    async def run() -> list[Grade]:
        grader = graders_of("code")["task"]
        return list(
            await asyncio.gather(*(grader.grade("</think>" + a, prompt_of(e)) for a, e, _ in cases))
        )

    assert asyncio.run(run()) == [grade for _, _, grade in cases]
