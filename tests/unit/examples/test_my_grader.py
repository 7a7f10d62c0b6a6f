"""The grader in examples/, which people copy: what it pays for, and that a recipe can
name it.
"""

from pathlib import Path

import pytest

from megarl.core.base.process import imported
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import check_importable

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("57", "57", True),
        ("30 + 27 = 57.", "57", True),
        ("It is 1,234.50", "1234.5", True),
        ("19-2=17", "17", True),
        ("5-2", "2", True),
        ("the result is -2", "-2", True),
        ("-2", "2", False),
        ("57 or 58", "57", False),
        ("To calculate the sum of 30 + 27, we'll need to", "57", False),
        ("I do not know", "57", False),
        ("", "57", False),
    ],
)
def test_it_says_right_or_wrong(
    answer: str, expected: str, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    grade = imported("my_grader:last_number")
    assert grade(submission(answer, expected, truncated=False)) is right
    assert grade(submission(answer, expected, truncated=True)) is False


def submission(answer: str, expected: str, truncated: bool) -> Submission:
    return Submission(
        task="sums",
        prompt="?",
        completion=answer,
        answer=answer,
        expected=expected,
        truncated=truncated,
    )


def test_a_recipe_can_name_it_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    check_importable("data.tasks.sums.grader:", "my_grader:last_number")
