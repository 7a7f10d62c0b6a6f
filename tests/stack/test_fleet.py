"""A server that joins a run under way and leaves it: the real controller and servers, and a learner played by the test."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.core.base.messages import Stop
from megarl.core.base.process import die_with_parent
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import PublishedVersion
from megarl.run.join import LEAVE_LIMIT_S
from tests.stack.conftest import ROOT, Stack
from tests.stack.test_controller import LIMIT_S, Run, assert_law, controller_recipe, run_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@contextmanager
def joined(run: Run, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`megarl serve --join` of this run; killed at the end, if it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "megarl", "serve", "--join", str(run.rundir.path), *words],
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


def wait_for(run: Run, said: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not re.search(said, run.log()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"the controller did not say {said!r}"
        time.sleep(0.05)


@pytest.fixture
def run(stack: Stack, tmp_path: Path) -> Iterator[Run]:
    recipe = controller_recipe(stack.directory, tmp_path, [600, 900], {"prompts": 4, "samples": 2})
    with run_of(recipe, stack) as made:
        yield made


def test_a_server_joins_is_used_and_leaves_and_nothing_is_lost_or_doubled(run: Run) -> None:
    controller, learner = run.start(), run.learner()
    learner.go(until=1)
    with joined(run) as server:
        wait_for(run, "server 1 at .* is up", server)
        learner.go(until=3)
        wait_for(run, "publish version [0-9] to servers .*1", server)
        family = psutil.Process(server.pid).children(recursive=True)
        asked = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(LEAVE_LIMIT_S) == 0, server.communicate()[0]
        assert time.monotonic() - asked < LEAVE_LIMIT_S
        wait_for(run, "server 1 is forgotten", server) if server.poll() is None else None
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert "server 1 is forgotten" in run.log()
    reply = learner.go()
    assert isinstance(reply, Stop)
    assert not reply.error, reply.reason
    assert controller.wait(30) == 0
    groups = assert_law(run, learner)
    assert {r.retries for g in groups for r in g.rollouts} == {0}, "a goodbye is no failure"
    records = JournalReader(run.rundir.rollouts).replay()
    published = [len(r.servers) for r in records if isinstance(r, PublishedVersion)]
    assert 2 in published or published.count(1) > 3
