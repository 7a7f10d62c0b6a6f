"""Grades by table; and that a worker which hangs or dies costs one answer at most."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from msgspec.structs import replace

from megarl.core.base.contracts import WRONG, Grade, GraderDown, Verdict
from megarl.tasks.graders import pool as pools
from megarl.tasks.graders.answer import Submission, judged
from megarl.tasks.graders.grader import any_of
from megarl.tasks.graders.pool import Pool
from tests.unit.tasks.graders.asking import graders_of, prompt_of

pytestmark = pytest.mark.processes

END = "</think>"


def grade(kind: str, text: str, expected: str) -> Grade:
    async def run() -> Grade:
        graders = graders_of(kind)
        try:
            return await graders["task"].grade(text, prompt_of(expected))
        finally:
            graders.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "correct", "format_ok"),
    [
        ("<think>7+8=15</think>85", True, True),
        ("<think>7+8=15</think> 85\n", True, True),
        ("<think>7+8=15</think>86", False, True),
        ("<think>85", False, False),
        ("85", False, False),
        ("<think>85</think>", False, False),
        ("<think>85</think>  ", False, False),
        ("<think></think>85</think>", False, True),
        ("<think></think>85 85", False, True),
        ("<think></think>085", False, True),
    ],
)
def test_exact(text: str, correct: bool, format_ok: bool) -> None:
    assert grade("exact", text, "85") == Grade(1.0 if correct else -1.0, correct, format_ok)


NOT_JUDGED = Verdict(math.nan, error="it cannot judge this answer")
SLOW = Verdict(WRONG, timeout=True)


@pytest.mark.parametrize(
    ("verdicts", "best", "asked"),
    [
        ([judged(True), judged(False)], judged(True), 1),
        ([judged(False), judged(True), judged(False)], judged(True), 2),
        ([judged(False), judged(False)], judged(False), 2),
        ([NOT_JUDGED, judged(False)], judged(False), 2),
        ([judged(False), NOT_JUDGED], judged(False), 2),
        ([SLOW, judged(True)], SLOW, 1),
        ([Verdict(-0.5), Verdict(-0.2)], Verdict(-0.2), 2),
    ],
)
def test_an_answer_is_right_if_it_equals_any_accepted_one(
    verdicts: list[Verdict], best: Verdict, asked: int
) -> None:
    expected = [str(n) for n in range(len(verdicts))]
    compared = []

    async def check(submission: Submission) -> Verdict:
        compared.append(submission.expected)
        return verdicts[int(submission.expected)]

    submissions = [Submission("x", one) for one in expected]
    assert asyncio.run(any_of(check, submissions)) == best
    assert compared == expected[:asked]


@pytest.mark.parametrize(("answer", "correct"), [("1/2", True), ("0.5", True), ("0.50", False)])
def test_a_prompt_with_several_accepted_answers(answer: str, correct: bool) -> None:
    """The grader `exact` compares texts, so each way of writing the answer is an
    accepted one.
    """
    prompt = replace(prompt_of("1/2"), alternatives=("0.5", ".5"))
    grader = graders_of("exact")["task"]
    assert asyncio.run(grader.grade(f"<think></think>{answer}", prompt)).correct is correct


def sleeps(submission: Submission) -> bool:
    time.sleep(float(submission.answer))
    return True


def test_an_answer_that_takes_too_long_is_wrong_and_the_pool_goes_on() -> None:
    async def run() -> tuple[Verdict, Verdict]:
        pool = Pool(1, limit_s=2.0, grader=f"{__name__}:sleeps")
        try:
            return await pool.check(Submission("60", "")), await pool.check(Submission("0", ""))
        finally:
            pool.close()

    slow, after = asyncio.run(run())
    assert slow == Verdict(WRONG, timeout=True)
    assert after == judged(True)


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run])
def test_a_worker_that_dies_is_replaced_and_the_answer_graded_again(
    loop: Any, noticed: bool
) -> None:
    async def run() -> Verdict:
        pool = Pool(1, limit_s=60.0)
        try:
            (starting,) = pool._workers
            worker = await starting
            os.kill(worker.pid, signal.SIGKILL)
            assert worker.stdin is not None
            while noticed and not worker.stdin.is_closing():
                await asyncio.sleep(0.01)
            return await pool.check(Submission("7", "7"))
        finally:
            pool.close()

    assert loop(run()) == judged(True)


def test_a_worker_that_hangs_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[Verdict, Verdict]:
        pool = Pool(1, limit_s=60.0)
        try:
            (starting,) = pool._workers
            worker = await starting
            os.kill(worker.pid, signal.SIGSTOP)
            with monkeypatch.context() as patch:
                patch.setattr(pools, "KILL_MARGIN_S", 1.0 - 60.0)
                hung = await pool.check(Submission("7", "7"))
            return hung, await pool.check(Submission("7", "7"))
        finally:
            pool.close()

    assert asyncio.run(run()) == (Verdict(WRONG, timeout=True), judged(True))


def how_soon_it_dies(_: Submission) -> float:
    """How much sooner than others the kernel ends this process if memory runs out."""
    return float(Path("/proc/self/oom_score_adj").read_text())


def test_if_memory_runs_out_a_grader_dies_before_the_controller() -> None:
    """A function of the user's may lose memory with each of a month's millions of
    answers; its process is replaced.
    """

    async def run() -> Verdict:
        pool = Pool(1, limit_s=20.0, grader=f"{__name__}:how_soon_it_dies")
        try:
            return await pool.check(Submission("1", "1"))
        finally:
            pool.close()

    assert asyncio.run(run()) == Verdict(1000.0)


def numpy_bool(submission: Submission) -> Any:
    return np.bool_(submission.answer == submission.expected)


def forks(submission: Submission) -> bool:
    return (
        bool(os.fork()) and submission.answer == submission.expected
    )  # the child's verdict is wrong


def starts_a_program(submission: Submission) -> bool:
    return (
        subprocess.run(["cat"], capture_output=True, check=True).stdout == b""
        and submission.answer == "5"
    )


@pytest.mark.parametrize("grader", [numpy_bool, forks, starts_a_program])
def test_careless_functions_give_each_answer_its_own_verdict(grader: Any) -> None:
    """NumPy's False is wrong as Python's is; neither a forked child nor a program comes
    between process and pool.
    """

    async def run() -> list[Verdict]:
        pool = Pool(1, limit_s=20.0, grader=f"{__name__}:{grader.__name__}")
        try:
            return [await pool.check(Submission(answer, "5")) for answer in ("5", "6", "5", "5")]
        finally:
            pool.close()

    assert asyncio.run(run()) == [judged(right) for right in (True, False, True, True)]


def exits(_: Submission) -> bool:
    sys.exit(3)


def test_a_process_that_ends_names_its_grader_and_how_it_ended() -> None:
    async def run() -> None:
        pool = Pool(1, limit_s=20.0, grader=f"{__name__}:exits")
        try:
            await pool.check(Submission("5", "5"))
        finally:
            pool.close()

    with pytest.raises(
        GraderDown,
        match=f"grader {__name__}:exits failed 2 times at the answer '5', .* with status 3",
    ):
        asyncio.run(run())


def test_an_error_that_nobody_foresaw_costs_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_deep(*_: object) -> Verdict:
        raise RecursionError("too deep")

    monkeypatch.setattr("megarl.tasks.graders.grader.exact", too_deep)
    with pytest.raises(GraderDown, match="the grader exact failed: RecursionError: too deep"):
        grade("exact", "</think>85", "85")


def fails(_: Submission) -> bool:
    raise KeyError("no such thing")


def test_the_log_says_why_answers_cannot_be_graded(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        graders = graders_of(f"{__name__}:fails")
        for _ in range(5):
            assert (await graders["task"].grade("</think>5", prompt_of("5"))).error
        graders.close()

    asyncio.run(run())
    said = [
        m
        for m in caplog.messages
        if f"{__name__}:fails failed" in m and "KeyError: 'no such thing'" in m
    ]
    assert [m.partition("(")[2].partition(" ")[0] for m in said] == ["1", "2", "4"]
