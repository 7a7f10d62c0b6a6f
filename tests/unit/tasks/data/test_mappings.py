"""Each ready mapping on rows in its set's published schema (written here; sources of
the schemas: mappings.py).
"""

import json
import math
from typing import Any, get_args

import pytest

from megarl.core.base.contracts import last_box
from megarl.core.recipe import Task
from megarl.tasks.data.mappings import MAPPINGS, PromptRow, UnfitError, mapping_of, read_own

HELPED = 'def helper(n):\n    return n + 1\n\n\ndef f(n):\n    """The same as helper."""\n'
STDIN = [{"input": "1 2\n", "output": "3\n"}]


def user(text: str) -> list[dict[str, str]]:
    return [{"content": text, "role": "user"}]


def dapo(text: str, answer: Any) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": user(text),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }


def unit_tests_in(*rows: Any) -> str:
    return json.dumps({"tests": rows}, separators=(",", ":"))


CASES = [
    (
        "polaris",
        {"problem": "How many?", "answer": "\\frac{1}{2}", "difficulty": "3/8"},
        "How many?",
        "\\frac{1}{2}",
        5,
    ),
    ("polaris", {"problem": "Hard?", "answer": "7", "difficulty": "0/8"}, "Hard?", "7", 8),
    (
        "deepscaler",
        {"problem": "P", "answer": "-\\sqrt{3}", "solution": "so"},
        "P",
        "-\\sqrt{3}",
        0,
    ),
    ("deepscaler", {"problem": "P", "answer": 25.0, "solution": ""}, "P", "25", 0),
    (
        "dapo-math-17k",
        dapo("Solve … Answer: $Answer\n\nP", "34"),
        "Solve … Answer: $Answer\n\nP",
        "34",
        0,
    ),
    ("gsm8k", {"question": "Q?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 72"}, "Q?", "72", 0),
    ("gsm8k", {"question": "Q?", "answer": "much\n#### 1,234,000"}, "Q?", "1234000", 0),
    (
        "math",
        {
            "problem": "P",
            "level": "Level 5",
            "type": "Algebra",
            "solution": r"\boxed{1} or $\boxed{\frac{3}{4}}$.",
        },
        "P",
        r"\frac{3}{4}",
        5,
    ),
    (
        "math",
        {"problem": "P", "level": "Level ?", "type": "Geometry", "solution": r"\fbox 7$"},
        "P",
        "7",
        0,
    ),
    (
        "math",
        {
            "problem": "P",
            "solution": r"$\boxed{9}$",
            "answer": "9",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "t/1",
        },
        "P",
        "9",
        2,
    ),
    (
        "deepcoder",  # primeintellect
        {
            "problem": "Add.",
            "solutions": ["s"],
            "tests": json.dumps([STDIN[0] | {"type": "stdin_stdout", "fn_name": None}]),
        },
        "Add.",
        unit_tests_in(*STDIN),
        0,
    ),
    (
        "deepcoder",  # primeintellect, a function
        {
            "problem": "Add.",
            "tests": json.dumps(
                [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]
            ),
        },
        "Add.",
        unit_tests_in({"call": "add(1, 2)", "result": "3"}),
        0,
    ),
    (
        "deepcoder",  # taco
        {"problem": "Add.", "tests": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
        "Add.",
        unit_tests_in(*STDIN),
        0,
    ),
    (
        "deepcoder",  # taco, lines as a list
        {"problem": "Add.", "tests": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]})},
        "Add.",
        unit_tests_in({"input": "1\n2", "output": "3"}),
        0,
    ),
    (
        "deepcoder",  # taco, a function
        {
            "problem": "Add.",
            "tests": json.dumps(
                {"fn_name": "add", "inputs": [[1, None]], "outputs": [[["a", True]]]}
            ),
        },
        "Add.",
        unit_tests_in({"call": "add(1, None)", "result": "['a', True]"}),
        0,
    ),
    (
        "deepcoder",  # lcbv5, a function
        {
            "problem": "Add.",
            "starter_code": "class Solution:\n    def add(self, a, b):",
            "tests": json.dumps([{"input": "1\n[2]", "output": '"3"', "testtype": "functional"}]),
            "metadata": {"func_name": "add"},
        },
        "Add.\n\nBegin with this code:\n```python\nclass Solution:\n    def add(self, a, b):\n```",
        unit_tests_in({"call": "Solution().add(1, [2])", "result": "'3'"}),
        0,
    ),
    (
        "deepcoder",  # lcbv5
        {
            "problem": "Add.",
            "starter_code": "",
            "metadata": '{"func_name": null}',
            "tests": json.dumps([STDIN[0] | {"testtype": "stdin"}]),
        },
        "Add.",
        unit_tests_in(*STDIN),
        0,
    ),
    (
        "humaneval",
        {
            "task_id": "Made/32",
            "prompt": HELPED,
            "canonical_solution": "    return helper(n)\n",
            "test": "\n\ndef check(f):\n    assert f(2) == helper(2)\n",
            "entry_point": "f",
        },
        HELPED,
        unit_tests_in(
            {
                "check": HELPED + "\n\n\n\ndef check(f):\n    assert f(2) == helper(2)\n",
                "entry_point": "f",
            }
        ),
        0,
    ),
]


