"""The math grader against tables of answers written by hand;
hostile ones cost little.
"""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.core.base.contracts import Grade, Verdict
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import same_in_mathematics
from megarl.tasks.graders.math import has_complete_answer, is_equal, readable
from megarl.tasks.graders.math.compare import Comparison
from megarl.tasks.graders.math.formulas import Apply, integer
from megarl.tasks.graders.math.kinds import Expression, Listing
from megarl.tasks.graders.pool import Pool
from megarl.tasks.graders.worker import TimeUp, judge
from tests.unit.tasks.graders.asking import graders_of, prompt_of
from tests.unit.tasks.graders.math_forms import FORMS, Form
from tests.unit.tasks.graders.math_pairs import HOSTILE, RIGHT, WRONG
from tests.unit.tasks.graders.math_questions import QUESTIONS

LIMIT_S = 10.0


@pytest.fixture
def alarm() -> Iterator[None]:
    """The worker's signal handler, in this process."""

    def time_up(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, time_up)
    yield
    signal.signal(signal.SIGALRM, before)


def test_the_table_is_large() -> None:
    assert len(RIGHT) + len(WRONG) + len(HOSTILE) >= 150
    assert len({*RIGHT, *WRONG, *HOSTILE}) == len(RIGHT) + len(WRONG) + len(HOSTILE)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    ("pairs", "expected"), [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"]
)
def test_the_table(pairs: tuple[tuple[str, str], ...], expected: bool) -> None:
    verdicts = {pair: judge(same_in_mathematics, Submission(*pair), 20.0) for pair in pairs}
    assert {
        pair: found for pair, found in verdicts.items() if (found.score > 0) is not expected
    } == {}
    assert not any(found.timeout for found in verdicts.values())


@pytest.mark.parametrize("forms", [FORMS, QUESTIONS], ids=["forms", "questions"])
def test_all_forms_of_answers(forms: list[Form]) -> None:
    assert [
        form for form in forms if is_equal(form.answer, form.gold, form.prompt) is not form.right
    ] == []


def test_the_work_on_a_set_grows_with_its_length() -> None:
    roots = [Expression(Apply("sqrt", (integer(n),))) for n in range(2, 102)]
    shorter = Comparison()
    assert shorter.same(Listing(tuple(roots[:50])), Listing(tuple(reversed(roots[:50]))))
    longer = Comparison()
    assert longer.same(Listing(tuple(roots)), Listing(tuple(reversed(roots))))
    assert longer.steps <= 2.5 * shorter.steps
    assert not Comparison().same(Listing(tuple(roots)), Listing((*roots[1:], roots[1])))


@pytest.mark.parametrize(
    ("gold", "can_be_read"),
    [
        *(
            (gold, True)
            for gold in (
                r"2\sqrt{3}",
                "√2",
                "(1+√5)/2",
                "1½",
                "Monday",
                "see figure",
                r"\textbf{(C)}\ 12",
            )
        ),
        *(
            (gold, True)
            for gold in (
                "1e-07",
                r"\{x \mid x > 3\}",
                "#### 72",
                r"\boxed{85}",
                "$x = 5$",
                r"\$12.50",
            )
        ),
        *(
            (gold, False)
            for gold in (
                "((((",
                r"\frac{}{}",
                r"7 \to 5",
                "",
                " ",
                r"\foo{3} 5",
                "8 5",
                "8" * 100_000,
            )
        ),
        *(
            (gold, False)
            for gold in (
                r"2 \text{ red and } 3 \text{ blue}",
                r"\int_0^1 x\,dx",
                "2 + ",
                "{" * 10_000,
            )
        ),
    ],
)
def test_what_can_be_read(gold: str, can_be_read: bool) -> None:
    assert readable(gold) is can_be_read


