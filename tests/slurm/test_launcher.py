"""Steps of a real Slurm job under the real supervisor and the shipped 8B script, with
small processes as the roles: what dies, where, and what that costs.
"""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megarl.core.base.rundir import latest_rows, read_jsonl
from tests.e2e.runs import summary
from tests.processes import alive
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT
from tests.slurm.jobs import Job, Jobs

pytestmark = [pytest.mark.faults]


def pids(job: Job, role: str, children: bool = True) -> list[int]:
    """All processes that stood in for a role so far, and their children."""
    rows = read_jsonl(job.rundir.path / f"{role}.pids")
    return [row["pid"] for row in rows if children or "child" not in row]


def newest(job: Job, role: str) -> int:
    return pids(job, role, children=False)[-1]


def everyone(job: Job) -> list[int]:
    return [pid for path in job.rundir.path.glob("*.pids") for pid in pids(job, path.stem)]


def wait_until_gone(job: Job, processes: list[int]) -> None:
    job.cluster.wait_for(lambda: not any(map(alive, processes)), f"end of {processes}")


def begun(stand_in_jobs: Jobs, name: str, *overrides: str, nodes: int = 2) -> Job:
    """A run that has made steps, with all its roles."""
    job = stand_in_jobs.train(name, "run.steps=5000", *overrides, nodes=nodes)
    roles = ("server-0", "server-1", "controller-0", "learner-0")
    job.wait_for(lambda: job.steps() >= 3 and all(pids(job, role) for role in roles), "step 3")
    return job


def finish(job: Job) -> None:
    (job.rundir.path / "enough").touch()
    job.wait_for_state("COMPLETED")
    wait_until_gone(job, everyone(job))
    steps = [row["step"] for row in latest_rows(job.rundir.metrics)]
    assert steps == list(range(len(steps)))


