"""The math grader against a table of answers written by hand; hostile ones cost their time limit and nothing else."""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from megarl.core.base.contracts import Grade, Verdict
from megarl.tasks.graders.answer import Submission
from megarl.tasks.graders.functions import same_in_mathematics
from megarl.tasks.graders.pool import Pool
from megarl.tasks.graders.worker import TimeUp, judge
from tests.unit.tasks.graders.asking import graders_of, prompt_of
from tests.unit.tasks.graders.math_pairs import HOSTILE, KNOWN, RIGHT, WRONG

LIMIT_S, TRIES = 0.5, 20


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
@pytest.mark.parametrize(("pairs", "expected"), [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
def test_the_table(pairs: tuple[tuple[str, str], ...], expected: bool) -> None:
    verdicts = {pair: judge(same_in_mathematics, Submission(*pair), 20.0) for pair in pairs}
    assert {pair: found for pair, found in verdicts.items() if (found.score > 0) is not expected} == {}
    assert not any(found.timeout for found in verdicts.values())


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("answer", "expected", "verdict", "why"), KNOWN)
def test_what_math_verify_is_known_to_get_wrong(answer: str, expected: str, verdict: bool, why: str) -> None:
    found = judge(same_in_mathematics, Submission(answer, expected), 20.0)
    assert (found.score > 0) is verdict, f"not so any more: {why}"


@pytest.mark.usefixtures("alarm")
def test_an_answer_of_two_numbers_is_right_for_one_at_most() -> None:
    """Else a policy would give several in the hope that one is right."""
    ways = ["N", "$N$", r"\frac{N}{1}", r"N\%", "N cm", "**N**", r"\boxed{N}", r"\(N\)", r"\fbox{N}", r"\sqrt{N^2}"]
    between = [" or ", r" \approx ", " is wrong. ", ". The answer is ", r"\text{ but } "]
    for first, middle, last in itertools.product(ways, between, ways):
        answer = first.replace("N", "5") + middle + last.replace("N", "7")
        verdicts = [judge(same_in_mathematics, Submission(answer, number), 20.0) for number in ("5", "7")]
        assert sum(verdict.score > 0 for verdict in verdicts) <= 1, answer


def test_hostile_answers_are_wrong_in_time_and_the_pool_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def run() -> tuple[list[Verdict], Verdict, int]:
        pool = Pool(2, limit_s=LIMIT_S)
        try:
            verdicts = await asyncio.gather(*(pool.check(Submission(*pair)) for pair in HOSTILE))
            for _ in range(TRIES):  # a new worker's first answer takes an import
                if (after := await pool.check(Submission("7", "7"))).score > 0:
                    break
            return verdicts, after, len(pool._workers)
        finally:
            pool.close()

    verdicts, after, workers = asyncio.run(asyncio.wait_for(run(), 120))
    assert [pair for pair, found in zip(HOSTILE, verdicts, strict=True) if found.score > 0] == []
    assert sum(found.timeout for found in verdicts) >= 10  # those that take for ever did not pass unnoticed
    assert (after.score, workers) == (1.0, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("alarm")
def test_what_the_grader_raises_is_an_error_of_the_answer() -> None:
    def fails(*_: Any) -> bool:
        raise RecursionError("too deep")

    assert judge(fails, Submission("7", "7"), 1.0) == Verdict(-1.0, error="RecursionError: too deep")


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
