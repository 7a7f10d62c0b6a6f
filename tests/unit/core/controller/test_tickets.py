"""Tickets of two tasks with a made-up server: refilled, in stages of length, until all
steps are done; if the controller dies, it continues from its journal as if it had not.
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.core.algorithm.advantages.group import centred_rewards
from megarl.core.base.admission import Admission
from megarl.core.base.architecture import read
from megarl.core.base.contracts import Grade, GraderDown, TaskPrompts
from megarl.core.base.messages import Next, Refused, ServerAddress
from megarl.core.base.types import Group, Prompt, float32, int32
from megarl.core.client.client import Generation, ServerLost, VersionSpan
from megarl.core.client.membership import Membership
from megarl.core.controller.decision import TrainStep, decide
from megarl.core.controller.draw import mixture_of
from megarl.core.controller.parity_schedule import Parity
from megarl.core.controller.pipeline import Pipeline
from megarl.core.controller.tickets import Tickets, with_means
from megarl.core.journal.journal import Journal, JournalReader
from megarl.core.journal.records import Admitted, Finished, JournalRecord, Removed, State
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import Recipe
from megarl.core.sampling.length_control import thinking_budget
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import TRAINING, Sampler
from megarl.tasks.environments.registry import TaskEnvironments
from megarl.tasks.graders.grader import TaskGraders
from tests import make
from tests.server_pool import Pool

END = 0
CLOSE = 1
B = 4
STAGES: list[dict[str, Any]] = [
    {"until_step": 2, "thinking_tokens": [4, 6]},
    {"until_step": 4, "thinking_tokens": [10, 12]},
]
FULL = [20, 24]


class Letters:
    """A tokenizer of ten tokens; 1 is `</think>`."""

    end = END
    ends = (END,)

    def ids(self, text: str) -> np.ndarray:
        return int32([CLOSE])

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("</think>" if t == CLOSE else str(t) for t in tokens)

    continued = decode


class Server:
    """Thinks until it is interrupted; the answer 5 is right. `asked`: limits of the
    thinking legs, by the prompt's tokens.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[int, ...], list[int]] = {}
        self.count = 0

    async def generate(
        self, ids: np.ndarray, limit: int, *, cache_salt: str, group: str, **_: Any
    ) -> Generation:
        assert group == f"{TRAINING}/{cache_salt.rpartition('/')[2]}", "the ticket's"
        self.count = count = self.count + 1
        await asyncio.sleep(0)
        if CLOSE not in ids.tolist():
            self.asked.setdefault(tuple(ids.tolist()), []).append(limit)
            return Generation(
                int32([7] * limit), float32([-1.0] * limit), (VersionSpan(3, 0, limit),), "length"
            )
        # Of the prompts 2 of 3 have right and wrong answers, the others only wrong
        # ones.
        right = int(ids[1]) % 3 and count % 2
        return Generation(
            int32([5 if right else 6, END]), float32([-1.0, -1.0]), (VersionSpan(3, 0, 2),), "stop"
        )

    async def score(self, *_: Any, **__: Any) -> Any:
        raise ServerLost("it only samples", int32(()), float32(()))


def prompts(task: str, count: int) -> TaskPrompts:
    first = 8 if task == "math" else 9
    made = [
        Prompt(
            id=f"p{n}",
            tokens=int32([first, 10 + n]),
            answer="5".ljust(400),
            task=task,
            difficulty=n // 3,
        )
        for n in range(count)
    ]
    return TaskPrompts(made, [])


PROMPTS = {"math": prompts("math", 30), "code": prompts("code", 18)}


def recipe_of(**sections: Any) -> Recipe:
    tasks = {
        t: {"train": t, "heldout": "", "grader": "exact", "weight": w}
        for t, w in (("math", 3), ("code", 1))
    }
    tree: dict[str, Any] = {
        "run": {"steps": 8},
        "data": {"tasks": tasks, "curriculum": {"kind": "linear"}},
        "batch": {"prompts": B, "zero_variance": "refill"},
        "pipeline": {"k": 20},
        "sampling": {"generations": 4},
        "length": {"thinking_tokens": FULL, "answer_tokens": 3, "stages": STAGES},
    }
    return make.recipe(tree, **sections)


