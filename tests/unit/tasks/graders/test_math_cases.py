"""The math grader against the verdicts of a mathematics teacher."""

import pytest

from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import same_in_mathematics
from tests.unit.tasks.graders.math_cases import CASES, Case
from tests.unit.tasks.graders.math_pairs import RIGHT, WRONG

FEWEST_CASES = 520
FEWEST_OF_A_KIND = 15


def test_the_tables_are_large_and_no_answer_is_there_twice() -> None:
    answers = [(case.answer, case.gold) for cases in CASES.values() for case in cases]
    assert len(answers) >= FEWEST_CASES
    assert len({*answers, *RIGHT, *WRONG}) == len(answers) + len(RIGHT) + len(WRONG)
    assert all(len(cases) >= FEWEST_OF_A_KIND for cases in CASES.values())


def test_every_gold_answer_has_wrong_answers() -> None:
    cases = [case for cases in CASES.values() for case in cases]
    assert {case.gold for case in cases} == {case.gold for case in cases if not case.right}


@pytest.mark.parametrize("kind", CASES)
def test_the_verdict_is_the_teacher_s(kind: str) -> None:
    judged_right = {case: is_right(case) for case in CASES[kind]}
    false_rights = [case for case, right in judged_right.items() if right and not case.right]
    false_wrongs = [case for case, right in judged_right.items() if case.right and not right]
    assert false_rights + false_wrongs == [], (
        f"{len(false_rights)} false rights, {len(false_wrongs)} false wrongs"
    )


def is_right(case: Case) -> bool:
    """Return whether the grader counts the answer as right; one that it cannot judge is
    not.
    """
    return same_in_mathematics(Submission(case.answer, case.gold)) is True
