"""An evaluation whose grader is down is tried again and ends the run in the end; its
row speaks of every task.
"""

import asyncio
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from megarl.core.base.contracts import EnvironmentDown, Grade, GraderDown, TaskPrompts
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import RunDir, append_jsonl, read_jsonl
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt, int32
from megarl.core.client.membership import Membership
from megarl.core.controller import evaluations as module
from megarl.core.controller.evaluations import TRIES, Evaluations, row
from megarl.core.controller.metrics import ComputeClock, Spent
from megarl.core.controller.pipeline import EvaluationSchedule, Pipeline
from megarl.core.evaluation.answers import Answer, SuiteDir, read_answers
from megarl.core.evaluation.metrics import Outcome
from megarl.core.evaluation.score import Asker, Sampled, choose, score
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Session
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import Recipe, Suite, from_tree
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Completion
from megarl.predict.scaling.extrapolate import forecast
from megarl.predict.scaling.overoptimisation import watch
from megarl.tasks.data.arithmetic_models import character_tokenizer
from megarl.tasks.suites.suites import questions_of
from tests.server_pool import Pool

MADE = character_tokenizer()
TOKENIZER = Tokenizer(MADE.backend_tokenizer, MADE.eos_token_id, Path())


def recipe_of(tmp_path: Path, **weights: float) -> Recipe:
    tasks = {name: {"train": "", "heldout": "", "weight": w} for name, w in weights.items()}
    tree: dict[str, Any] = {"data": {"tasks": tasks}, "evaluation": {"prompts": 3, "samples": 2}}
    return from_tree(tree | {"run": {"name": "r", "dir": str(tmp_path)}})


def questions(recipe: Recipe, count: int) -> list[Sampled]:
    sets = {name: prompts(name, count) for name in recipe.data.tasks}
    questions: list[Any] = questions_of(recipe, sets, TOKENIZER)
    return questions


def prompts(task: str, count: int) -> TaskPrompts:
    return TaskPrompts(
        [], [Prompt(id=f"p{n}", tokens=int32([n]), answer="x", task=task) for n in range(count)]
    )


def outcome(id: str, sample: int, ok: bool, tokens: int) -> Outcome:
    return Outcome(id, sample, ok, not ok, ok, ok, False, False, tokens, None, "x" if ok else "y")


def test_a_row_of_several_tasks_and_a_suite(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, math=1, code=3)
    math = [outcome(f"p{n // 2}", n % 2, n < 5, 10 + n) for n in range(6)]
    code = [outcome(f"p{n // 2}", n % 2, n < 1, 2 * n) for n in range(4)]
    found = row({"math": math, "code": code}, recipe, 7)
    assert (found["step"], found["weight_version"], found["samples"], found["n_prompts"]) == (
        7,
        7,
        2,
        5,
    )
    for name, chosen in {"": math + code, "/math": math, "/code": code}.items():
        assert found[f"pass_rate{name}"] == pytest.approx(np.mean([o.correct for o in chosen]))
        assert (
            found[f"pass_rate_low{name}"]
            < found[f"pass_rate{name}"]
            < found[f"pass_rate_high{name}"]
        )
        assert found[f"truncation_rate{name}"] == pytest.approx(
            np.mean([o.truncated for o in chosen])
        )
        assert found[f"completion_tokens_mean{name}"] == pytest.approx(
            np.mean([o.tokens for o in chosen])
        )
    assert (found["n_prompts/math"], found["n_prompts/code"]) == (3, 2)
    assert found["pass@2/math"] == 1.0
    assert found["maj@2/math"] == pytest.approx(5 / 6), (
        "of the third prompt a right and a wrong answer tie"
    )
    assert found["pass@2"] == pytest.approx(4 / 5), "p0 of one task is not p0 of the other"
    alone = recipe_of(tmp_path, math=1)
    assert not any("/" in name for name in row({"math": math}, alone, 7))
    suites = alone.evaluation.model_copy(update={"suites": {"gsm8k": Suite(data="x", samples=2)}})
    with_suite = row(
        {"math": math, "gsm8k": code}, alone.model_copy(update={"evaluation": suites}), 7
    )
    assert (with_suite["pass_rate"], with_suite["pass_rate/gsm8k"]) == (pytest.approx(5 / 6), 0.25)
    assert (with_suite["samples"], with_suite["samples/gsm8k"]) == (2, 2)
    choices = alone.evaluation.model_copy(
        update={"suites": {"arc": Suite(data="lm-eval:arc_easy", samples=2)}}
    )
    of_choices = row(
        {"math": math, "arc": code[::2]}, alone.model_copy(update={"evaluation": choices}), 7
    )
    assert of_choices["samples/arc"] == 1, "whatever the suite says"


