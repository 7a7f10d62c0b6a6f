"""The shipped 8B script with a tiny recipe: two servers on one node, the learner on the other."""

import psutil
import pytest

from megarl.rundir import read_jsonl
from tests.e2e.runs import check_history, summary
from tests.slurm.jobs import END_LIMIT_S, START_LIMIT_S, Job, Jobs

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]


def saved(job: Job) -> int:
    return max(int(path.name.removeprefix("step-")) for path in job.rundir.checkpoints.iterdir())


def step_daemon(role: psutil.Process) -> psutil.Process:
    """The slurmstepd above a role."""
    return next(p for p in role.parents() if p.name().startswith("slurmstepd"))


def test_it_saves_when_told_to_is_queued_again_and_goes_on_and_one_dead_step_costs_one_server(jobs: Jobs) -> None:
    job = jobs.train("preempted", "run.steps=14")
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    lines = job.output.read_text().splitlines()
    assert lines[:2] == ["node1: controller-0, servers 0-1", "node2: learner-0"]
    logs = {str(log.relative_to(job.rundir.logs)) for log in job.rundir.logs.glob("*/*.log")}
    assert logs == {"server/node1.0.log", "server/node1.1.log", "controller/node1.0.log", "learner/node2.0.log"}
    family = job.processes()

    jobs.cluster.says("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(
        lambda: "Restarts=1" in jobs.cluster.says("scontrol", "show", "job", job.number), "requeue", END_LIMIT_S
    )
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    before = job.steps()
    assert saved(job) == before, "a checkpoint of the last step"
    assert summary(job.rundir)["reason"] == "stopped as asked"

    job.wait_for(lambda: job.steps() >= before + 1, "a step more", START_LIMIT_S)
    assert [row["step"] for row in read_jsonl(job.rundir.metrics)] == list(range(job.steps())), "no step was done twice"
    others = {kind: job.role(kind).pid for kind in ("rollout", "learn")} | {"serve": job.role("serve", 0).pid}
    dead = job.role("serve", 1)
    step_daemon(dead).kill()
    job.wait_for(lambda: bool(job.events("restart")), "a restart", END_LIMIT_S)
    job.wait_for(
        lambda: not dead.is_running() or dead.status() == psutil.STATUS_ZOMBIE, "end of the dead step", END_LIMIT_S
    )
    assert others == {kind: job.role(kind).pid for kind in ("rollout", "learn")} | {"serve": job.role("serve", 0).pid}
    job.wait_for_state("COMPLETED")
    assert [event["role"] for event in job.events("restart")] == ["server-1"]
    check_history(job.rundir, job.recipe)
    assert job.processes() == []