class Wordy(Server):
    """Thinks 20 to 23 tokens and answers: of three prompts one is never solved, one now
    and then, one always.
    """

    async def generate(
        self, ids: np.ndarray, limit: int, *, cache_salt: str, **_: Any
    ) -> Generation:
        self.count = count = self.count + 1
        await asyncio.sleep(0)
        kind = int(ids[1]) % 3
        tokens = [7] * (20 + count % 4) + [
            CLOSE,
            5 if kind == 2 or (kind == 1 and count % 2) else 6,
            END,
        ]
        return Generation(
            int32(tokens), float32([-1.0] * len(tokens)), (VersionSpan(3, 0, len(tokens)),), "stop"
        )


async def run(
    recipe: Recipe, path: Path, until: int | None, server: type[Server] = Server
) -> tuple[Pipeline, Tickets]:
    """Go on with the journal in `path` until no ticket is left to do, or so many are
    settled in this life.
    """
    journal = Journal.open(path, B, recipe.pipeline.max_lag)
    members = Membership([ServerAddress(id=0, url="")])
    members.answered(0)
    members.publish([0], 3, "a")
    members.published(0, 3, "a", "")
    asked = server()
    places = Places(members, 16)
    settled = 0
    letters: Any = Letters()
    sampler = Sampler(
        recipe,
        letters,
        Pool({0: asked}, places, lossless=True),
        TaskEnvironments(recipe, letters),
    )
    graders = TaskGraders(recipe, str, 1, 1.0)
    records = JournalWriter(journal)
    done = asyncio.Event()

    def changed() -> None:
        nonlocal settled
        settled += 1
        places.refresh()
        if settled == until or whole():
            done.set()

    def whole() -> bool:
        return not pipeline.running and pipeline.batches() >= recipe.run.steps

    servers: Any = SimpleNamespace(clients={0: asked}, membership=members)
    parity = Parity(
        recipe,
        END,
        read("llama-3.1-8b"),
        servers,
        changed,
        pytest.fail,
        "",
    )
    tickets = Tickets(
        recipe, PROMPTS, mixture_of(recipe, PROMPTS, journal.state), sampler, graders, parity, ""
    )
    pipeline = Pipeline(
        recipe, records, places, tickets, changed, recipe.run.steps, recipe.run.steps
    )
    if whole():
        done.set()
    async with asyncio.TaskGroup() as tasks:
        parts = [tasks.create_task(records.run()), tasks.create_task(pipeline.run())]
        places.refresh()
        await asyncio.wait_for(done.wait(), 20)
        for part in parts:
            part.cancel()
    await records.close()
    return pipeline, tickets


def records(path: Path) -> list[JournalRecord]:
    return list(JournalReader(path).replay())[1:]


def check_draws(recipe: Recipe, found: list[JournalRecord]) -> list[Admitted]:
    """Every admission is what a draw that was never interrupted makes of the results
    before it.
    """
    mixture = mixture_of(recipe, PROMPTS, State(Admission(B, 20)))
    admitted = dict[int, Admitted]()
    for record in found:
        match record:
            case Admitted():
                task, drawn = mixture.draw()
                assert (task, drawn) == (
                    record.task,
                    (record.prompt_id, record.epoch, record.reset, record.pool),
                )
                admitted[record.ticket] = record
            case Finished(group=group):
                mixture.observe(admitted[group.ticket].task, group.prompt.id, group.pass_rate)
            case Removed(pass_rate=pass_rate):
                of = admitted[record.ticket]
                assert pass_rate is not None
                mixture.observe(of.task, of.prompt_id, pass_rate)
    return list(admitted.values())