def test_as_many_of_each_task() -> None:
    math = prompts("math", 9).heldout
    chosen = choose(math, 3)
    assert len(chosen) == 3
    assert choose(list(reversed(math)), 3) == chosen
    assert choose(math, 5)[:3] == chosen, "more prompts are those and others"
    assert (
        len(choose(prompts("code", 2).heldout, 3))
        == len(choose(prompts("code", 2).heldout, None))
        == 2
    )


class Answers:
    """A sampler, and graders that are down for the first `down` answers. allowed: by
    job, the servers of five it may use.

    down below 0: so many answers end as if their task had been cancelled.
    """

    scores: Mapping[str, float] = {}

    servers: Pool

    def __init__(self, down: int) -> None:
        self.down = down
        self.cancelled = -down
        self.allowed: list[set[int]] = []

    async def complete(self, job: Any) -> Completion:
        self.allowed.append({s for s in range(5) if job.take.args[1](s, 0)})
        await asyncio.sleep(0)
        if self.cancelled > 0:
            self.cancelled -= 1
            raise asyncio.CancelledError
        return Completion(finish="stop", text="</think>x")

    def __getitem__(self, task: str) -> "Answers":
        return self

    async def grade_answer(
        self, text: str, prompt: Prompt, verdict: None, truncated: bool
    ) -> Grade:
        if self.down > 0:
            self.down -= 1
            raise GraderDown("no process starts")
        return Grade(1.5, True, True, rewards=self.scores)


class NoTickets:
    """A source of which nothing is asked."""


def evaluations_of(
    recipe: Recipe,
    journal: Journal,
    members: Membership,
    answers: Answers,
    count: int,
    fail: Callable,
    stop: Callable,
) -> tuple[Evaluations, JournalWriter, EvaluationSchedule]:
    """Evaluations of a run of ten steps whose tasks hold out `count` prompts each."""
    records = JournalWriter(journal)
    places = Places(members, 1)
    pipeline = Pipeline(recipe, records, places, NoTickets(), lambda: None, 10, 10)  # type: ignore[arg-type]
    answers.servers = Pool({}, places)
    asker = Asker(recipe, TOKENIZER, answers, answers, frozenset(), "", 0)  # type: ignore[arg-type]
    made = Evaluations(
        RunDir(recipe.run.path),
        questions(recipe, count),
        forecast,
        watch,
        asker,
        pipeline,
        ComputeClock(journal.state, recipe.resources),
        fail,
        stop,
    )
    return made, records, pipeline.evaluations


async def scored(
    recipe: Recipe, down: int, stops: list[str] | None = None, version: int = 0
) -> tuple[list[str], int]:
    """Reasons for which the run failed, and how often `version` was begun. stops: takes
    the reasons to end it well.
    """
    rundir = RunDir(recipe.run.path)
    rundir.create()
    journal = Journal.open(rundir.rollouts, 2, 1)
    journal.append(Session(session="s", time=0.0, devices=1, compute_unit="core"))
    members = Membership([ServerAddress(id=0, url="")])
    members.answered(0)
    members.publish([0], version, "a")
    members.published(0, version, "a", "")
    failures: list[str] = []
    stop = (stops if stops is not None else []).append
    evaluations, records, schedule = evaluations_of(
        recipe, journal, members, Answers(down), 4, failures.append, stop
    )
    begun = 0
    async with asyncio.TaskGroup() as tasks:
        writer = tasks.create_task(records.run())
        while schedule.is_due(version) and not failures:
            evaluations.begin_if_due(version, {version: Spent(0.5 + version, 0.25, 0.125)}, tasks)
            assert members.members[0].pinned
            assert not schedule.is_due(version)
            await asyncio.wait_for(asyncio.shield(evaluations.tasks[version]), 10)
            begun += 1
            assert not members.members[0].pinned
        writer.cancel()
    await records.close()
    return failures, begun


