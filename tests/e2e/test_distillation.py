"""On-policy distillation in a real run: a tiny student comes nearer to its teacher,
although teacher and learner are killed.
"""

from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.core.base.rundir import latest_rows
from tests.e2e import runs
from tests.e2e.runs import LiveRun, batches, check_history, check_nothing_left, check_parity

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 16
OVERRIDES = (
    "run.name=distilled",
    f"run.steps={STEPS}",
    "model.path=runs/student",
    "teacher.path=runs/quickstart-sft",
    "teacher.weight=1",
    "batch.zero_variance=keep",
    "batch.prompts=12",
    "batch.positive_threshold=null",
    "pipeline.k=2",
    f"evaluation.every={STEPS}",
    "evaluation.prompts=20",
    "checkpoint.every=4",
    "learner.optimizer.lr=5e-4",
)


def role(run: LiveRun, word: str) -> psutil.Process:
    """The main process of the role whose command has this word."""
    children = psutil.Process(run.process.pid).children()
    return next(child for child in children if child.is_running() and word in child.cmdline())


def test_a_student_approaches_its_teacher_over_two_deaths(workplace: Path) -> None:
    runs.warm_start("quickstart", "sft.steps=60", "model.path=runs/student", cwd=workplace)
    run = runs.start(workplace, *OVERRIDES)
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        for step, word in ((4, "--teacher"), (9, "learn")):
            run.wait_for(lambda step=step: run.steps() >= step, f"step {step}")  # type: ignore[misc]
            family += run.family()
            role(run, word).kill()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    check_history(run.rundir, run.recipe)
    check_parity(run.rundir)
    deaths = [e.role for e in run.rundir.events() if e.event == "restart"]
    assert deaths == ["teacher-0", "learner-0"]
    groups = [g for step in batches(run.rundir, run.recipe) for g in step]
    assert not [g.void for g in groups if g.void]
    rollouts = [r for g in groups for r in g.rollouts]
    assert all(
        r.teacher_logprobs is not None and len(r.teacher_logprobs) == len(r.tokens)
        for r in rollouts
    )
    apart = [row["kl_teacher"] for row in latest_rows(run.rundir.metrics)]
    print("kl_teacher", *(f"{x:.3f}" for x in apart))
    # Not the last steps: at this rate and lag it may rise again (docs/distillation.md).
    # Of four runs the weakest had 0.86.
    assert np.mean(apart[7:10]) < 0.95 * np.mean(apart[:3])
