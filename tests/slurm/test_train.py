"""The shipped 8B script with a tiny recipe: two servers on one node, the learner on the
other.
"""

import shutil

import psutil
import pytest

from megarl.core.base.rundir import read_jsonl, step_of
from tests.e2e.runs import check_history, summary
from tests.slurm.jobs import END_LIMIT_S, START_LIMIT_S, Job, Jobs

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def saved(job: Job) -> int:
    return max(step_of(path) for path in job.rundir.checkpoints.iterdir())


def test_it_trains_saves_when_told_to_is_queued_again_and_goes_on_at_the_same_step(
    jobs: Jobs,
) -> None:
    shutil.rmtree(jobs.cwd / "runs" / "queued-again", ignore_errors=True)  # of a first try
    job = jobs.train("queued-again", "run.steps=14")
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    placed = [
        line.split(":")[0]
        for line in job.output.read_text().splitlines()
        if line.startswith("node")
    ]
    one, other = placed[:2]
    logs = {str(log.relative_to(job.rundir.logs)) for log in job.rundir.logs.glob("*/*.log")}
    of_one = (
        f"{role}/{one}.{rank}.log"
        for role, rank in (("server", 0), ("server", 1), ("controller", 0))
    )
    assert logs == {*of_one, f"learner/{other}.0.log"}
    family = job.processes()

    jobs.cluster.says("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(
        lambda: "Restarts=1" in jobs.cluster.says("scontrol", "show", "job", job.number),
        "requeue",
        END_LIMIT_S,
    )
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    before = job.steps()
    assert saved(job) == before, "a checkpoint of the last step"
    assert summary(job.rundir)["reason"] == "as asked"

    job.wait_for(lambda: job.steps() >= before + 1, "a step more", START_LIMIT_S)
    steps = [row["step"] for row in read_jsonl(job.rundir.metrics)]
    assert steps == list(range(len(steps))), "no step was done twice"
    job.wait_for_state("COMPLETED")
    assert job.events("restart") == []
    check_history(job.rundir, job.recipe)
    assert job.processes() == []