def test_told_to_save_it_is_queued_again_and_goes_on(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "preempted")
    assert "controller-0, servers 0-1\n" in job.output.read_text()
    family = everyone(job)
    job.cluster.says("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda: job.cluster.field(job.number, "Restarts") == "1", "requeue")
    wait_until_gone(job, family)
    assert summary(job.rundir)["reason"] == "as asked"
    before = job.steps()
    job.wait_for(lambda: job.steps() > before, "a step more")
    finish(job)
    assert job.events("restart") == []
    assert len(job.events("stopping")) == 1


@pytest.mark.parametrize("reached", [(), ("--full",)], ids=["steps", "steps-and-script"])
def test_sigterm_of_a_job_that_stays_is_preemption(
    stand_in_jobs: Jobs, reached: tuple[str, ...]
) -> None:
    """Slurm sends it to the steps at first, and to the script as well at the end of the
    grace time.
    """
    job = begun(stand_in_jobs, "evicted")
    job.cluster.says("scancel", *reached, "--signal=TERM", job.number)
    job.wait_for(lambda: job.cluster.field(job.number, "Restarts") == "1", "requeue")
    assert summary(job.rundir)["reason"] == "as asked"
    before = job.steps()
    job.wait_for(lambda: job.steps() > before, "a step more")
    finish(job)


GPUS = """
import time
from pathlib import Path
from megarl.core.base.rundir import RunDir
from megarl.run.launcher import RoleCommand
from megarl.run.placement import Place
from megarl.run.restart import Role
from megarl.run.srun import SrunLauncher
rundir = RunDir(Path("run").absolute())
rundir.path.mkdir()
(rundir.path / ".lock").touch()
launcher = SrunLauncher(rundir, "lo")
nodes = launcher.survey(1)
step = launcher.start(RoleCommand(Role("learner"), ("-c", "pass"), {}, Place(nodes[1:], nodes[1].gpus), rundir))
while step.status() is None:
    time.sleep(0.1)
print([node.gpus for node in nodes], step.status(), flush=True)
"""


@pytest.mark.parametrize("asked", ["--gpus=4", "--gpus-per-node=2"])
def test_gpus_may_be_asked_for_by_node_or_for_all_nodes(
    cluster: Cluster, tmp_path: Path, asked: str
) -> None:
    """In a job with `--gpus` a step on some of its nodes would ask for all GPUs, and be
    refused.
    """
    (tmp_path / "job").write_text(
        f"#!/bin/sh\nunset SLURM_GPUS\nexec {sys.executable} -c '{GPUS}'\n"
    )
    words = (
        asked,
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=5",
        f"--output={tmp_path}/said",
        "job",
    )
    job = cluster.submit(*words, cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    cluster.wait_for(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), "end of the job")
    assert (tmp_path / "said").read_text().splitlines()[-1] == "[('0', '1'), ('0', '1')] 0"


def test_a_dead_step_costs_one_server(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "step")
    others = [newest(job, role) for role in ("server-0", "controller-0", "learner-0")]
    dead = newest(job, "server-1")
    family = pids(job, "server-1")
    next(p for p in psutil.Process(dead).parents() if p.name().startswith("slurmstepd")).kill()
    job.wait_for(lambda: newest(job, "server-1") != dead, "a new server")
    wait_until_gone(job, family)
    assert others == [newest(job, role) for role in ("server-0", "controller-0", "learner-0")]
    finish(job)
    assert [event["role"] for event in job.events("restart")] == ["server-1"]


def test_a_stopped_role_is_seen_on_its_node(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "frozen")
    frozen = newest(job, "learner-0")
    os.kill(frozen, signal.SIGSTOP)
    job.wait_for(lambda: newest(job, "learner-0") != frozen, "a new learner")
    assert next(event["why"] for event in job.events("hung")).startswith("has been stopped")
    finish(job)


def test_a_lost_node_costs_its_servers(stand_in_jobs: Jobs, down: list[str]) -> None:
    job = begun(stand_in_jobs, "lost-server", "resources.threads=2", nodes=3)
    assert job.output.read_text().splitlines()[:3] == [
        "node1: controller-0, server 0",
        "node2: server 1",
        "node3: learner-0",
    ]
    family = pids(job, "server-1")
    job.take_down("node2", down)
    job.wait_for(lambda: bool(job.events("dropped")), "dropped server")
    wait_until_gone(job, family)
    before = job.steps()
    job.wait_for(lambda: job.steps() > before, "a step more")
    finish(job)
    assert [(event["role"], event["nodes"]) for event in job.events("dropped")] == [
        ("server-1", ["node2"])
    ]
    assert "its node is lost: the run goes on with the other 1 servers" in job.output.read_text()


@pytest.mark.slow
def test_what_slurm_cannot_end_ends_itself(stand_in_jobs: Jobs, down: list[str]) -> None:
    """The server's node has lost its slurmd; the server lives there until it finds that
    nobody hears it.
    """
    job = begun(stand_in_jobs, "lost-slurmd", "resources.threads=2", nodes=3)
    family = pids(job, "server-1")
    job.cluster.kill("node2")
    job.take_down("node2", down)
    job.wait_for(lambda: bool(job.events("dropped")), "dropped server")
    assert any(map(alive, family))
    wait_until_gone(job, family)
    job.cluster.revive()
    finish(job)


def test_a_lost_learner_node_sends_the_job_back_to_the_queue(
    stand_in_jobs: Jobs, down: list[str]
) -> None:
    job = begun(stand_in_jobs, "lost-learner")
    node = job.events("started")[-1]["nodes"][0]
    job.take_down(node, down)
    job.wait_for(lambda: job.cluster.field(job.number, "Restarts") == "1", "requeue")
    assert "the node of learner-0 is lost" in job.output.read_text()
    before = job.steps()
    job.wait_for(lambda: job.steps() > before, "a step more")
    assert job.events("started")[-1]["nodes"] != [node]
    finish(job)


def test_sigint_to_the_script_saves_and_ends_it(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "enough-of-it")
    job.cluster.says("scancel", "--batch", "--signal=INT", job.number)
    job.wait_for_state("FAILED", fails=True)
    assert summary(job.rundir)["reason"] == "as asked"
    assert job.cluster.field(job.number, "Restarts") == "0"
    wait_until_gone(job, everyone(job))


def test_scancel_ends_it_all(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "cancelled")
    job.cluster.says("scancel", job.number)
    job.wait_for_state("CANCELLED")
    wait_until_gone(job, everyone(job))
    assert job.cluster.field(job.number, "Restarts") == "0"


def test_steps_end_with_the_supervisor(stand_in_jobs: Jobs) -> None:
    job = begun(stand_in_jobs, "orphaned")
    psutil.Process(int((job.rundir.path / ".lock").read_text().split()[0])).kill()  # N on HOST
    wait_until_gone(job, everyone(job))
    job.wait_for_state("FAILED", fails=True)


def test_a_role_that_cannot_start_ends_the_job_with_its_causes(stand_in_jobs: Jobs) -> None:
    """The model is broken from the start: told in a table, with the node, before the
    end of the log.
    """
    (stand_in_jobs.cwd / "runs" / "broken").mkdir(parents=True)
    (stand_in_jobs.cwd / "runs" / "broken" / "broken").touch()
    job = stand_in_jobs.train("broken", "run.steps=10")
    job.wait_for_state("FAILED", fails=True)
    output = job.output.read_text()
    assert "megarl: learner-0 could not start" in output
    table = output[output.index("what died") :].split()
    _, node, *how = table[table.index("learner-0") :][:6]
    assert how == ["ended", "with", "status", "2"]
    assert "model is broken" in " ".join(table)
    assert job.rundir.log("learner", node, 0).exists()
