"""Two servers, one of them killed while it works and while it is held for an evaluation; it comes back on the same port."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.messages import Stop
from megarl.process import die_with_parent
from megarl.rundir import read_jsonl
from tests.stack.conftest import ROOT, Running, Stack, start_servers
from tests.stack.test_controller import STEPS, Learner, Run, assert_law, controller_recipe, run_of, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.faults]


@pytest.fixture
def pair(models: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[tuple[Run, list[Running]]]:
    directory, hf_models = models
    recipe = controller_recipe(directory, tmp_path, [200, 400], {"prompts": 12, "samples": 16})
    endpoints, servers = start_servers(recipe, 2)
    try:
        with run_of(recipe, Stack(directory, recipe, endpoints, hf_models, servers[0])) as made:
            yield made, servers
    finally:
        for server in servers:
            server.stop()


def restart(run: Run, server: Running) -> None:
    """The same server on the same port, as the supervisor would."""
    index, port = server.address.id, server.address.url.rsplit(":", 1)[1]
    command = [sys.executable, "-W", "ignore", "-m", "megarl", "serve", str(run.rundir.recipe)]
    with server.log.open("ab") as log:
        server.process = subprocess.Popen(
            [*command, "--index", str(index), "--port", port],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


@pytest.mark.timeout(900)
def test_a_server_is_killed_while_it_is_held_and_comes_back(pair: tuple[Run, list[Running]]) -> None:
    run, servers = pair
    process = run.start()
    learner = Learner(run, 0)
    learner.link.limit_s = 400
    wait_for(lambda: "server 0 at" in run.log() and "server 1 at" in run.log())
    learner.go(until=1)
    held = run.log().split("version 0 is evaluated on server ")[1][0]
    victim = servers[int(held)]
    os.killpg(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    learner.go(until=3)
    restart(run, victim)
    wait_for(lambda: f"server {held} at" in run.log().split(f"server {held} is lost")[-1])
    assert isinstance(learner.go(), Stop)
    assert process.wait(60) == 0
    groups = assert_law(run, learner)
    rows = list(read_jsonl(run.rundir.eval))
    assert rows[0]["step"] in (0, 1), "the lost evaluation was done again at the next version published"
    resent = any(r.retries for g in groups for r in g.rollouts)
    assert resent or rows[0]["step"] == 1, "the dead server had nothing to do"
    assert rows[-1]["step"] == STEPS
