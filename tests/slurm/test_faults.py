"""Real runs on a real Slurm: a learner over two nodes, a step that dies, a node that is
lost.
"""

import psutil
import pytest

from megarl.core.base.process import NODE
from megarl.core.base.rundir import read_jsonl
from tests.e2e.runs import check_history
from tests.slurm.jobs import END_LIMIT_S, START_LIMIT_S, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_learner_over_two_nodes(jobs: Jobs) -> None:
    job = jobs.train("wide", "run.steps=4", "resources.learner_ranks=4", nodes=3)
    job.wait_for_state("COMPLETED")
    assert job.output.read_text().splitlines()[1:3] == [
        "node2: learner ranks 0-1",
        "node3: learner ranks 2-3",
    ]
    logs = sorted(log.name for log in (job.rundir.logs / "learner").iterdir())
    assert logs == ["node2.0.log", "node2.1.log", "node3.2.log", "node3.3.log"]
    check_history(job.rundir, job.recipe)


def test_a_server_over_two_nodes_ends_and_restarts_as_a_whole(jobs: Jobs) -> None:
    """Killed is the rank on its second node, which answers nobody: that is noticed
    there. The first node's rank hangs, as it may in NCCL.
    """
    wide = (
        "resources.servers=1",
        "resources.server_tensor_parallel=2",
        "resources.threads=2",
    )  # a node has one place
    job = jobs.train("wide-server", "run.steps=8", *wide, nodes=3)
    job.wait_for(lambda: job.steps() >= 2, "step 2", START_LIMIT_S)
    assert job.output.read_text().splitlines()[:2] == [
        "node1: controller-0, server 0",
        "node2: server 0",
    ]
    logs = sorted(log.name for log in (job.rundir.logs / "server").iterdir())
    assert logs == ["node1.0.log", "node2.0.log"]
    others = [job.role("rollout").pid, job.role("learn").pid]
    first, second = sorted(job.roles("serve"), key=lambda process: process.environ()[NODE])
    hanging = [first, *first.children()]
    dying = second.children()
    for process in hanging:
        process.suspend()
    dying[0].kill()
    _, alive = psutil.wait_procs([*hanging, second, *dying], timeout=END_LIMIT_S)
    assert alive == []
    at = job.steps()
    job.wait_for(lambda: job.steps() > at + 2, "steps by the new one")
    assert [job.role("rollout").pid, job.role("learn").pid] == others
    job.wait_for_state("COMPLETED")
    assert [event["role"] for event in job.events("restart")] == ["server-0"]
    check_history(job.rundir, job.recipe)
    assert job.processes() == []


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
