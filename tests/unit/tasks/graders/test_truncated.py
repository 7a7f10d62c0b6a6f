"""Answers that a length limit cut off: what counts in them,
and which graders are told.
"""

import asyncio
import json
from pathlib import Path

import pytest

from megarl.core.base.contracts import RIGHT, WRONG, Verdict
from megarl.core.recipe import from_tree
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.grader import TaskGraders, unless_cut_off
from tests.unit.tasks.graders.asking import decode, prompt_of, why_not

COMPLETE = [
    r"\boxed{7}",
    r"So \boxed{7}. To check it, we",
    "Answer: 7\nTo check it, we",
    "<answer>7</answer> and",
]
CUT_OFF = [
    "7",
    "The answer is 7",
    r"\boxed{7",
    "Answer: 7",
    r"\boxed{7}, or rather \boxed{8",
    "<answer>7",
    "To find 3 + 4, we",
]
OWN_GRADER = "def is_whole(submission):\n    return not submission.truncated\n"


async def yes(submission: Submission) -> Verdict:
    return Verdict(RIGHT)


@pytest.mark.parametrize(
    ("answers", "truncated", "score"),
    [(COMPLETE, True, RIGHT), (CUT_OFF, True, WRONG), (CUT_OFF, False, RIGHT)],
)
def test_only_a_complete_box_or_answer_line_counts(
    answers: list[str], truncated: bool, score: float
) -> None:
    async def scores() -> dict[str, float]:
        check = unless_cut_off(yes)
        asked = {answer: Submission(answer, "7", truncated=truncated) for answer in answers}
        return {answer: (await check(submission)).score for answer, submission in asked.items()}

    assert asyncio.run(scores()) == dict.fromkeys(answers, score)


def correct(
    grader: str, answer: str, expected: str, truncated: bool, grade_truncated: bool = False
) -> bool:
    """Return whether a task's grader takes the answer for right."""
    task = {"train": "a.jsonl", "heldout": "b.jsonl", "grader": grader}
    tree = {"data": {"tasks": {"task": task}}, "length": {"grade_truncated": grade_truncated}}

    async def run() -> bool:
        graders = TaskGraders(from_tree(tree), decode, workers=1)
        try:
            asked = graders["task"].grade(answer, prompt_of(expected), truncated=truncated)
            return (await asked).correct
        finally:
            graders.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("truncated", "grade_truncated", "right"),
    [(False, False, True), (True, False, False), (True, True, True)],
)
@pytest.mark.processes
def test_the_recipe_decides_how_truncated_answers_are_graded(
    truncated: bool, grade_truncated: bool, right: bool
) -> None:
    answers = {"exact": ("</think>7", "7"), "math": ("</think>It is 7", "7")}
    if not why_not("bubblewrap"):
        tests = json.dumps({"tests": [{"input": "", "output": "7\n"}]})
        answers["code"] = ("</think>```python\nprint(7)\n", tests)
    found = {
        grader: correct(grader, answer, expected, truncated, grade_truncated)
        for grader, (answer, expected) in answers.items()
    }
    assert found == dict.fromkeys(answers, right)


@pytest.mark.processes
@pytest.mark.parametrize("truncated", [False, True])
def test_a_grader_of_ones_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncated: bool
) -> None:
    (tmp_path / "my_endings.py").write_text(OWN_GRADER)
    monkeypatch.chdir(tmp_path)
    assert correct("my_endings:is_whole", "</think>7", "", truncated) is not truncated
