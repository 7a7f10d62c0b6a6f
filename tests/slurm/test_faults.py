"""Real runs on a real Slurm: a learner over two nodes, a step that dies, a node that is lost."""

import psutil
import pytest

from megarl.core.base.rundir import read_jsonl
from tests.e2e.runs import check_history
from tests.slurm.jobs import END_LIMIT_S, START_LIMIT_S, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_learner_over_two_nodes(jobs: Jobs) -> None:
    job = jobs.train("wide", "run.steps=4", "resources.learner_ranks=4", nodes=3)
    job.wait_for_state("COMPLETED")
    assert job.output.read_text().splitlines()[1:3] == ["node2: learner ranks 0-1", "node3: learner ranks 2-3"]
    logs = sorted(log.name for log in (job.rundir.logs / "learner").iterdir())
    assert logs == ["node2.0.log", "node2.1.log", "node3.2.log", "node3.3.log"]
    check_history(job.rundir, job.recipe)


def test_a_dead_step_costs_one_server(jobs: Jobs) -> None:
    job = jobs.train("dead-step", "run.steps=5000")
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    others = [job.role("rollout").pid, job.role("learn").pid, job.role("serve", 0).pid]
    dead = job.role("serve", 1)
    next(p for p in dead.parents() if p.name().startswith("slurmstepd")).kill()
    psutil.wait_procs([dead], timeout=END_LIMIT_S)
    assert not dead.is_running()
    at = job.steps()
    job.wait_for(lambda: job.steps() > at + 2, "steps by one server")
    job.wait_for(lambda: bool(job.events("restart")), "a restart")
    assert [job.role("rollout").pid, job.role("learn").pid, job.role("serve", 0).pid] == others
    job.rundir.stop_file.touch()
    job.wait_for_state("COMPLETED")
    assert [event["role"] for event in job.events("restart")] == ["server-1"]
    steps = [row["step"] for row in read_jsonl(job.rundir.metrics)]
    assert steps == list(range(len(steps))), "nothing was done twice"


def test_a_lost_node_costs_its_servers(jobs: Jobs, down: list[str]) -> None:
    job = jobs.train("lost-server", "run.steps=12", "resources.threads=2", nodes=3)
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    job.take_down("node2", down)
    job.wait_for_state("COMPLETED")
    assert [event["role"] for event in job.events("dropped")] == ["server-1"]
    check_history(job.rundir, job.recipe)