def check_budgets(recipe: Recipe, found: list[JournalRecord]) -> set[int]:
    """Each rollout thought as long as the stage of its ticket's due step says; the
    stages that were met.
    """
    due = {r.ticket: r.due_step for r in found if isinstance(r, Admitted)}
    met = set()
    for group in (r.group for r in found if isinstance(r, Finished)):
        stage = sum(due[group.ticket] >= s["until_step"] for s in STAGES)
        bounds = [*(s["thinking_tokens"] for s in STAGES), FULL][stage]
        met.add(stage)
        for rollout in group.rollouts:
            budget = thinking_budget(recipe.run.seed, group.ticket, rollout.sample, tuple(bounds))
            assert int((rollout.tokens == 7).sum()) == budget
            assert bounds[0] <= budget <= bounds[1]
    return met


@pytest.mark.parametrize("deaths", [(), (1,), (5, 9), (3, 3, 3, 17)])
def test_refilled_in_stages_and_interrupted_it_draws_as_if_it_were_not(
    tmp_path: Path, deaths: tuple[int, ...]
) -> None:
    recipe = recipe_of()
    for until in (*deaths, None):
        pipeline, _ = asyncio.run(run(recipe, tmp_path, until))
    found = records(tmp_path)
    admitted = check_draws(recipe, found)
    assert check_budgets(recipe, found) == {0, 1, 2}
    groups = [r.group for r in found if isinstance(r, Finished)]
    assert len(groups) == 8 * B
    assert all(g.has_variance for g in groups)
    assert {g.prompt.answer for g in groups} == {f"{'5'.ljust(200)} … (200 characters more)"}, (
        "all of it was graded with"
    )
    assert any(isinstance(r, Removed) for r in found)
    assert [pipeline.admission.step_of(g) for g in sorted(g.ticket for g in groups)] == [
        n // B for n in range(8 * B)
    ]
    shares = np.mean([a.task == "math" for a in admitted])
    assert abs(shares - 0.75) < 1 / len(admitted)
    assert any(
        a.due_step > pipeline.admission.step_of(a.ticket)
        for a in admitted
        if a.ticket in pipeline.admission.queue
    ), "some ticket was to be trained later when it was drawn: its budget did not follow"


def test_a_learner_older_than_the_journal_is_refused(tmp_path: Path) -> None:
    """As with `journal.keep: checkpoints`, once all checkpoints are gone or older ones
    were put back.
    """
    pipeline, _ = asyncio.run(run(recipe_of(), tmp_path, None))
    pipeline.admission.forget(3)
    for step in range(4):
        reply = decide(
            Next(incarnation="a", step=step, version=step),
            replace(pipeline.view(step), published_version=8),
        )
        if step < 3:
            assert isinstance(reply, Refused)
            assert f"step {step}, but the journal no longer has batches before 3" in reply.error
        else:
            assert reply == TrainStep(step, replay=True)


def test_solved_prompts_are_begun_again_task_by_task(tmp_path: Path) -> None:
    """Half of a group right is enough to exclude: every prompt that is kept here is
    solved when it is drawn.
    """
    recipe = recipe_of(
        run={"steps": 20},
        data=recipe_of().data.model_dump(mode="json") | {"curriculum": {"kind": "none"}},
        batch={"positive_threshold": 0.01, "zero_variance": "keep"},
        length={"stages": []},
    )
    unsolved = {t: sum(not int(p.tokens[1]) % 3 for p in of.train) for t, of in PROMPTS.items()}
    assert unsolved == {"math": 10, "code": 6}
    kept = {
        t: TaskPrompts([p for p in of.train if int(p.tokens[1]) % 3], [])
        for t, of in PROMPTS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROMPTS, "math", kept["math"])
        patch.setitem(PROMPTS, "code", kept["code"])
        for until in (45, None):  # restarted after math has begun again
            asyncio.run(run(recipe, tmp_path, until))
        admitted = check_draws(recipe, records(tmp_path))
    again = [(n, a.task) for n, a in enumerate(admitted) if a.reset]
    assert {task for _, task in again} == {"math", "code"}
    assert again[0][0] < 45
    for task, of in kept.items():
        first = [a.prompt_id for a in admitted if a.task == task][: len(of.train)]
        assert sorted(first) == sorted(p.id for p in of.train), (
            "each once before any is drawn again"
        )


