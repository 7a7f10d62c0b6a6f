"""A run that begins at a step of another: what it begins with, against the parent's
records one by one, and what is refused.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checks import start
from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, latest_rows, latest_scores, write_jsonl
from megarl.core.base.types import Group, Prompt, int32
from megarl.core.controller.draw import mixture_of
from megarl.core.journal.journal import Journal, JournalReader
from megarl.core.journal.records import (
    Admitted,
    Evaluated,
    Finished,
    JournalRecord,
    PublishedVersion,
    Removed,
    Session,
)
from megarl.core.recipe import Recipe, dump
from megarl.run import fork
from tests import make

STEPS = 6
PROMPTS = 3
LAG = 2


def group(ticket: int, prompt: str, correct: bool) -> Group:
    rollout = make.rollout(make.segment([5, 6]), reward=1.0, correct=correct)
    return Group(
        ticket=ticket, prompt=Prompt(id=prompt, tokens=int32([7]), answer=""), rollouts=(rollout,)
    )


def records(seed: int) -> list[JournalRecord]:
    """A controller's life: tickets drawn ahead, finished in any order, some removed,
    until STEPS batches were trained.
    """
    rng = random.Random(seed)
    made: list[JournalRecord] = []
    step = 0
    queue: list[int] = []  # not removed
    open_now: list[int] = []
    prompts: dict[int, str] = {}
    made.append(Session(session="s", time=0.0, devices=2, compute_unit="core"))
    made.append(PublishedVersion(version=0, time=1.0, compute_hours=0.1, servers=("a",)))
    while step < STEPS:
        if len(queue) // PROMPTS <= step + LAG and rng.random() < 0.5:
            ticket = len(prompts)
            prompts[ticket] = f"p{rng.randrange(8)}"
            made.append(
                Admitted(
                    ticket=ticket,
                    task="math",
                    prompt_id=prompts[ticket],
                    epoch=ticket // 8,
                    due_step=0,
                )
            )
            queue.append(ticket)
            open_now.append(ticket)
        elif open_now:
            ticket = open_now.pop(rng.randrange(len(open_now)))
            if rng.random() < 0.2:
                made.append(Removed(ticket=ticket, reason="zero variance", pass_rate=1.0))
                queue.remove(ticket)
            else:
                made.append(
                    Finished(group=group(ticket, prompts[ticket], rng.random() < 0.5), time=2.0)
                )
        batch = queue[step * PROMPTS : (step + 1) * PROMPTS]
        if len(batch) == PROMPTS and not any(ticket <= batch[-1] for ticket in open_now):
            step += 1
            made.append(
                PublishedVersion(version=step, time=3.0 + step, compute_hours=step, servers=("a",))
            )
            made.append(
                Evaluated(
                    version=step,
                    time=3.5 + step,
                    compute_hours=step,
                    pass_rate=0.5,
                    n_prompts=9,
                    samples=1,
                )
            )
    return made


def by_hand(made: list[JournalRecord], step: int) -> tuple[int, dict[str, float]]:
    """The first ticket that a fork draws at `step`,
    and the pass rates that it knows.
    """
    removed = {r.ticket for r in made if isinstance(r, Removed)}
    drawn = [r.ticket for r in made if isinstance(r, Admitted) and r.ticket not in removed]
    first = (
        drawn[step * PROMPTS]
        if step * PROMPTS < len(drawn)
        else sum(isinstance(r, Admitted) for r in made)
    )
    of_ticket = {r.ticket: r.prompt_id for r in made if isinstance(r, Admitted)}
    rates: dict[str, float] = {}
    for record in made:
        if isinstance(record, Finished) and record.group.ticket < first:
            rates[record.group.prompt.id] = record.group.pass_rate
        if isinstance(record, Removed) and record.ticket < first:
            rates[of_ticket[record.ticket]] = 1.0
    return first, rates


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rotate_bytes", [600, 1 << 20], ids=["many files", "one file"])
def test_the_draws_before_a_step(tmp_path: Path, seed: int, rotate_bytes: int) -> None:
    made = records(seed)
    journal = Journal.open(tmp_path, PROMPTS, LAG, rotate_bytes=rotate_bytes)
    for record in made:
        journal.append(record)
    journal.close()
    for step in range(1, STEPS + 1):
        first, rates = by_hand(made, step)
        state = JournalReader(tmp_path).state_before(step)
        assert state.admission.next_ticket == first
        assert state.tasks["math"].pass_rates == rates
        assert state.tasks["math"].drawn == first
        assert not state.unfinished
        assert state.finished + state.removed == first
    with pytest.raises(MegarlError, match="the batches before step 9 are not complete"):
        JournalReader(tmp_path).state_before(9)


@pytest.fixture
def parent(tmp_path: Path) -> RunDir:
    """A run of six steps with a checkpoint of step 4."""
    recipe = recipe_of(tmp_path, name="parent")
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    rundir.fingerprints.write_text(json.dumps({"model.path: weights": "w"}))
    hours = {"startup_hours": 0.5, "evaluation_hours": 0.25, "compute_unit": "core"}
    write_jsonl(
        rundir.metrics, [{"step": s, "compute_hours": s + 1.0} | hours for s in range(STEPS)]
    )
    score = {"pass_rate": 0.5, "n_prompts": 9, "samples": 1, "compute_unit": "core"}
    write_jsonl(
        rundir.eval, [{"step": s, "compute_hours": s + 1.0} | score for s in range(STEPS + 1)]
    )
    journal = Journal.open(rundir.rollouts, PROMPTS, LAG)
    journal.append(*records(0))
    journal.close()
    (rundir.checkpoints / "step-0000004").mkdir()
    for name in ("megarl.json", "weights.distcp"):
        (rundir.checkpoints / "step-0000004" / name).write_text(name)
    return rundir


def recipe_of(
    folder: Path, name: str = "fork", fork_at: int = 0, **sections: dict[str, Any]
) -> Recipe:
    run = {
        "name": name,
        "dir": str(folder),
        "steps": 20,
        "fork": f"{folder}/parent@{fork_at}" if fork_at else "",
    }
    tree: dict[str, Any] = {
        "run": run,
        "model": {"path": "m", "dtype": "fp32"},
        "batch": {"prompts": PROMPTS},
    }
    tree |= {"pipeline": {"k": LAG}}
    return make.recipe(tree, **sections)


def begun(recipe: Recipe) -> RunDir:
    """What `megarl train` does before its roles start."""
    rundir = RunDir(recipe.run.path)
    assert not start.check_history(recipe, rundir, {"model.path: weights": "w"})
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    rundir.fingerprints.write_text("{}")
    fork.start(recipe, rundir)
    return rundir


@pytest.mark.parametrize(("prompts", "lag", "phase"), [(PROMPTS, LAG, 1), (5, 1, 1), (2, 0, 4)])
def test_a_fork_at_a_checkpoint(
    tmp_path: Path, parent: RunDir, prompts: int, lag: int, phase: int
) -> None:
    """Its next ticket belongs to its first step whatever its batch, its compute goes
    on, and rows end where it begins.
    """
    pipeline = {"k": lag} if phase == 1 else {"k": phase, "kind": "ppo-off-policy"}
    recipe = recipe_of(
        tmp_path, fork_at=4, batch={"prompts": prompts}, pipeline=pipeline, loss={"kind": "clip"}
    )
    rundir = begun(recipe)
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-0000004"]
    original = parent.checkpoints / "step-0000004" / "weights.distcp"
    linked = rundir.checkpoints / "step-0000004" / "weights.distcp"
    assert linked.stat().st_ino == original.stat().st_ino
    assert [row["step"] for row in latest_rows(rundir.metrics)] == [0, 1, 2, 3]
    assert [row["step"] for row in latest_scores(rundir.eval)] == [0, 1, 2, 3, 4]

    journal = Journal.open(rundir.rollouts, prompts, lag, phase)  # as the controller opens it
    state = journal.state
    first, rates = by_hand(records(0), 4)
    assert state.admission.next_due() == 4
    assert state.admission.next_ticket == first
    assert state.tasks["math"].pass_rates == rates
    assert sorted(state.evaluations) == [1, 2, 3, 4]
    assert (state.startup_hours, state.evaluation_hours) == (0.5, 0.25)
    journal.append(Session(session="mine", time=1e9, devices=2, compute_unit="core"))
    assert state.compute_hours(1e9) == 4.0
    assert state.compute_hours(1e9 + 3600) == 6.0
    for ticket in range(first, first + prompts):
        assert state.admission.step_of(state.admission.admit()) == 4
        state.admission.finish(ticket)
    assert state.admission.batch(4) == tuple(range(first, first + prompts))
    assert state.admission.next_due() == 5
    journal.close()
    assert start.check_history(
        recipe.model_copy(update={"run": recipe.run.model_copy(update={"resume": "auto"})}),
        rundir,
        {},
    )


def test_a_fork_of_a_fork(tmp_path: Path, parent: RunDir) -> None:
    """Its parent has nothing from before the step at which it forked itself, be it
    draws or batches.
    """
    first = begun(recipe_of(tmp_path, fork_at=4))
    journal = Journal.open(first.rollouts, PROMPTS, LAG)
    admission = journal.state.admission
    for ticket in range(admission.next_ticket, admission.next_ticket + 2 * PROMPTS):
        drawn = Admitted(
            ticket=ticket,
            task="math",
            prompt_id=f"n{ticket}",
            epoch=9,
            due_step=admission.next_due(),
        )
        journal.append(drawn, Finished(group=group(ticket, f"n{ticket}", False), time=5.0))
    journal.close()
    lines = [{"step": s, "compute_hours": 9.0} for s in (4, 5)]
    shutil.copytree(first.checkpoints / "step-0000004", first.checkpoints / "step-0000005")
    first.metrics.write_text(
        first.metrics.read_text() + "".join(json.dumps(line) + "\n" for line in lines)
    )
    second = recipe_of(
        tmp_path,
        name="second",
        run={"fork": f"{first.path}@5", "name": "second", "dir": str(tmp_path)},
    )
    fork.check(second)
    assert (
        JournalReader(first.rollouts).state_before(5).admission.next_ticket
        == admission.next_ticket - PROMPTS
    )
    shutil.copytree(first.checkpoints / "step-0000004", first.checkpoints / "step-0000003")
    early = recipe_of(
        tmp_path, run={"fork": f"{first.path}@3", "name": "early", "dir": str(tmp_path)}
    )
    with pytest.raises(MegarlError, match="what was drawn before step 3 is gone"):
        fork.check(early)


@pytest.mark.parametrize(
    ("weights", "drawn"),
    [({"math": 1.0, "code": 1.0}, {"math": 10, "code": 10}), ({"math": 2.0}, {"math": 20})],
)
def test_other_shares_count_from_the_fork_on(
    tmp_path: Path, parent: RunDir, weights: dict[str, float], drawn: dict[str, int]
) -> None:
    """A task that the parent did not have is not drawn until it has its share of the
    parent's draws, too.
    """
    data = {
        "tasks": {
            name: {"train": "x", "heldout": "y", "weight": weight}
            for name, weight in weights.items()
        }
    }
    parent.recipe.write_text(
        dump(recipe_of(tmp_path, name="parent", data={"tasks": {"math": data["tasks"]["math"]}}))
    )
    recipe = recipe_of(tmp_path, fork_at=4, data=data)
    prompts = [Prompt(id=f"p{n}", tokens=int32([7]), answer="") for n in range(8)]
    state = JournalReader(begun(recipe).rollouts).fold()
    mixture = mixture_of(recipe, dict.fromkeys(weights, TaskPrompts(prompts, [])), state)
    assert Counter(mixture.draw()[0] for _ in range(20)) == drawn
    assert mixture.orders["math"].drawn == drawn["math"] + by_hand(records(0), 4)[0]


def test_a_crash_on_the_way_is_made_up_for(tmp_path: Path, parent: RunDir) -> None:
    recipe = recipe_of(tmp_path, fork_at=4)
    rundir = begun(recipe)
    snapshot = (rundir.rollouts / "000000.journal").read_bytes()
    (rundir.rollouts / "000000.journal").unlink()  # what is written last
    rundir.metrics.unlink()
    fork.start(recipe, rundir)
    assert (rundir.rollouts / "000000.journal").read_bytes() == snapshot
    assert len(latest_rows(rundir.metrics)) == 4
    (rundir.rollouts / "000000.journal").unlink()
    write_jsonl(rundir.metrics, [{"step": s} for s in range(7)])
    fork.start(recipe, rundir)
    assert len(latest_rows(rundir.metrics)) == 7, "a fork that has made steps is not begun again"


def gone(parent: RunDir) -> None:
    for file in parent.rollouts.glob("*.journal"):
        file.unlink()
    journal = Journal.open(parent.rollouts, PROMPTS, LAG, rotate_bytes=500)
    journal.append(*records(0))
    journal.close()
    for number in JournalReader(parent.rollouts).files()[:-1]:
        (parent.rollouts / f"{number:06}.journal").unlink()


def no_recipe(parent: RunDir) -> None:
    parent.recipe.unlink()


def no_checkpoint(parent: RunDir) -> None:
    shutil.rmtree(parent.checkpoints)


def nothing(parent: RunDir) -> None:
    pass


def frozen(parent: RunDir) -> None:
    parent.recipe.write_text(
        parent.recipe.read_text().replace("freeze_router: false", "freeze_router: true")
    )


CRITIC = {"centring": "critic", "zero_variance": "keep", "positive_threshold": None}


@pytest.mark.parametrize(
    ("damage", "at", "sections", "said"),
    [
        (no_recipe, 4, {}, "parent: not a run directory"),
        (nothing, 7, {}, "run.fork: .*parent has made 6 steps, not 7"),
        (nothing, 4, {"run": {"steps": 4}}, "run.steps: 4, and the fork begins after step 4"),
        (nothing, 4, {"run": {"seed": 3}}, "run.seed: 0 in .*, 3 now; a fork keeps it"),
        (
            nothing,
            4,
            {"model": {"dtype": "bf16"}},
            "model.dtype: 'fp32' in .*, 'bf16' now; a fork keeps it",
        ),
        (frozen, 4, {}, "freeze_router: True in .*, False now; a fork keeps it"),
        (nothing, 4, {"batch": CRITIC}, "batch.centring: critic, and .* has none"),
        (nothing, 5, {}, r"no checkpoint of step 5; the nearest is of step 4: give .*parent@4$"),
        (no_checkpoint, 4, {}, "run.fork: .*parent has no checkpoint; a fork begins at one"),
        (gone, 4, {}, "what was drawn before step 4 is gone"),
    ],
)
def test_refused(
    tmp_path: Path,
    parent: RunDir,
    damage: Callable[[RunDir], None],
    at: int,
    sections: dict[str, Any],
    said: str,
) -> None:
    run = {
        "name": "fork",
        "dir": str(tmp_path),
        "fork": f"{tmp_path}/parent@{at}",
        "steps": 20,
    } | sections.get("run", {})
    recipe = recipe_of(tmp_path, **sections | {"run": run})
    damage(parent)
    with pytest.raises(MegarlError, match=said):
        start.check_history(recipe, RunDir(recipe.run.path), {"model.path: weights": "w"})


def test_other_weights_are_refused(tmp_path: Path, parent: RunDir) -> None:
    recipe = recipe_of(tmp_path, fork_at=4)
    with pytest.raises(MegarlError, match=r"model.path: weights: not what the run began with"):
        start.check_history(recipe, RunDir(recipe.run.path), {"model.path: weights": "others"})


def test_layout_may_change_at_a_checkpoint(tmp_path: Path, parent: RunDir) -> None:
    assert begun(recipe_of(tmp_path, fork_at=4, resources={"learner_ranks": 3})).rollouts.exists()
