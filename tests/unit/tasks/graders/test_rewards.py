"""Several rewards of a task: their sum, what each said, and the user's own graders."""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.contracts import Grade, GraderDown, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Batch, Group, Prompt, Rollout, decode, encode, int32
from megarl.core.controller.metrics import task_statistics
from megarl.core.recipe import from_tree
from megarl.tasks.graders.answer import graded, judged
from megarl.tasks.graders.grader import TaskGraders, check_graders
from tests import make
from tests.unit.tasks.graders.asking import graders_of, prompt_of

MODULE = """
import os, time
def length(submission):
    print("what a grader prints is not a verdict")
    return len(submission.completion) / 10
def is_polite(submission):
    return "please" in submission.answer
def everything(submission):
    return repr(tuple(submission)) == repr(("5", "5", "<think></think>5", "2+3=", "task", False))
def fails(submission):
    return {}["no such key"]
def not_a_number(submission):
    return float("nan")
def none(submission):
    return None
def away(submission):
    raise ConnectionRefusedError("no judge listens")
def infinite(submission):
    return float("inf")
def sleeps(submission):
    time.sleep(100)
def dies(submission):
    os._exit(3)
def of_verl(data_source, solution, truth, extra=None):
    return 1.0
async def of_prime(submission):
    return 1.0
number = 7
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_graders.py").write_text(MODULE)
    (tmp_path / "my_typo.py").write_text("def f(submission):\n    return 1 +\n")
    monkeypatch.chdir(tmp_path)


async def made(*args: Any, **more: Any) -> TaskGraders:
    return graders_of(*args, **more)


def test_the_sum_and_each_apart() -> None:
    found = graded(
        "5",
        Verdict(1.0),
        {"a": Verdict(0.5), "b": Verdict(-1.0, error="no")},
        {"a": 2.0, "b": 0.25},
    )
    assert found == Grade(1.75, True, True, False, True, {"answer": 1.0, "a": 0.5, "b": -1.0})
    assert graded("5", Verdict(1.0), {}, {}) == Grade(1.0, True, True)
    assert graded("", Verdict(-1.0), {"a": Verdict(9.0)}, {"a": 1.0}) == Grade(
        8.0, False, False, rewards={"answer": -1, "a": 9}
    )


def test_a_format_reward_beside_the_answer() -> None:
    async def run() -> list[Grade]:
        graders = graders_of(
            "exact", task={"rewards": {"form": {"grader": "format", "weight": 0.5}}}
        )
        return [
            await graders["task"].grade(text, prompt_of("5"))
            for text in ("</think>5", "</think>6", "<think>5")
        ]

    assert asyncio.run(run()) == [
        Grade(1.5, True, True, rewards={"answer": 1.0, "form": 1.0}),
        Grade(-0.5, False, True, rewards={"answer": -1.0, "form": 1.0}),
        Grade(-1.5, False, False, rewards={"answer": -1.0, "form": -1.0}),
    ]


def test_an_evaluation_asks_the_grader_of_the_task_alone() -> None:
    async def run() -> Grade:
        graders = graders_of(
            "exact", task={"rewards": {"form": {"grader": "format", "weight": 0.5}}}
        )
        return await graders["task"].grade_answer("</think>5", prompt_of("5"))

    assert asyncio.run(run()) == Grade(1.0, True, True)


def test_a_trusted_grader_is_asked_by_evaluations_alone_and_adds_nothing() -> None:
    """The reward of the task is for any answer;
    the trusted grader knows the right one.
    """
    rewards = {"form": {"grader": "format", "weight": 0.5}}

    async def run(more: dict[str, Any]) -> list[Grade]:
        grader = graders_of("format", task={"trusted_grader": "exact"} | more)["task"]
        asked = [grader.grade, grader.grade_answer]
        return [
            await ask(text, prompt_of("5")) for ask in asked for text in ("</think>5", "</think>6")
        ]

    training = Grade(1.0, True, True)
    evaluation = [{"answer": 1.0, "trusted": score} for score in (1.0, -1.0)]
    assert asyncio.run(run({})) == [training] * 2 + [
        Grade(1.0, True, True, rewards=scores) for scores in evaluation
    ]
    several = asyncio.run(run({"rewards": rewards}))
    assert several[:2] == [Grade(1.5, True, True, rewards={"answer": 1.0, "form": 1.0})] * 2
    assert [grade.reward for grade in several[2:]] == [1.5, 1.5]
    assert [grade.rewards["trusted"] for grade in several[2:]] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            {"trusted_grader": "exat"},
            "data.tasks.task.trusted_grader: unknown grader 'exat'; did you mean exact",
        ),
        (
            {"rewards": {"trusted": {"grader": "exact", "weight": 1.0}}},
            "rewards.trusted: the trusted grader is logged under this name",
        ),
        (
            {"rewards": {"total": {"grader": "exact", "weight": 1.0}}},
            "rewards.total: the sum of all rewards is logged under this name",
        ),
    ],
)
def test_what_a_recipe_may_not_name(task: dict[str, Any], words: str) -> None:
    with pytest.raises(MegarlError, match=re.escape(words)):
        from_tree({"data": {"tasks": {"task": {"train": "", "heldout": ""} | task}}})


@pytest.mark.usefixtures("mine")
def test_graders_of_the_user() -> None:
    """A number is the score, above 0 is right; what fails, hangs or dies costs its
    answer and no more.
    """

    async def run() -> dict[str, Any]:
        rewards = {"length": {"grader": "my_graders:length", "weight": -0.1}}
        limits = {"fails": 30.0, "infinite": 30.0, "sleeps": 1.0}
        graders = graders_of("my_graders:everything", task={"rewards": rewards}, limit_s=30.0)
        others = {
            name: graders_of(f"my_graders:{name}", limit_s=limit_s)
            for name, limit_s in limits.items()
        }
        try:
            prompt = prompt_of("5", "2+3=")
            found = {"right": await graders["task"].grade("<think></think>5", prompt)}
            found["none"] = await graders["task"].grade("<think>", prompt)
            for name, other in others.items():
                found[name] = await other["task"].grade("</think>5", prompt)
            return found
        finally:
            for each in (graders, *others.values()):
                each.close()

    assert asyncio.run(asyncio.wait_for(run(), 100)) == {
        "right": Grade(1.0 - 0.1 * 1.6, True, True, rewards={"answer": 1.0, "length": 1.6}),
        "none": Grade(-1.0 - 0.1 * 0.7, False, False, rewards={"answer": -1.0, "length": 0.7}),
        "fails": Grade(-1.0, False, True, error=True),
        "infinite": Grade(-1.0, False, True, error=True),
        "sleeps": Grade(-1.0, False, True, timeout=True),
    }


@pytest.mark.usefixtures("mine")
def test_functions_that_cannot_judge(caplog: pytest.LogCaptureFixture) -> None:
    """They say so with None or NaN; a connection that fails is not the
    answer's fault.
    """

    async def run(name: str, as_reward: bool) -> Grade:
        own: dict[str, Any] = (
            {"task": {"rewards": {"own": {"grader": f"my_graders:{name}", "weight": 1.0}}}}
            if as_reward
            else {}
        )
        graders = graders_of("exact" if as_reward else f"my_graders:{name}", limit_s=30.0, **own)
        try:
            return await graders["task"].grade("</think>5", prompt_of("5"))
        finally:
            graders.close()

    for name in ("not_a_number", "none", "away"):
        for as_reward in (False, True):
            grade = asyncio.run(run(name, as_reward))
            assert math.isnan(grade.reward)
            assert grade[1:] == (
                as_reward,
                True,
                False,
                True,
                {},
            ), "the task's own grader, if it could judge, still counts"
    assert sum("has no verdict" in message for message in caplog.messages) == 6


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("grader", "words"),
    [
        ("my_graders:no_such", "has no attribute 'no_such'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("my_graders:number", "it cannot be called"),
        ("my_graders:of_verl", "missing a required argument: 'solution'"),
        ("my_graders:of_prime", "it is async"),
        ("json:dumps", "it is of Python's own library"),
        ("my_typo:f", r"SyntaxError: .*\(my_typo\.py, line 2\)"),
    ],
)
def test_functions_that_are_none_are_refused_before_the_run(grader: str, words: str) -> None:
    with pytest.raises(MegarlError, match=rf"the grader {grader} cannot be used: .*{words}"):
        asyncio.run(made(grader))
    suite = {"evaluation": {"suites": {"olympiad": {"data": "x", "grader": grader}}}}
    with pytest.raises(
        MegarlError, match=rf"^evaluation\.suites\.olympiad: the grader {grader} cannot be used"
    ):
        check_graders(from_tree(suite))


TASK = {"train": "a", "heldout": "b"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"tasks": {"m": TASK | {"grader": "mahts"}}},
            r"data\.tasks\.m\.grader: unknown grader 'mahts'; did you mean math\?",
        ),
        (
            {"tasks": {"m": TASK | {"grader": "os.system"}}},
            r"data\.tasks\.m\.grader: unknown grader 'os\.system'",
        ),
        ({"tasks": {"m": TASK | {"grader": "a:b;c"}}}, r"unknown grader"),
        (
            {
                "tasks": {"m": TASK | {"rewards": {"r": {"grader": "taste", "weight": 1}}}},
                "services": {"tastes": {"url": "http://x"}},
            },
            r"data\.tasks\.m\.rewards\.r\.grader: unknown grader 'taste'; did you mean tastes\?",
        ),
        (
            {"tasks": {"m": TASK | {"rewards": {"answer": {"grader": "format", "weight": 1}}}}},
            r"data\.tasks\.m\.rewards\.answer: .*choose another",
        ),
        (
            {"services": {"math": {"url": "http://x"}}},
            r"data\.services\.math: a built-in grader has this name",
        ),
        (
            {"services": {"s": {"url": "http://x", "api_key": "sk-secret"}}},
            (
                r"data\.services\.s\.api_key: should be env:VARIABLE or file:PATH, .*, not the key"
                r" itself$"
            ),
        ),
        ({"services": {"s": {"url": "ftp://x"}}}, r"data\.services\.s\.url"),
        ({"services": {"s": {"url": "http://me:secret@x"}}}, r"data\.services\.s\.url"),
    ],
)
def test_recipes_that_name_no_grader(data: dict[str, Any], words: str) -> None:
    with pytest.raises(MegarlError, match=words):
        from_tree({"data": data})


def test_good_recipes() -> None:
    rewards = {
        "taste": {"grader": "taste", "weight": 0.5},
        "mine": {"grader": "a.b:c", "weight": -1},
    }
    recipe = from_tree(
        {
            "data": {
                "tasks": {"m": TASK | {"rewards": rewards}},
                "services": {"taste": {"url": "https://x/score"}},
            }
        }
    )
    assert recipe.data.tasks["m"].graders == ("math", "taste", "a.b:c")


def test_each_reward_is_a_metric_of_its_own() -> None:
    def rollout(reward: float, **rewards: float) -> Rollout:
        return make.rollout(reward=reward, rewards=rewards)

    def group(task: str, *rollouts: Rollout) -> Group:
        prompt = Prompt(id="p", tokens=int32([1]), answer="5", task=task)
        return decode(encode(Group(ticket=0, prompt=prompt, rollouts=rollouts)), Group)

    batch = Batch(
        step=0,
        groups=(
            group("m", rollout(1.5, answer=1.0, form=1.0), rollout(-1.5, answer=-1.0, form=-1.0)),
            group("n", rollout(1.0)),
        ),
    )
    found = batch_statistics(batch)
    assert {name: found[name] for name in found if name.startswith("reward/")} == {
        "reward/answer": 0.0,
        "reward/form": 0.0,
    }
    recipe = from_tree({"data": {"tasks": {"m": TASK, "n": TASK}}})
    of_tasks = task_statistics(batch, recipe)
    assert [name for name in of_tasks if name.startswith("reward/")] == [
        "reward/answer/m",
        "reward/form/m",
    ]


@pytest.mark.parametrize(("score", "weight"), [(math.inf, -1.0), (1e308, 1e10), (1e155, 1.0)])
def test_a_sum_that_is_no_number_is_no_grade(score: float, weight: float) -> None:
    with pytest.raises(
        GraderDown,
        match=r"the reward is (-?inf|1e\+155), .*answer 1, taste (inf|1e\+308|1e\+155)\)",
    ):
        graded("a", judged(True), {"taste": Verdict(score)}, {"taste": weight})
    assert (
        graded("a", judged(True), {"taste": Verdict(2.0)}, {"taste": weight}).reward
        == 1 + 2 * weight
    )