@pytest.mark.parametrize(
    ("rewards", "expected", "variance"),
    [
        ([1.0, math.nan, -1.0, -1.0], [1.0, -1 / 3, -1.0, -1.0], True),
        ([0.1, 0.1, 0.1, math.nan], [0.1, 0.1, 0.1, 0.1], False),
        ([math.nan, math.nan, -1.0], [-1.0, -1.0, -1.0], False),
    ],
)
def test_an_answer_that_no_grader_could_judge_has_no_part_in_what_is_learnt(
    rewards: list[float], expected: list[float], variance: bool
) -> None:
    made = [
        make.rollout(make.segment([5]), reward=r, sample=n, graded=r, grader_error=math.isnan(r))
        for n, r in enumerate(rewards)
    ]
    group = Group(ticket=0, prompt=PROMPTS["math"].train[0], rollouts=with_means(made, []))
    assert group.rewards.tolist() == expected
    assert group.has_variance is variance
    centred = centred_rewards(group, "group", {})
    assert np.abs(centred[np.isnan(rewards)]).max() < 1e-15
    known = np.array([r for r in rewards if r == r])
    assert centred[~np.isnan(rewards)] == pytest.approx(
        known - known.mean() if variance else 0 * known
    )


def test_a_group_of_which_no_answer_could_be_judged_is_void() -> None:
    unknown = make.rollout(reward=math.nan)
    with pytest.raises(GraderDown, match="no answer could be judged"):
        with_means([unknown, unknown], [])
    with pytest.raises(GraderDown, match=r"^its process ended$"):
        with_means([unknown, unknown], ["its process ended", "its process ended again"])


@pytest.mark.parametrize("lost", [1, 4])
def test_a_rollout_whose_grader_is_down_does_not_cost_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    calls = itertools.count()

    class OftenDown:
        async def grade(self, *_: Any) -> Grade:
            if next(calls) % 4 < lost:
                raise GraderDown("its process ended")
            return Grade(1.0, True, True)

    monkeypatch.setattr(TaskGraders, "__getitem__", lambda *_: OftenDown())
    recipe = recipe_of(batch={"zero_variance": "keep"}, length={"stages": []})
    asyncio.run(run(recipe, tmp_path / "j", 8))
    groups = [record.group for record in records(tmp_path / "j") if isinstance(record, Finished)]
    assert len(groups) >= 8
    for group in groups:
        assert group.void == ("its process ended" if lost == 4 else "")
        assert [r.reward for r in group.rollouts] == [1.0] * (0 if lost == 4 else 4)
        assert all(r.format_ok for r in group.rollouts), "what nobody judged is not malformed"
    if lost == 1:
        assert sum(r.grader_error for group in groups for r in group.rollouts) in range(
            len(groups) - 3, len(groups) + 4
        )


def test_refill_keeps_a_prompt_if_some_of_its_answers_are_right_and_some_wrong(
    tmp_path: Path,
) -> None:
    """DAPO's rule (arXiv 2503.14476, equation 11): right answers that differ in their
    overlong penalty alone are refilled.
    """
    recipe = recipe_of(
        length={
            "control": "overlong_penalty",
            "thinking_tokens": [19, 19],
            "answer_tokens": 8,
            "stages": [],
        }
    )
    asyncio.run(run(recipe, tmp_path, None, Wordy))
    found = records(tmp_path)
    groups = [r.group for r in found if isinstance(r, Finished)]
    assert len(groups) == 8 * B
    assert {r.reward for g in groups for r in g.rollouts} > {
        1 - 7 / 8,
        -1.0,
    }, "right answers were penalised"
    assert {0 < g.pass_rate < 1 for g in groups} == {True}
    assert {r.pass_rate for r in found if isinstance(r, Removed)} == {0.0, 1.0}