@pytest.mark.parametrize(("down", "begun", "tries"), [(0, 1, 1), (2, 3, 3)])
def test_it_is_tried_again_while_the_grader_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: int, begun: int, tries: int
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    recipe = recipe_of(tmp_path, math=1, code=1)
    assert asyncio.run(scored(recipe, down)) == ([], begun)
    (found,) = read_jsonl(RunDir(recipe.run.path).eval)
    assert (found["step"], found["pass_rate"], found["n_prompts"], found["tries"]) == (
        0,
        1.0,
        6,
        tries,
    )
    hours = {key: found[f"{key}_hours"] for key in ("compute", "startup", "evaluation", "training")}
    assert hours == {"compute": 0.5, "startup": 0.25, "evaluation": 0.125, "training": 0.125}
    assert found["servers"] == 1
    for task in ("math", "code"):
        place = SuiteDir(RunDir(recipe.run.path).evaluations / "step-0000000", task)
        rows = list(read_answers(place.answers))
        assert len(rows) == 3 * 2, "those of tries that failed are gone"
        assert {(row.suite, row.answer, row.vote, row.correct) for row in rows} == {
            (task, "x", "x", True)
        }
        result = place.read_result()
        assert (result.metrics["pass_rate"], result.metrics["maj@2"]) == (1.0, 1.0)


def test_answers_of_older_evaluations_are_deleted_but_not_their_results(tmp_path: Path) -> None:
    tree = recipe_of(tmp_path, math=1).model_dump(mode="json")
    recipe = from_tree(tree, ["evaluation.keep=2"])
    evaluations = RunDir(recipe.run.path).evaluations
    for name in ("step-0000000", "step-0000003", "step-0000006", "step-0000000.copy"):
        (evaluations / name / "math").mkdir(parents=True)
        for file in ("answers.jsonl", "result.json"):
            (evaluations / name / "math" / file).touch()
    assert asyncio.run(scored(recipe, 0, version=10)) == ([], 1)
    left = {path.parts[-3] for path in evaluations.glob("*/math/answers.jsonl")}
    assert left == {"step-0000006", "step-0000010", "step-0000000.copy"}
    assert len(list(evaluations.glob("*/math/result.json"))) == 5


def test_each_evaluation_says_whether_the_score_has_fallen(tmp_path: Path) -> None:
    """A single evaluation is no fall; its result has each prompt's pass rate, for later
    ones.
    """
    recipe = recipe_of(tmp_path, math=1)
    asyncio.run(scored(recipe, 0, version=10))
    (found,) = read_jsonl(RunDir(recipe.run.path).eval)
    assert found["warning_fall"] == 0.0
    result = SuiteDir(RunDir(recipe.run.path).evaluations / "step-0000010", "math").read_result()
    assert set(result.pass_rates.values()) == {1.0}  # type: ignore[union-attr]
    assert len(result.pass_rates) == 3  # type: ignore[arg-type]


def test_it_ends_the_run_when_the_grader_stays_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    recipe = recipe_of(tmp_path, math=1, code=1)
    (reason,), begun = asyncio.run(scored(recipe, 1000))
    assert begun == TRIES
    assert reason.startswith(
        "version 0 could not be scored, the grader is down: no process starts; tried 3 times"
    )
    assert not RunDir(recipe.run.path).eval.exists()
    assert not list(RunDir(recipe.run.path).evaluations.iterdir())


@pytest.mark.parametrize("lost", [1, 1000])
def test_no_score_is_written_of_answers_that_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    recipe = recipe_of(tmp_path, math=1, code=1)
    failures, begun = asyncio.run(scored(recipe, -lost))
    rows = list(read_jsonl(RunDir(recipe.run.path).eval))
    if lost == 1:
        assert (failures, begun, [row["pass_rate"] for row in rows]) == ([], 2, [1.0])
    else:
        assert (len(failures), begun, rows) == (1, TRIES, [])
        assert "math: 6 of 6 answers never arrived" in failures[0]