@pytest.mark.parametrize(("name", "raw", "prompt", "answer", "difficulty"), CASES)
def test_a_published_row(
    name: str, raw: dict[str, Any], prompt: str, answer: Any, difficulty: float | None
) -> None:
    row = mapping_of(name, {})(raw)
    assert (row.prompt, row.answer, row.difficulty) == (prompt, answer, difficulty)
    assert row.id


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        (
            "polaris",
            {"problem": "P", "answer": "1", "difficulty": "easy"},
            "not a pass rate such as 5/8",
        ),
        (
            "deepscaler",
            {"question": "P", "answer": "1"},
            "no column 'problem'; the row has question, answer",
        ),
        (
            "dapo-math-17k",
            dapo("P", "1") | {"prompt": [*user("a"), 3]},
            "not a list of role and content",
        ),
        ("dapo-math-17k", dapo("P", {"a": 1}), "neither text nor a number"),
        ("gsm8k", {"question": "Q", "answer": "72"}, "no ####"),
        ("math", {"problem": "P", "level": "Level 1", "solution": "9"}, "no .boxed"),
        ("deepcoder", {"problem": "P", "tests": "["}, "not JSON"),
        (
            "deepcoder",
            {"problem": "P", "tests": '[{"input": 1}]'},
            "not a list of input and output",
        ),
        (
            "deepcoder",
            {"problem": "P", "tests": '{"inputs": [1], "outputs": []}'},
            "different numbers of inputs and outputs",
        ),
        (
            "deepcoder",
            {"problem": "P", "tests": '[{"input": 1, "output": 2, "testtype": "functional"}]'},
            "none is named",
        ),
    ],
)
def test_what_is_not_of_the_schema_says_how(name: str, raw: dict[str, Any], words: str) -> None:
    with pytest.raises(UnfitError, match=words):
        mapping_of(name, {})(raw)


def test_empty_answers_stay_empty_for_the_survey_to_count() -> None:
    assert (
        mapping_of("deepscaler", {})({"problem": "P", "answer": None, "solution": ""}).answer == ""
    )
    assert mapping_of("deepcoder", {})({"problem": "P", "tests": "[]"}).answer == ""


def test_columns_of_a_recipe_go_before_the_mapping() -> None:
    raw = {"problem": "P", "solution": {"final": 4}, "level": "Level 3", "uid": 17}
    columns: dict[Any, str] = {
        "prompt": "problem",
        "answer": "solution.final",
        "difficulty": "level",
        "id": "uid",
    }
    assert mapping_of("", columns)(raw) == PromptRow("17", "P", "4", 3)
    of_floats = raw | {
        "solution": {"final": 4.0},
        "level": 3.0,
    }  # as pandas writes a column in which some are missing
    assert mapping_of("", columns)(of_floats) == PromptRow("17", "P", "4", 3)
    missing = raw | {"solution": {"final": math.nan}, "level": math.nan}
    assert mapping_of("", columns)(missing) == PromptRow("17", "P", "", 0)
    mixed = mapping_of("gsm8k", {"prompt": "text", "answer": "", "difficulty": "", "id": ""})
    assert mixed({"text": "T", "answer": "#### 1"}).prompt == "T"
    assert mapping_of("", dict.fromkeys(columns, "")) is read_own


def test_a_prompt_without_an_id_is_named_after_its_text_alone() -> None:
    read = mapping_of("", {"prompt": "q", "answer": "a"})
    one, other, third = (
        read({"q": q, "a": a}) for q, a in (("x  y", "1"), ("x y", "2"), ("xy", "1"))
    )
    assert one.id == other.id != third.id


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{a{b}c} end", "a{b}c"),
        (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed 5 is", "5"),
        (r"\boxedx{1}", None),
        (r"\boxed{open", None),
        ("none", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, found: str | None) -> None:
    assert last_box(text) == found


def test_the_recipe_knows_every_mapping() -> None:
    assert set(get_args(Task.model_fields["mapping"].annotation)) == {
        "",
        *MAPPINGS,
    }