@pytest.mark.parametrize(
    "gold", ["((((", r"2 \text{ red and } 3 \text{ blue}", r"\frac{}{}", r"\int_0^1 x\,dx"]
)
def test_what_cannot_be_read_equals_the_same_text_alone(gold: str) -> None:
    assert is_equal(rf"\boxed{{{gold}}}" if gold != "((((" else gold, gold) is True
    assert is_equal(r"\boxed{2}", gold) is False
    assert is_equal(r"\boxed{0}", gold) is False


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        (r"So \boxed{85}", True),
        (r"So \boxed{85", False),
        (r"\boxed{5}, so the area is \boxed{\frac{1}{2}", False),
        ("<answer>85</answer>", True),
        ("<answer>85", False),
        ("<answer>8</answer><answer>85", False),
        ("Answer: 85\n", True),
        ("Answer: 85", False),
        ("#### 85\n", True),
        ("#### 8", False),
        ("The answer is 85.\nIndeed", True),
        ("The answer is 8", False),
        ("Answer:\n", False),
        ("We need 85\nmore", False),
        ("", False),
    ],
)
def test_whether_a_text_that_was_cut_off_states_its_answer(text: str, complete: bool) -> None:
    assert has_complete_answer(text) is complete


def test_the_grader_knows_the_question() -> None:
    asked = Submission(r"\boxed{30 + 27}", "57", prompt="What is 30 + 27?")
    assert same_in_mathematics(asked) is False
    assert same_in_mathematics(asked._replace(prompt="How many are they?")) is True
    wugs = Submission(r"\boxed{12 \text{ wugs}}", "12", prompt="How many wugs are there?")
    assert same_in_mathematics(wugs) is True
    assert same_in_mathematics(wugs._replace(prompt="")) is False
    metres = Submission(r"\boxed{12 m}", "12", prompt="How long is the rope?")
    assert same_in_mathematics(metres) is True
    assert same_in_mathematics(metres._replace(prompt="Express it by $m$.")) is False


@pytest.mark.usefixtures("alarm")
def test_an_answer_of_two_numbers_is_right_for_one_at_most() -> None:
    """Else a policy would give several in the hope that one is right."""
    ways = [
        "N",
        "$N$",
        r"\frac{N}{1}",
        r"N\%",
        "N cm",
        "**N**",
        r"\boxed{N}",
        r"\(N\)",
        r"\fbox{N}",
        r"\sqrt{N^2}",
    ]
    between = [" or ", r" \approx ", " is wrong. ", ". The answer is ", r"\text{ but } "]
    for first, middle, last in itertools.product(ways, between, ways):
        answer = first.replace("N", "5") + middle + last.replace("N", "7")
        verdicts = [
            judge(same_in_mathematics, Submission(answer, number), 20.0) for number in ("5", "7")
        ]
        assert sum(verdict.score > 0 for verdict in verdicts) <= 1, answer


def test_hostile_answers_are_wrong_without_much_work(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def run() -> tuple[list[Verdict], Verdict, int]:
        pool = Pool(2, limit_s=LIMIT_S)
        try:
            verdicts = await asyncio.gather(*(pool.check(Submission(*pair)) for pair in HOSTILE))
            after = await pool.check(Submission("7", "7"))
            return verdicts, after, len(pool._workers)
        finally:
            pool.close()

    verdicts, after, workers = asyncio.run(asyncio.wait_for(run(), 120))
    assert [pair for pair, found in zip(HOSTILE, verdicts, strict=True) if found.score > 0] == []
    assert not any(
        found.timeout or found.error for found in verdicts
    )  # the work on an answer is limited
    assert (after.score, workers) == (1.0, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alarm")
def test_what_the_grader_raises_is_an_error_of_the_answer() -> None:
    def fails(*_: Any) -> bool:
        raise RecursionError("too deep")

    assert judge(fails, Submission("7", "7"), 1.0) == Verdict(
        -1.0, error="RecursionError: too deep"
    )


def test_only_what_stands_behind_the_thinking_trace_counts() -> None:
    cases = {
        r"<think>It is 84, \boxed{84}.</think>\boxed{85}": Grade(1.0, True, True),
        r"<think>It is \boxed{85}.</think>\boxed{84}": Grade(-1.0, False, True),
        r"\boxed{85}": Grade(-1.0, False, False),
        r"<think>\boxed{85}": Grade(-1.0, False, False),
        r"<think>\boxed{85}</think>": Grade(-1.0, False, False),
        r"</think>\boxed{85}": Grade(1.0, True, True),
    }

    async def run() -> dict[str, Grade]:
        graders = graders_of("math")
        try:
            return {text: await graders["task"].grade(text, prompt_of("85")) for text in cases}
        finally:
            graders.close()

    assert asyncio.run(run()) == cases