@pytest.mark.parametrize(("correct", "void"), [(False, "no grader could judge it"), (True, "")])
def test_an_answer_that_no_grader_can_judge_is_void(
    tmp_path: Path, correct: bool, void: str
) -> None:
    """Unless it is only another grader than the task's that cannot."""

    class Doubtful(Answers):
        async def grade_answer(
            self, text: str, prompt: Prompt, verdict: None, truncated: bool
        ) -> Grade:
            return Grade(math.nan, correct, True, error=True)

    recipe = recipe_of(tmp_path, one=1.0)
    answers: Any = Doubtful(0)
    kept = list[Answer]()
    answers.servers = Pool({}, Places(Membership([ServerAddress(id=0, url="")]), 1))
    asyncio.run(
        score(
            questions(recipe, 1),
            Asker(recipe, TOKENIZER, answers, answers, frozenset(), "", 1),
            kept.append,
        )
    )
    assert {(a.void, a.correct, a.grader_error, a.scores) for a in kept} == {
        (void, correct, True, UNSET)
    }


@pytest.mark.parametrize(("share", "rates"), [(2, [0.5]), (1, [])])
def test_an_agent_that_the_policy_brings_down_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int, rates: list[float]
) -> None:
    """Unless no answer is left."""
    asked = itertools.count()

    async def complete(self: Answers, job: Any) -> Completion:
        if next(asked) % share == 0:
            return Completion(down=EnvironmentDown("the agent of task math failed 2 times"))
        return Completion(finish="stop", text="</think>x")

    monkeypatch.setattr(Answers, "complete", complete)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    recipe = recipe_of(tmp_path, math=1)
    failures, begun = asyncio.run(scored(recipe, 0))
    rows = list(read_jsonl(RunDir(recipe.run.path).eval))
    assert [row["pass_rate"] for row in rows] == [row["void_rate"] for row in rows] == rates
    assert not any(row["format_error_rate"] for row in rows), "what nobody judged is not malformed"
    assert (begun, len(failures)) == ((1, 0) if rates else (TRIES, 1))
    said = "math: no answer could be generated and judged; of the first: the agent of task math"
    assert all(said in reason for reason in failures)


