"""Whole runs whose fleet changes: the run's own server goes for good, and a server
joins from another machine's network.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.core.base.rundir import latest_rows
from megarl.run.join import LEAVE_LIMIT_S
from tests.e2e import runs
from tests.e2e.runs import SMALL, LiveRun, check_history, publications, quiet
from tests.stack.conftest import Network
from tests.stack.test_network_faults import networks  # noqa: F401

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def joined(
    run: LiveRun, *words: str, enter: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`megarl serve --join` of this run, in the namespace that `enter` enters."""
    command = [
        *enter,
        sys.executable,
        "-m",
        "megarl",
        "serve",
        "--join",
        str(run.rundir.path),
        *words,
    ]
    with (run.cwd / "joined.out").open("ab") as file:
        process = subprocess.Popen(
            command, cwd=run.cwd, env=quiet(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def check_end(run: LiveRun) -> None:
    """Told to stop, it ends well, and each ticket was trained in one step."""
    run.rundir.stop()
    assert run.finish() == 0, run.tail()
    settings = run.recipe.run.model_copy(update={"steps": run.steps()})
    check_history(run.rundir, run.recipe.model_copy(update={"run": settings}))


def state(run: LiveRun, server: int) -> str:
    status = (
        json.loads(run.rundir.status.read_text()) if run.rundir.status.exists() else {"servers": []}
    )
    return next((str(s["state"]) for s in status["servers"] if s["id"] == server), "")


def test_a_run_whose_own_server_is_gone_goes_on_with_one_that_has_joined(workplace: Path) -> None:
    shutil.rmtree(workplace / "runs" / "orphan", ignore_errors=True)
    run = runs.start(workplace, "run.name=orphan", *SMALL, "run.steps=9999")
    try:
        run.wait_for(lambda: run.steps() >= 1, "a step")
        with joined(run) as server:
            run.wait_for(lambda: state(run, 1) == "clean", "the joined server")
            port = int(run.rundir.endpoints().servers[0].rpartition(":")[2])
            own = run.roles()["serve"]
            own.kill()
            own.wait(20)
            with socket.create_server(("127.0.0.1", port)):  # it cannot start again
                said = run.output.read_text
                run.wait_for(
                    lambda: "the run goes on with the other 1 servers" in said(), "its drop"
                )
                before = run.steps()
                run.wait_for(lambda: run.steps() >= before + 2, "steps without it")
                check_end(run)
            assert server.wait(30) == 0, "the run's end is its end"
        assert latest_rows(run.rundir.metrics)[-1]["servers_joined"] == 1
    finally:
        run.kill()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="only root can make network namespaces"
)
def test_a_server_joins_from_another_machine_and_leaves(
    workplace: Path,
    networks: list[Network],  # noqa: F811
) -> None:
    here, there = networks
    shutil.rmtree(workplace / "runs" / "two", ignore_errors=True)
    run = runs.start(
        workplace, "run.name=two", *SMALL, "run.steps=9999", f"run.interface={here.interface}"
    )
    try:
        run.wait_for(lambda: run.steps() >= 1, "a step")
        with joined(run, enter=there.enter) as lost:
            assert lost.wait(60) == 2, "its interface has another name there"
        with joined(run, "--interface", there.interface, enter=there.enter) as server:
            run.wait_for(lambda: state(run, 1) == "clean", "the joined server")
            before = run.steps()
            run.wait_for(lambda: run.steps() >= before + 3, "steps with it")
            server.send_signal(signal.SIGTERM)
            assert server.wait(LEAVE_LIMIT_S) == 0
            assert state(run, 1) == ""
        check_end(run)
        url = f"http://{there.address}:"
        assert any(
            server.startswith(url) for made in publications(run.rundir) for server in made.servers
        )
        assert "is not a network interface" in (workplace / "joined.out").read_text()
    finally:
        run.kill()


def test_who_cannot_join_a_run_that_has_ended(workplace: Path) -> None:
    ended = workplace / "runs" / "ended"
    ended.mkdir(parents=True, exist_ok=True)
    done = runs.megarl("serve", "--join", str(ended), cwd=workplace)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not a run directory" in done.stderr
