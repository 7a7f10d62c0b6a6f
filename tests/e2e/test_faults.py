"""kill -9 of each role of a real run, in the middle of its work: the run goes on, and
its history is as if nothing had been.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.core import recipe as recipes
from megarl.core.base.rundir import latest_rows, step_of
from tests.e2e import runs
from tests.e2e.runs import (
    SMALL,
    LiveRun,
    check_ended,
    check_history,
    check_no_shared_memory,
    check_nothing_left,
)
from tests.faults.injection import with_faults

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

Start = Callable[..., LiveRun]


@pytest.fixture
def start(workplace: Path) -> Iterator[Start]:
    """start(name, *overrides): a run that is killed at the latest when
    the test ends.
    """
    started: list[LiveRun] = []

    def begin(name: str, *overrides: str) -> LiveRun:
        started.append(
            runs.start(workplace, f"run.name={name}", *SMALL, "run.steps=16", *overrides)
        )
        return started[-1]

    yield begin
    for run in started:
        run.kill()


def check_whole(run: LiveRun) -> None:
    recipe = recipes.load(str(run.rundir.recipe))
    check_history(run.rundir, recipe)
    scored = [row["step"] for row in latest_rows(run.rundir.eval)]
    # Due at 0, 5, 10, 15 and 16. One that was lost with its server or controller is
    # made up for at the next version published.
    assert (scored[0], scored[-1]) == (0, 16)
    assert len(scored) == 5
    assert all(a <= b <= a + 4 for a, b in zip((5, 10, 15), scored[1:4], strict=True))


TASKS = """
    {arithmetic: null, sums: {train: runs/quickstart-data/train-addition.jsonl,
     heldout: runs/quickstart-data/heldout-addition.jsonl, grader: exact, weight: 2},
     differences: {train: runs/quickstart-data/train-subtraction.jsonl,
     heldout: runs/quickstart-data/heldout-subtraction.jsonl, grader: exact}}"""
OVERRIDES = (
    f"data.tasks={TASKS}",
    "data.curriculum.kind=linear",
    "batch.zero_variance=refill",
    "length.stages=[{until_step: 8, thinking_tokens: [24, 30]}]",
    "journal.keep=checkpoints",
)
"""What has to survive with a role: the draws of a controller, the batches a learner
replays.
"""


def test_killed_roles_are_restarted(start: Start, workplace: Path) -> None:
    """At random moments after the first checkpoint, so that a learner has steps to
    replay.
    """
    run = start("kill", *OVERRIDES)
    family: list[psutil.Process] = []
    for role, step in (("serve", 5), ("learn", 7), ("rollout", 10)):
        run.wait_for(partial(run.has_trained, step), f"step {step}", runs.RUN_LIMIT_S)
        family += run.family()
        ports = run.ports()
        time.sleep(random.random())
        run.roles()[role].kill()
        run.wait_for(partial(run.has_role, role), f"a new {role}")
    family += run.family()
    assert run.finish() == 0, run.tail()
    check_whole(run)
    check_nothing_left(family, ports)
    recipe = recipes.load(str(run.rundir.recipe))
    drawn = runs.check_draws(run.rundir, recipe, workplace)
    groups = [g for batch in runs.batches(run.rundir, recipe) for g in batch]
    assert all(g.has_variance for g in groups)
    assert len(drawn) > len(groups), "some were refilled"
    due = {a.ticket: a.due_step for a in drawn}
    for group in groups:
        for r in group.rollouts:
            first_leg = r.tokens[: r.trained.tolist().index(False)] if r.interrupted else r.tokens
            assert len(first_leg) <= (30 if due[group.ticket] < 8 else 48) + (
                0 if r.interrupted else 8
            )


VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "serve": lambda process: process.name().startswith("sglang::sched"),
    "rollout": lambda process: True,
    "learn": lambda process: process.environ().get("RANK") == "1",
}
"""Which process of the role it is."""


@pytest.mark.slow
@pytest.mark.parametrize("role", VICTIMS)
def test_a_stopped_role_is_replaced(start: Start, role: str, record_property: Any) -> None:
    """SIGSTOP: it keeps its memory, ports and links, and does nothing."""
    run = start(f"stop-{role}", f"resources.learner_ranks={2 if role == 'learn' else 1}")
    run.wait_for(lambda: run.steps() >= 5, "step 5", runs.RUN_LIMIT_S)
    family = run.family()
    ports = run.ports()
    leader = run.roles()[role]
    victim = next(
        process for process in (leader, *leader.children(recursive=True)) if VICTIMS[role](process)
    )
    victim.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    run.wait_for(lambda: not victim.is_running(), "the end of the stopped process", 120)
    record_property("seconds until it was killed", round(time.monotonic() - stopped, 1))
    run.wait_for(lambda: role in run.roles(), f"a new {role}")
    family += run.family()
    trained = run.steps()
    run.wait_for(
        lambda: run.steps() > trained or run.process.poll() == 0, "a step", runs.RUN_LIMIT_S
    )
    record_property("seconds until a new step", round(time.monotonic() - stopped, 1))
    assert run.finish() == 0, run.tail()
    assert runs.summary(run.rundir)["restarts"] == 1
    check_whole(run)
    check_nothing_left(family, ports)


@pytest.mark.slow
def test_a_killed_supervisor_takes_everything_with_it_and_the_run_is_resumed(start: Start) -> None:
    run = start("kill-train")
    run.wait_for(lambda: run.steps() >= 6, "step 6", runs.RUN_LIMIT_S)
    family = run.family()
    ports = run.ports()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    check_ended(family, ports)
    again = start("kill-train", "run.resume=auto")
    assert again.finish() == 0, again.tail()
    check_no_shared_memory(family)  # nobody was left to remove it before
    check_whole(again)


@pytest.mark.slow
def test_interrupt_saves_and_leaves_nothing(start: Start) -> None:
    run = start("interrupt")
    run.wait_for(lambda: run.steps() >= 3, "step 3", runs.RUN_LIMIT_S)
    family = run.family()
    ports = run.ports()
    run.process.send_signal(signal.SIGINT)
    assert run.finish(120) == 130
    check_nothing_left(family, ports)
    assert runs.summary(run.rundir)["outcome"] == "stopped"
    saved = max(step_of(p) for p in run.rundir.checkpoints.iterdir())
    assert saved == run.steps()
    again = start("interrupt", "run.resume=auto")
    again.wait_for(lambda: bool(again.roles()), "roles")
    assert again.finish() == 0, again.tail()
    check_whole(again)


@pytest.mark.slow
def test_a_learner_of_two_ranks_that_is_told_to_make_room_saves(start: Start) -> None:
    """SIGTERM to torchrun and its ranks, as Slurm sends it ahead of a preemption: not
    to the supervisor.
    """
    run = start("make-room", "resources.learner_ranks=2")
    run.wait_for(lambda: run.steps() >= 5, "step 5", runs.RUN_LIMIT_S)
    family = run.family()
    ports = run.ports()
    torchrun = run.roles()["learn"]
    told = [torchrun, *torchrun.children(recursive=True)]
    assert len([process for process in told if "RANK" in process.environ()]) == 2
    for process in told:
        process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.tail()
    check_nothing_left(family, ports)
    summary = runs.summary(run.rundir)
    assert (summary["outcome"], summary["reason"], summary["restarts"]) == (
        "stopped",
        "as asked",
        0,
    )
    saved = max(step_of(p) for p in run.rundir.checkpoints.iterdir())
    assert saved == run.steps()


def test_no_process_is_left_when_a_role_cannot_start(start: Start) -> None:
    """FP8 needs a GPU: the run ends by itself, and says which role failed and why."""
    run = start("broken", "model.dtype=bf16", "model.fp8=blockwise")
    assert run.finish() == 1
    assert "learner-0" in run.output.read_text(errors="replace")
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(run.rundir.recipe) in (p.info["cmdline"] or [])
    ]


HANGING = """
import os, signal, time

