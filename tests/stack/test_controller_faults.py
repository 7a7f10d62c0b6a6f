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
from megarl.recipe import dump
from megarl.rundir import Endpoints, RunDir, free_ports, read_jsonl
from tests.stack.conftest import ROOT, Running, Stack, stack_recipe, start_servers
from tests.stack.test_controller import (
    GENERATIONS,
    STEPS,
    B,
    K,
    Learner,
    Run,
    assert_law,
    wait_for,
    write_prompts,
    write_tokenizer,
)  # fmt: skip

pytestmark = [pytest.mark.stack, pytest.mark.faults]


@pytest.fixture
def pair(models: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[tuple[Run, list[Running]]]:
    directory, hf_models = models
    write_tokenizer(directory / "a")
    write_prompts(tmp_path / "train.jsonl", 0, 40)
    write_prompts(tmp_path / "heldout.jsonl", 40, 12)
    recipe = stack_recipe(
        directory,
        run={"name": "pair", "dir": str(tmp_path), "steps": STEPS, "seed": 5},
        data={"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl"), "grader": "exact"},
        length={
            "prompt_tokens": 16,
            "thinking_tokens": [200, 400],
            "answer_tokens": 20,
            "interruption": "\u0110</think>",
        },
        sampling={"generations": GENERATIONS},
        pipeline={"k": K},
        batch={"prompts": B, "zero_variance": "keep"},
        evaluation={"every": 3, "prompts": 12, "samples": 4},
        serving={"max_running_requests": 24, "start_timeout_s": 240.0, "kv_tokens": 16384, "stream_interval": 8},
    )
    endpoints, servers = start_servers(recipe, 2)
    rundir = RunDir.of(recipe)
    rundir.write_endpoints(
        Endpoints(
            session="pair",
            controller=f"tcp://127.0.0.1:{free_ports(1)[0]}",
            servers=endpoints.servers,
            api_key=endpoints.api_key,
            admin_key=endpoints.admin_key,
            rendezvous_port=1,
        )
    )
    rundir.recipe.write_text(dump(recipe))
    run = Run(recipe, Stack(directory, recipe, endpoints, hf_models, servers[0]))
    try:
        yield run, servers
    finally:
        for process in run.processes:
            process.kill()
            process.wait()
        print(run.log()[-6000:])  # shown if the test failed
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
