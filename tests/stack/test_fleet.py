"""A server that joins a run under way and leaves it: the real controller and servers,
and a learner played by the test.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from megarl.core.base.messages import Next, Publish, Score, Stop, Wait
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import LinkKeys, read_jsonl
from megarl.core.client.membership import FORGET_S
from megarl.core.journal.journal import JournalReader
from megarl.run.join import LEAVE_LIMIT_S
from tests.stack.conftest import ROOT, Stack
from tests.stack.test_controller import (
    LIMIT_S,
    STEPS,
    Learner,
    Run,
    assert_law,
    controller_recipe,
    run_of,
)

pytestmark = [pytest.mark.stack]


@contextmanager
def joined(run: Run, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`megarl serve --join` of this run; killed at the end, if it has not ended."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "megarl",
            "serve",
            "--join",
            str(run.rundir.path),
            *words,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(run: Run, said: str, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not re.search(said, run.log()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"the controller did not say {said!r}"
        time.sleep(0.05)


def wait_until_sampling(run: Run, server: subprocess.Popen[Any]) -> None:
    """Wait until the joined server has sampled 40 tokens of its requests, of 300 or
    more. Its engine says so.
    """
    (log,) = (run.rundir.logs / "server").glob("*.log")
    end = time.monotonic() + LIMIT_S
    while "Decode batch" not in log.read_text():
        assert server.poll() is None
        assert time.monotonic() < end, (
            f"the joined server has not sampled 40 tokens within {LIMIT_S:g} s"
        )
        time.sleep(0.02)


@pytest.fixture
def run(stack: Stack, tmp_path: Path) -> Iterator[Run]:
    recipe = controller_recipe(stack.directory, tmp_path, [300, 500], {"prompts": 4, "samples": 2})
    with run_of(recipe, stack) as made:
        yield made


def requests(run: Run, server: int) -> dict[str, list[dict[str, Any]]]:
    """Requests that the server has ended, by rollout (`ticket 13.2`)."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(run.rundir.trace / "controller.jsonl"):
        if row["type"] == "span" and row["on"] == f"server {server}/requests":
            found.setdefault(row["name"], []).append(row)
    return found


def publish(learner: Learner) -> None:
    """The version that the learner has, which lets a batch more be drawn: from now on
    it is sampled by all servers.
    """
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        match learner.ask(
            Next(incarnation=learner.incarnation, step=learner.step, version=learner.step)
        ):
            case Publish() as command:
                return learner.publish(command)
            case Score() as command:
                learner.score(command)
            case reply:
                assert isinstance(reply, Wait), reply
    raise AssertionError("nothing was to be published")


def check(run: Run, learner: Learner, controller: subprocess.Popen[bytes]) -> None:
    """The run ends well, each ticket was trained once within the lag, and what ran on
    server 1 went on elsewhere.
    """
    reply = learner.go()
    assert isinstance(reply, Stop)
    assert not reply.error, reply.reason
    assert controller.wait(LIMIT_S) == 0
    assert_law(run, learner)
    there = requests(run, 1)
    here = requests(run, 0)
    moved = [
        name
        for name in there
        if any(r["begin"] >= there[name][-1]["end"] for r in here.get(name, []))
    ]
    assert moved


def test_a_server_joins_is_used_and_leaves_and_nothing_is_lost_or_doubled(run: Run) -> None:
    controller = run.start()
    learner = run.learner()
    learner.go(until=1)
    wait_for(run, "version 0: held-out", controller)  # until then server 0 is held
    with joined(run) as server:
        publish(learner)
        wait_for(run, "server 1 at .* is up", server)
        learner.go(until=2)
        assert "publish version 1 to server 1" in run.log(), (
            "the other server was not paused for it"
        )
        publish(learner)
        wait_until_sampling(run, server)
        family = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LEAVE_LIMIT_S) == 0, server.communicate()[0]
        assert "server 1 is forgotten" in run.log()
    assert psutil.wait_procs(family, timeout=60)[1] == []
    check(run, learner, controller)
    groups = [
        g
        for step in range(STEPS)
        for g in JournalReader(run.rundir.rollouts).groups(run.batches()[step])
    ]
    assert {r.retries for g in groups for r in g.rollouts} == {0}, "a goodbye is no failure"
    kept = [
        rows[-1]["args"]["tokens"]
        for name, rows in requests(run, 1).items()
        if name in requests(run, 0)
    ]
    assert any(kept), "what was sampled there is not sampled again"


@pytest.mark.slow
@pytest.mark.faults
def test_a_joined_server_that_is_killed_is_forgotten(run: Run) -> None:
    controller = run.start()
    learner = run.learner()
    learner.go(until=1)
    wait_for(run, "version 0: held-out", controller)  # until then server 0 is held
    with joined(run) as server:
        wait_for(run, "server 1 at .* is up", server)
        learner.go(until=2)
        publish(learner)
        family = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        server.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == [], "it takes all its processes with it"
    killed = time.monotonic()
    learner.go(until=4)
    while [s["id"] for s in json.loads(run.rundir.status.read_text())["servers"]] != [0]:
        assert time.monotonic() < killed + FORGET_S + 60
        time.sleep(0.2)
    assert "it does not answer and has sent no sign of life for 30 s" in run.log()
    check(run, learner, controller)


@pytest.mark.slow
def test_with_other_keys_it_is_told_so_before_a_server_starts(run: Run) -> None:
    run.start()
    run.learner().go(until=1)
    right = run.rundir.endpoints()
    run.rundir.write_endpoints(msgspec.structs.replace(right, link=LinkKeys.new()))
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megarl",
        "serve",
        "--join",
        str(run.rundir.path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "does not answer: the keys in that file are not its own" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (run.rundir.logs / "server").exists()