def grade(submission):
    for n in range(2):  # the first two that are graded: no signal reaches what hangs in a C call
        try:
            os.close(os.open(f"hung-{n}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(3600)
    return submission.answer == submission.expected
"""


@pytest.mark.slow
def test_the_clock_jumps_and_the_grader_hangs(
    start: Start, workplace: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """An hour ahead, then two hours back, in all processes of the run: nobody is taken
    for dead, nothing waits, and the compute that is counted is what was held. Answers
    that hang are wrong and counted; the run goes on.
    """
    offset = workplace / "offset"
    offset.write_text("0")
    (workplace / "hanging.py").write_text(HANGING)
    for name, value in with_faults(INJECT_CLOCK=str(offset)).items():
        monkeypatch.setenv(name, value)
    run = start("surroundings", "data.tasks.arithmetic.grader=hanging:grade", "evaluation.every=16")
    for step, jump in ((3, 3600.0), (6, -3600.0)):
        run.wait_for(partial(run.has_trained, step), f"step {step}", runs.RUN_LIMIT_S)
        (workplace / "offset.new").write_text(str(jump))
        os.replace(workplace / "offset.new", offset)
    began = time.monotonic()
    assert run.finish() == 0, run.tail()
    record_property("from the second jump to the end, seconds", round(time.monotonic() - began, 1))
    summary = runs.summary(run.rundir)
    assert (summary["outcome"], summary["restarts"]) == ("finished", 0)
    check_history(run.rundir, recipes.load(str(run.rundir.recipe)))
    rows = latest_rows(run.rundir.metrics)
    assert max(b["time"] - a["time"] for a, b in itertools.pairwise(rows)) > 3000, (
        "the clock did jump"
    )
    hours = [row["compute_hours"] for row in rows]
    assert hours == sorted(hours)
    held = sum(row["step_seconds"] for row in rows) / 3600 * (os.cpu_count() or 1)
    assert 0.5 * held < hours[-1] < 1.5 * held + 0.1
    (log,) = run.rundir.logs.glob("controller/*.log")
    assert (
        log.read_text().count("a grading process hung and is replaced; the answer counts as wrong")
        == 2
    )
