"""Servers of a job array join a run of another job, one is cancelled, the others end with the run."""

import json
import shutil

import psutil
import pytest

from megarl.core.base.rundir import latest_rows
from tests.e2e.runs import check_history
from tests.slurm.jobs import START_LIMIT_S, Job, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


def states(job: Job) -> dict[int, str]:
    status = json.loads(job.rundir.status.read_text())
    return {s["id"]: s["state"] for s in status["servers"]}


def test_an_array_of_servers_joins_a_run_and_leaves(jobs: Jobs) -> None:
    shutil.rmtree(jobs.cwd / "runs" / "spot", ignore_errors=True)  # of a first try
    job = jobs.train("spot", "run.steps=9999", "resources.servers=1", nodes=1)
    job.wait_for(lambda: job.steps() >= 1, "a step", START_LIMIT_S)
    array = jobs.submit("servers.sbatch", options=("--array=0-1",), RUN="runs/spot")
    job.wait_for(
        lambda: set(states(job)) >= {0, 1, 2} and "starting" not in states(job).values(), "both", START_LIMIT_S
    )
    before = job.steps()
    job.wait_for(lambda: job.steps() >= before + 2, "steps with both")
    assert latest_rows(job.rundir.metrics)[-1]["servers_joined"] >= 1
    jobs.cluster.says("scancel", f"{array.number}_0")
    job.wait_for(lambda: len(states(job)) == 2, "one to leave", 60.0)
    job.rundir.stop()
    job.wait_for_state("COMPLETED")
    jobs.cluster.wait_for(lambda: not jobs.cluster.says("squeue", "-h", "-j", array.number), "the end of the other")
    settings = job.recipe.run.model_copy(update={"steps": job.steps()})
    check_history(job.rundir, job.recipe.model_copy(update={"run": settings}))
    _, alive = psutil.wait_procs(job.processes(), timeout=20)
    assert alive == []
    outputs = [path.read_text() for path in jobs.cwd.glob("slurm-*.out")]
    assert any("SIGTERM came" in text for text in outputs), "the cancelled one said goodbye"
    assert any("the run" in text.rpartition("megarl: leaving:")[2] for text in outputs)
