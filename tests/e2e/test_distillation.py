"""On-policy distillation in a real run: a tiny student comes nearer to its teacher,
although teacher and learner are killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.core.base.rundir import latest_rows
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready
from tests.e2e import runs
from tests.e2e.runs import (
    START_LIMIT_S,
    LiveRun,
    batches,
    check_history,
    check_nothing_left,
    check_parity,
)

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 16
OVERRIDES = (
    "run.name=distilled",
    f"run.steps={STEPS}",
    "model.path=runs/student",
    "teacher.api_key=env:TEACHER_KEY",
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


@contextmanager
def teacher(workplace: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`megarl serve --model` in a session of its own, ready."""
    command = [sys.executable, "-m", "megarl", "serve", "quickstart", f"--port={port}"]
    command += ["--model=runs/quickstart-sft", "--api-key=env:TEACHER_KEY"]
    with (workplace / "teacher.log").open("ab") as log:
        server = subprocess.Popen(
            command, cwd=workplace, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_ready(f"http://127.0.0.1:{port}", START_LIMIT_S, server.poll)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_student_approaches_its_teacher_over_two_deaths(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "a-key-for-the-teacher")
    runs.warm_start("quickstart", "sft.steps=60", "model.path=runs/student", cwd=workplace)
    (port,) = free_ports(1)
    with ExitStack() as teachers:
        first = teachers.enter_context(teacher(workplace, port))
        run = runs.start(workplace, *OVERRIDES, f"teacher.url=http://127.0.0.1:{port}")
        family, ports = distil(run, first, lambda: teachers.enter_context(teacher(workplace, port)))
    check(run, family, ports)


def distil(
    run: LiveRun, first: subprocess.Popen[bytes], again: Callable[[], object]
) -> tuple[list[psutil.Process], list[int]]:
    """Kill the teacher, start another in its place, and kill the learner; return the
    run's processes and ports.
    """
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        run.wait_for(lambda: run.steps() >= 4, "step 4")
        os.killpg(first.pid, signal.SIGKILL)
        again()
        run.wait_for(lambda: run.steps() >= 9, "step 9")
        family += run.family()
        role(run, "learn").kill()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    return family, ports


def check(run: LiveRun, family: list[psutil.Process], ports: list[int]) -> None:
    """Check what the run has left."""
    check_nothing_left(family, ports)
    check_history(run.rundir, run.recipe)
    check_parity(run.rundir)
    deaths = [e.role for e in run.rundir.events() if e.event == "restart"]
    assert deaths == ["learner-0"]
    groups = [g for step in batches(run.rundir, run.recipe) for g in step]
    assert not [g.void for g in groups if g.void]
    rollouts = [r for g in groups for r in g.rollouts]
    assert all(
        r.teacher_logprobs is not None and len(r.teacher_logprobs) == len(r.tokens)
        for r in rollouts
    )
    apart = [row["kl_teacher"] for row in latest_rows(run.rundir.metrics)]
    print("kl_teacher", *(f"{x:.3f}" for x in apart))
    # Not the last steps: at this rate and lag it may rise again
    # (docs/how-to/distillation.md).
    # Of four runs the weakest had 0.86.
    assert np.mean(apart[7:10]) < 0.95 * np.mean(apart[:3])
