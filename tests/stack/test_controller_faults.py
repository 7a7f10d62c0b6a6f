"""Two servers: one is killed while it is held for an evaluation, and comes back with
old weights. And a prompt that no server accepts.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.messages import Stop
from megarl.core.base.rundir import read_jsonl
from megarl.core.journal.journal import JournalReader
from tests.stack.conftest import POSITIONS, Network, Running, Stack, serve, start_servers
from tests.stack.test_controller import (
    STEPS,
    B,
    K,
    Learner,
    Run,
    assert_law,
    controller_recipe,
    run_of,
    wait_for,
)

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.timeout(900)]

WATCHED_S = 8.0
LIMIT_S = 400.0


@pytest.fixture
def pair(
    models: tuple[Path, dict[str, Any]], tmp_path: Path
) -> Iterator[tuple[Run, list[Running]]]:
    directory, hf_models = models
    recipe = controller_recipe(directory, tmp_path, [200, 400], {"prompts": 12, "samples": 16})
    recipe = recipe.model_copy(
        update={"resources": recipe.resources.model_copy(update={"servers": 2})}
    )
    endpoints, servers = start_servers(recipe, [Network(), Network()])
    try:
        with run_of(recipe, Stack(directory, recipe, endpoints, hf_models, servers[0])) as made:
            yield made, servers
    finally:
        for server in servers:
            server.stop()


def restart(run: Run, server: Running) -> None:
    """The same server on the same port, as the supervisor would."""
    server.process = serve(run.rundir, server.address, server.log)


@pytest.mark.slow
def test_a_server_is_killed_while_it_is_held_and_comes_back(
    pair: tuple[Run, list[Running]],
) -> None:
    run, servers = pair
    process = run.start()
    learner = Learner(run, 0)
    learner.link.limit_s = LIMIT_S
    wait_for(lambda: "server 0 at" in run.log() and "server 1 at" in run.log(), LIMIT_S)
    learner.go(until=1)
    held = run.log().split("version 0 is evaluated on server ")[1][0]
    victim = servers[int(held)]
    os.killpg(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    learner.go(until=3)
    restart(run, victim)
    wait_for(lambda: f"server {held} at" in run.log().split(f"server {held} is lost")[-1], LIMIT_S)
    assert isinstance(learner.go(), Stop)
    assert process.wait(60) == 0
    groups = assert_law(run, learner)
    rows = list(read_jsonl(run.rundir.eval))
    assert rows[0]["step"] in (
        0,
        1,
    ), "the lost evaluation was done again at the next version published"
    resent = any(r.retries for g in groups for r in g.rollouts)
    assert resent or rows[0]["step"] == 1, "the dead server had nothing to do"
    assert rows[-1]["step"] == STEPS


def test_a_server_that_comes_back_with_old_weights_is_sent_nothing_before_it_has_the_present_ones(
    pair: tuple[Run, list[Running]],
    record_property: Any,
) -> None:
    """The learner is held back, so the server stays as it came: healthy, and with the
    weights that the run began with.
    """
    run, servers = pair
    process = run.start()
    learner = Learner(run, 0)
    learner.link.limit_s = LIMIT_S
    wait_for(lambda: "server 0 at" in run.log() and "server 1 at" in run.log(), LIMIT_S)
    learner.go(until=2)
    victim = next(s for s in servers if not status(run)[s.address.id]["pinned"])
    number = victim.address.id
    os.killpg(victim.process.pid, signal.SIGKILL)
    victim.process.wait()
    killed = time.monotonic()
    wait_for(lambda: status(run)[number]["state"] == "lost", LIMIT_S)
    record_property("until it was known to be lost, seconds", round(time.monotonic() - killed, 1))
    restart(run, victim)
    wait_for(lambda: status(run)[number]["state"] == "unknown", LIMIT_S)
    end = time.monotonic() + WATCHED_S
    while time.monotonic() < end:
        now = status(run)[number]
        assert (now["state"], now["running"], now["tokens_per_second"]) == ("unknown", 0, 0)
        time.sleep(0.2)
    assert isinstance(learner.go(), Stop)
    assert process.wait(60) == 0
    groups = [
        g for batch in run.batches() for g in JournalReader(run.rundir.rollouts).groups(batch)
    ]
    assert [g.ticket for g in groups] == list(range(STEPS * B))
    for group in groups:
        for segment in (s for r in group.rollouts for s in r.segments if s.trained):
            assert group.ticket // B - K <= segment.weight_version <= STEPS
    assert status(run)[number]["state"] == "clean"


def status(run: Run) -> dict[int, dict[str, Any]]:
    return {server["id"]: server for server in json.loads(run.rundir.status.read_text())["servers"]}


@pytest.fixture
def refused(stack: Stack, tmp_path: Path) -> Iterator[Run]:
    """The controller lets longer prompts through than the server takes. One of them is
    so long, though the model has room.
    """
    recipe = controller_recipe(stack.directory, tmp_path, [40, 160], {"prompts": 4, "samples": 2})
    length = recipe.length.model_copy(update={"prompt_tokens": 2 * POSITIONS})
    prompts = tmp_path / "train.jsonl"
    first, *rows = prompts.read_text().splitlines()
    long = json.loads(first) | {"prompt": chr(0x102) * (POSITIONS - 20)}
    prompts.write_text("\n".join([json.dumps(long), *rows[:9]]) + "\n")
    with run_of(recipe.model_copy(update={"length": length}), stack) as made:
        yield made


def test_a_prompt_that_every_server_refuses_costs_its_ticket(refused: Run) -> None:
    """The server answers 400. The ticket is void and says why, all others are trained,
    the server is not taken for lost.
    """
    process = refused.start()
    learner = refused.learner()
    reply = learner.go()
    assert isinstance(reply, Stop)
    assert not reply.error
    assert process.wait(60) == 0
    groups = [
        g
        for batch in refused.batches()
        for g in JournalReader(refused.rundir.rollouts).groups(batch)
    ]
    assert [g.ticket for g in groups] == list(range(STEPS * B))
    void = [g for g in groups if g.void]
    assert {g.prompt.id for g in void} == {"p0"}
    assert all("refused a request (400)" in g.void for g in void)
    assert "is lost" not in refused.log()
