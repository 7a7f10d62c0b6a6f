"""The shipped script of servers that join, as an array of jobs, with stand-ins for
SGLang and for the learner.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.messages import ServerAddress, Stop
from megarl.core.base.rundir import Endpoints, LinkKeys
from megarl.run.process import free_ports
from megarl.tools.eval.servers import wait_ready
from tests.slurm import stand_in_server
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT
from tests.stack import test_controller
from tests.stack.conftest import Running, Stack, two_models
from tests.stack.test_controller import Run, assert_law, controller_recipe, run_of
from tests.stack.test_fleet import publish
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run with one stand-in server of its own;
    both sides score each token with -1.
    """
    monkeypatch.setattr(
        test_controller,
        "scores",
        lambda _, rows: [np.full(len(r) - 1, -1.0, np.float32) for r in rows],
    )
    models = two_models(tmp_path, tiny_llama, max_position_embeddings=4096, eos_token_id=None)
    port = free_ports(1)[0]
    recipe = controller_recipe(tmp_path, tmp_path, [300, 500], {"prompts": 4, "samples": 2})
    log = tmp_path / "own.log"
    url = f"http://127.0.0.1:{port}"
    endpoints = Endpoints(
        session="s",
        controller="",
        servers=(url,),
        api_key="user",
        admin_key="admin",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    words = [sys.executable, stand_in_server.__file__, "--index", "0", "--port", str(port)]
    process = subprocess.Popen(
        words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, start_new_session=True
    )
    stack = Stack(
        tmp_path, recipe, endpoints, models, Running(ServerAddress(id=0, url=url), process, log)
    )
    try:
        wait_ready(url, 60.0, process.poll)
        with run_of(recipe, stack) as made:
            yield made
    finally:
        process.kill()
        process.wait()


def test_an_array_of_servers_joins_a_run_leaves_and_goes_on_as_a_new_job(
    cluster: Cluster, run: Run, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nshift 2\nexec {sys.executable} {stand_in_server.__file__} "$@"\n'
    )
    python.chmod(0o755)
    environment = {
        "RUN": str(run.rundir.path),
        "MEGARL": str(tmp_path / "megarl"),
        "PYTHONPATH": str(ROOT),
    }
    options = (
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        "--mem=0",
        "--time=10",
        "--array=0-1",
        f"--output={tmp_path}/job-%a.out",
    )
    controller = run.start()
    learner = run.learner()
    learner.go(until=1)
    job = cluster.submit(*options, "launch/slurm/servers.sbatch", cwd=ROOT, environment=environment)
    outputs = [tmp_path / f"job-{n}.out" for n in (0, 1)]

    def said(words: str) -> int:
        return len(re.findall(words, run.log()))

    try:
        cluster.wait_for(
            lambda: said("server [12] at .* is up") == 2, "both servers", 120.0, outputs
        )
        learner.go(until=2)
        publish(learner)
        cluster.says("scancel", f"{job}_0")
        cluster.wait_for(
            lambda: said("server [12] is forgotten") == 1, "goodbye of the first", logs=outputs
        )
        cluster.says("scancel", "--batch", "--signal=USR1", f"{job}_1")  # its time is nearly up
        cluster.wait_for(
            lambda: said("server [12] is forgotten") == 2, "goodbye of the second", logs=outputs
        )
        cluster.wait_for(
            lambda: "Restarts=1" in cluster.says("scontrol", "show", "job", f"{job}_1"), "requeue"
        )
        assert isinstance(learner.go(), Stop)
        assert controller.wait(30) == 0
    finally:
        cluster.says("scancel", "--full", job)
        cluster.wait_for(lambda: not cluster.says("squeue", "-h"), "empty queue", 120.0)
    groups = assert_law(run, learner)
    assert {r.retries for g in groups for r in g.rollouts} == {0}
    assert "leaving: SIGTERM came" in outputs[0].read_text()
    assert "leaving: SIGUSR1 came" in outputs[1].read_text()


@pytest.mark.parametrize(
    ("words", "signal", "status", "restarts"),
    [(("--batch", "--signal=USR1"), "USR1", 138, "1"), ((), "TERM", 143, "0")],
    ids=["near its time limit", "cancelled"],
)
def test_a_task_with_the_id_of_its_array_leaves_alone(
    cluster: Cluster,
    tmp_path: Path,
    words: tuple[str, ...],
    signal: str,
    status: int,
    restarts: str,
) -> None:
    python = tmp_path / "python"
    log = tmp_path / "said"
    python.write_text(f"""#!/bin/sh
trap 'echo "$SLURM_ARRAY_TASK_ID told" >> {log}; exit {status}' {signal}
echo "$SLURM_ARRAY_TASK_ID up" >> {log}
while true; do sleep 0.2; done
""")
    python.chmod(0o755)
    small = ("--gpus-per-node=0", "--cpus-per-task=1", "--mem=0")
    options = (*small, "--time=10", "--array=0-2", f"--output={tmp_path}/job-%a.out")
    environment = {"RUN": "runs/none", "MEGARL": str(tmp_path / "megarl")}
    job = cluster.submit(*options, "launch/slurm/servers.sbatch", cwd=ROOT, environment=environment)
    outputs = [tmp_path / f"job-{n}.out" for n in range(3)]

    def said(word: str) -> list[str]:
        return sorted(
            line.split()[0] for line in log.read_text().splitlines() if line.endswith(word)
        )

    def running(tasks: list[str]) -> list[str]:
        return [task for task in tasks if cluster.field(task, "JobState") == "RUNNING"]

    try:
        cluster.wait_for(
            lambda: log.exists() and said("up") == ["0", "1", "2"], "all tasks", 120.0, outputs
        )
        own, *others = sorted(
            (f"{job}_{n}" for n in range(3)), key=lambda task: cluster.field(task, "JobId") != job
        )
        assert cluster.field(own, "JobId") == job
        cluster.says("scancel", *words, own)
        cluster.wait_for(
            lambda: bool(said("told")) and not running([own]), "end of the task", logs=outputs
        )
        cluster.wait_for(
            lambda: cluster.field(own, "JobState") != "COMPLETING", "its state", logs=outputs
        )
        assert cluster.field(own, "Restarts") == restarts
        assert said("told") == [own.partition("_")[2]]
        assert running(others) == others
    finally:
        cluster.says("scancel", "--full", job)
        cluster.wait_for(lambda: not cluster.says("squeue", "-h"), "empty queue", 120.0)