def test_it_waits_before_it_tries_again(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, math=1, code=1)
    with pytest.raises(ExceptionGroup) as error:
        asyncio.run(scored(recipe, 1))
    assert isinstance(error.value.exceptions[0], AssertionError), (
        "begin() did nothing, so nothing was pinned"
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_the_run_ends_when_the_rest_is_not_worth_its_price(tmp_path: Path, wanted: bool) -> None:
    """Twenty scores on a curve that has come to its ceiling; the twenty-first is a
    perfect one.
    """
    recipe = recipe_of(tmp_path, math=1)
    price = "gain < 0.02 per core-hour" if wanted else "gain < 1e-9 per core-hour"
    recipe = recipe.model_copy(
        update={"run": recipe.run.model_copy(update={"stop_when": price, "steps": 60})}
    )
    rundir = RunDir(recipe.run.path)
    rundir.create()
    for step in range(21):
        rate = 1.0 / (1 + (2.0 / step) ** 3) if step else 0.0
        score = {"step": step, "pass_rate": rate, "n_prompts": 100, "samples": 4}
        append_jsonl(rundir.eval, score | {"compute_hours": 0.5 + step, "compute_unit": "core"})
    stops: list[str] = []
    assert asyncio.run(scored(recipe, 0, stops, version=21)) == ([], 1)
    row = list(read_jsonl(rundir.eval))[-1]
    assert row["step"] == 21
    assert row["predicted_final"] == pytest.approx(1.0, abs=0.01)
    assert len(stops) == wanted
    assert all(s.startswith("run.stop_when: the last ") and s.endswith(" at most") for s in stops)


@pytest.mark.parametrize(("forecast", "stopped"), [("code", True), ("math", False), ("", False)])
def test_of_several_tasks_the_named_one_is_forecast_and_decides(
    tmp_path: Path, forecast: str, stopped: bool
) -> None:
    """One has come to its ceiling, the other rises on, and the pooled score looks as if
    it had come to one.
    """
    recipe = recipe_of(tmp_path, math=1, code=1)
    run = recipe.run.model_copy(update={"stop_when": "gain < 0.0001 per core-hour", "steps": 60})
    evaluation = recipe.evaluation.model_copy(update={"forecast": forecast})
    recipe = recipe.model_copy(update={"run": run, "evaluation": evaluation})
    rundir = RunDir(recipe.run.path)
    rundir.create()
    for step in range(21):
        ceiling = 1.0 / (1 + (2.0 / step) ** 3) if step else 0.0
        scores = {"pass_rate": ceiling, "pass_rate/code": ceiling, "pass_rate/math": step / 25}
        sizes = {"n_prompts": 100, "n_prompts/code": 50, "n_prompts/math": 50, "samples": 4}
        append_jsonl(
            rundir.eval,
            scores | sizes | {"step": step, "compute_hours": 0.5 + step, "compute_unit": "core"},
        )
    stops: list[str] = []
    asyncio.run(scored(recipe, 0, stops, version=21))
    row = list(read_jsonl(rundir.eval))[-1]
    assert row.get("predicted_score") == (f"pass_rate/{forecast}" if forecast else None)
    assert len(stops) == stopped
    assert all("predicted to gain code 0.0" in s for s in stops)


@pytest.mark.parametrize("leaves", [False, True], ids=["lost", "left"])
def test_several_servers_share_it_and_one_may_be_lost_or_leave(
    tmp_path: Path, leaves: bool
) -> None:
    """A quarter of the recipe's are three: of four they are held, the fourth is
    published to. What one leaves that is lost, or goes, is done by the others.
    """
    tree: dict[str, Any] = {"data": {"tasks": {"math": {"train": "", "heldout": ""}}}}
    tree |= {
        "evaluation": {"prompts": 9, "samples": 2},
        "resources": {"servers": 12},
        "run": {"name": "r", "dir": str(tmp_path)},
    }
    recipe = from_tree(tree)
    rundir = RunDir(recipe.run.path)
    rundir.create()
    journal = Journal.open(rundir.rollouts, 2, 1)
    journal.append(Session(session="s", time=0.0, devices=1, compute_unit="core"))
    members = Membership([ServerAddress(id=0, url="http://own")])
    for n in range(1, 4):
        assert members.join(f"http://joined-{n}", f"life{n}", -1, 1, at=0.0) == n
    for n in range(4):
        members.answered(n)
    members.publish(range(4), 0, "a")
    for n in range(4):
        members.published(n, 0, "a", "")
    answers = Answers(0)
    evaluations, records, schedule = evaluations_of(
        recipe, journal, members, answers, 9, [].append, [].append
    )

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(records.run())
            evaluations.begin_if_due(0, {0: Spent(0.5, 0.0, 0.0)}, tasks)
            task = evaluations.tasks[0]
            held = set(schedule.running[0])
            assert len(held) == 3
            assert {n for n in range(4) if members.members[n].pinned} == held
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gone = max(held) if leaves else min(held)
            if leaves:
                members.leave(gone)
            else:
                members.lose(gone)
            evaluations.cancel_lost()
            if leaves:
                members.forget(gone)
            await asyncio.wait_for(task, 10)
            assert answers.allowed[0] == held
            assert answers.allowed[-1] == held - {gone}
            assert not any(m.pinned for m in members.members.values())
            writer.cancel()
        await records.close()

    asyncio.run(run())
    (found,) = read_jsonl(rundir.eval)
    assert (found["n_prompts"], found["pass_rate"]) == (9, 1.0)


@dataclass
class OneTask:
    """The evaluations of a run of one task, and what they work on."""

    rundir: RunDir
    members: Membership
    evaluations: Evaluations
    schedule: EvaluationSchedule
    records: JournalWriter


def one_task(tmp_path: Path, servers: int) -> OneTask:
    """All servers have version 0."""
    recipe = recipe_of(tmp_path, math=1)
    rundir = RunDir(recipe.run.path)
    rundir.create()
    journal = Journal.open(rundir.rollouts, 2, 1)
    journal.append(Session(session="s", time=0.0, devices=1, compute_unit="core"))
    members = Membership([ServerAddress(id=n, url="") for n in range(servers)])
    for n in range(servers):
        members.answered(n)
        members.publish([n], 0, "a")
        members.published(n, 0, "a", "")
    evaluations, records, schedule = evaluations_of(
        recipe, journal, members, Answers(0), 4, [].append, [].append
    )
    return OneTask(rundir, members, evaluations, schedule, records)


def test_an_evaluation_ends_whose_server_is_lost_before_its_first_step(tmp_path: Path) -> None:
    it = one_task(tmp_path, servers=2)
    spent = {0: Spent(0.5, 0.0, 0.0)}

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(it.records.run())
            it.evaluations.begin_if_due(0, spent, tasks)
            (lost,) = it.schedule.running[0]
            it.members.lose(lost)
            it.evaluations.cancel_lost()
            await asyncio.sleep(0.01)
            assert (it.evaluations.tasks, it.schedule.running) == ({}, {})
            it.evaluations.begin_if_due(0, spent, tasks)
            assert it.schedule.running[0] == {1 - lost}, "the other one has these weights"
            await asyncio.wait_for(asyncio.shield(it.evaluations.tasks[0]), 10)
            writer.cancel()
        await it.records.close()

    asyncio.run(run())
    assert [row["pass_rate"] for row in read_jsonl(it.rundir.eval)] == [1.0]


def test_a_row_that_is_written_keeps_its_answers(tmp_path: Path) -> None:
    """The evaluation is cancelled while the journal's disk is slow: both have the score
    already.
    """
    it = one_task(tmp_path, servers=1)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            it.evaluations.begin_if_due(0, {0: Spent(0.5, 0.0, 0.0)}, tasks)
            task = it.evaluations.tasks[0]
            while not it.records.state.evaluations:
                await asyncio.sleep(0.01)
            assert not task.done(), "nobody writes the journal yet"
            task.cancel()
        await it.records.close()

    asyncio.run(run())
    (found,) = read_jsonl(it.rundir.eval)
    assert it.evaluations.latest == found
    place = SuiteDir(it.rundir.evaluations / "step-0000000", "math")
    assert len(list(read_answers(place.answers))) == found["n_prompts"] * 2


def test_a_trusted_grader_is_beside_the_reward_in_all_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "scores", {"answer": 1.0, "form": 1.0, "trusted": -0.5})
    recipe = recipe_of(tmp_path, math=1)
    assert asyncio.run(scored(recipe, 0)) == ([], 1)
    (found,) = read_jsonl(RunDir(recipe.run.path).eval)
    assert (found["pass_rate"], found["proxy_score"], found["trusted_score"]) == (1.0, 1.5, -0.5)
    assert found["warning_overoptimisation"] == 0
    place = SuiteDir(RunDir(recipe.run.path).evaluations / "step-0000000", "math")
    assert {str(a.scores) for a in read_answers(place.answers)} == {
        "{'answer': 1.0, 'form': 1.0, 'trusted': -0.5, 'total': 1.5}"
    }
    beside = place.read_result().proxy_and_trusted
    assert beside == {a.id: (1.5, -0.5) for a in read_answers(place.answers)}


def test_every_key_of_a_row_is_documented(tmp_path: Path) -> None:
    both = {"total": 1.0, "trusted": 0.0}
    outcomes = [
        outcome(f"p{n}", s, s == 0, 5)._replace(reward=1.0, entropy=0.5, scores=both)
        for n in range(3)
        for s in (0, 1)
    ]
    keys = row({"math": outcomes}, recipe_of(tmp_path, math=1), 0)
    docs = Path(__file__).parents[4] / "docs"
    evaluation = (docs / "how-to/evaluation.md").read_text()
    pages = evaluation + (docs / "reference/run-directory.md").read_text()
    plain = {re.sub(r"@\d+", "@k", key.removesuffix("_low").removesuffix("_high")) for key in keys}
    assert plain >= {"pass_rate", "pass@k", "maj@k", "best@k", "entropy"}
    assert [key for key in plain if f"`{key}`" not in pages] == []
