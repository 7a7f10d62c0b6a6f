"""Nodes that are lost, jobs that are cancelled, a supervisor that is killed, a learner over two nodes: on a real Slurm."""

from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.runs import check_history
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import END_LIMIT_S, START_LIMIT_S, Job, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture
def down(cluster: Cluster) -> Iterator[list[str]]:
    """Nodes that a test has set down; they are up again after it."""
    names: list[str] = []
    yield names
    for name in names:
        cluster.says("scontrol", "update", f"nodename={name}", "state=resume")


def take_down(job: Job, name: str, down: list[str]) -> None:
    down.append(name)
    job.cluster.says("scontrol", "update", f"nodename={name}", "state=down", "reason=test")


def test_a_lost_node_costs_its_servers(jobs: Jobs, down: list[str]) -> None:
    job = jobs.train("lost-server", "run.steps=12", "resources.threads=2", nodes=3)
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    assert job.output.read_text().splitlines()[:3] == [
        "node1: controller-0, server 0",
        "node2: server 1",
        "node3: learner-0",
    ]
    gone = job.role("serve", 1)
    take_down(job, "node2", down)
    job.wait_for_state("COMPLETED")
    assert [event["role"] for event in job.events("dropped")] == ["server-1"]
    assert "its node node2 is lost: the run goes on with the other 1 servers" in job.output.read_text()
    assert not gone.is_running()
    check_history(job.rundir, job.recipe)


def test_a_lost_learner_node_sends_the_job_back_to_the_queue(jobs: Jobs, down: list[str]) -> None:
    job = jobs.train("lost-learner", "run.steps=10")
    job.wait_for(lambda: job.steps() >= 5, "step 5", START_LIMIT_S)
    take_down(job, "node2", down)
    job.wait_for(lambda: job.cluster.field(job.number, "Restarts") == "1", "requeue", END_LIMIT_S)
    assert "the node of learner-0 is lost" in job.output.read_text()
    job.wait_for_state("COMPLETED")
    assert "node3: learner-0" in job.output.read_text(), "it went on on another node"
    check_history(job.rundir, job.recipe)


def test_scancel_ends_it_all_and_the_run_can_go_on(jobs: Jobs) -> None:
    job = jobs.train("cancelled", "run.steps=1000")
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    family = job.processes()
    job.cluster.says("scancel", job.number)
    job.wait_for_state("CANCELLED", limit_s=END_LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert job.cluster.field(job.number, "Restarts") == "0"


def test_steps_end_with_the_supervisor(jobs: Jobs) -> None:
    job = jobs.train("orphaned", "run.steps=1000")
    job.wait_for(lambda: job.steps() >= 1, "step 1", START_LIMIT_S)
    family = job.processes()
    next(p for p in family if "train" in p.info["cmdline"] and "bash" not in p.name()).kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    job.wait_for_state("FAILED", limit_s=END_LIMIT_S)


def test_learner_over_two_nodes(jobs: Jobs) -> None:
    job = jobs.train("wide", "run.steps=4", "resources.learner_ranks=4", nodes=3)
    job.wait_for_state("COMPLETED")
    assert job.output.read_text().splitlines()[1:3] == ["node2: learner ranks 0-1", "node3: learner ranks 2-3"]
    logs = sorted(log.name for log in (job.rundir.logs / "learner").iterdir())
    assert logs == ["node2.0.log", "node2.1.log", "node3.2.log", "node3.3.log"]
    check_history(job.rundir, job.recipe)
