"""Servers that die or stand still: nothing waits for ever, nothing that arrived is
lost, the other server goes on.
"""

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.core.base.messages import Publish, Published
from megarl.core.base.rundir import Endpoints, RunDir
from megarl.core.client.client import ServerClient, ServerLost
from megarl.core.sync import process_group
from megarl.core.sync import sent_deltas as deltas
from megarl.core.sync.broadcast import BroadcastGroup
from megarl.core.sync.publisher import Publisher
from megarl.tools.eval.servers import wait_ready
from tests.pessimistic_nccl import ERROR_AFTER, PessimisticNccl
from tests.pessimistic_nccl import NAME as PESSIMISTIC_NCCL
from tests.stack.conftest import (
    POSITIONS,
    START_LIMIT_S,
    Network,
    Running,
    client_of,
    serve,
    stack_recipe,
    start_servers,
    two_models,
    under_way,
)
from tests.stack.publish_world import nudge
from tests.tiny import tiny_llama
from tests.tiny_scores import difference, scores

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.anyio]

PROMPT = np.arange(5, 25, dtype=np.int32)
LIMIT_S = 8.0
BUCKET_MB = 1
IN_THE_MIDDLE = 2
"""What is sent as a victim is hit: both servers have something, and more follows."""


class Pair:
    """Two servers, and a publisher to both."""

    def __init__(
        self,
        directory: Path,
        models: dict[str, Any],
        learner: Any,
        networks: Sequence[Network] = (Network(), Network()),
    ) -> None:
        self.models = models
        self._learner = learner
        weights = {"timeout_s": LIMIT_S, "bucket_mb": BUCKET_MB}
        self.recipe = stack_recipe(
            directory, run={"name": "pair", "dir": str(directory)}, weights=weights
        )
        self.endpoints: Endpoints
        self.servers: list[Running]
        self.endpoints, self.servers = start_servers(self.recipe, networks)
        chunks, family = learner("a")
        self.publisher = Publisher(self.recipe, self.endpoints, chunks, family)

    def publish(self, name: str, version: int) -> Published:
        self._learner(name)
        command = Publish(version=version, servers=tuple(s.address for s in self.servers))
        published = self.publisher.publish(command, "test")
        assert published is not None
        return published

    def difference(self, name: str) -> float:
        """Difference of the first server's log-probs from those of the model of that
        name.
        """
        return difference(self.servers[0].address.url, self.endpoints, self.models[name])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Models of 2.4 MB, so that a publication has three buckets."""
    directory = tmp_path_factory.mktemp("buckets")
    sizes = {"max_position_embeddings": POSITIONS, "eos_token_id": None, "intermediate_size": 640}
    return directory, two_models(directory, tiny_llama, **sizes)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of this backend in place of gloo's."""
    monkeypatch.setattr(process_group, "backend", lambda: request.param)


over_each_backend = pytest.mark.parametrize("backend", ["gloo", PESSIMISTIC_NCCL], indirect=True)


@pytest.fixture
def pair(models: tuple[Path, dict[str, Any]], learner: Any) -> Iterator[Pair]:
    pair = Pair(*models, learner)
    yield pair
    for server in pair.servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGCONT)
        server.stop()


def family_tree(server: Running) -> list[psutil.Process]:
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def before(
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    victim: int,
    action: Callable[[], Any],
    number: int = 1,
) -> None:
    """Do it just before the victim is called so for the `number`th time; what it was
    called for before, it has answered. The calls of a fleet await nothing but their
    server, so all wait while it is done.
    """
    real = vars(ServerClient)[call]
    calls = itertools.count(1)

    async def act_then_call(self: ServerClient, *args: Any) -> Any:
        if self.address.id == victim and next(calls) == number:
            action()
        return await real(self, *args)

    monkeypatch.setattr(ServerClient, call, act_then_call)


def before_bucket(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Do it once, as the learner is about to send a bucket in the middle."""
    real = BroadcastGroup.send
    calls = itertools.count(1)

    def act_then_send(self: BroadcastGroup, *what: Any) -> Any:
        if next(calls) == IN_THE_MIDDLE:
            action()
        return real(self, *what)

    monkeypatch.setattr(BroadcastGroup, "send", act_then_send)


def freeze(server: Running) -> list[psutil.Process]:
    tree = family_tree(server)
    for process in tree:
        process.suspend()
    return tree


async def test_killed_while_generating(pair: Pair) -> None:
    """What had arrived goes on elsewhere; no process and no port is left."""
    assert [r.error for r in pair.publish("a", 1).results] == ["", ""]
    tree = family_tree(pair.servers[0])
    async with (
        client_of(pair.servers[0], pair.endpoints) as first,
        client_of(pair.servers[1], pair.endpoints) as second,
    ):
        task = await under_way(first, PROMPT, 1400)
        tree[0].kill()
        with pytest.raises(ServerLost) as caught:
            await task
        lost = caught.value
        assert 0 < len(lost.tokens) < 1400
        prefix = np.concatenate([PROMPT, lost.tokens])
        rest = await second.generate(prefix, 50)
    (reference,) = scores(pair.models["a"], [np.concatenate([prefix, rest.tokens])])
    logprobs = np.concatenate([lost.logprobs, rest.logprobs])
    np.testing.assert_allclose(logprobs, reference[len(PROMPT) - 1 :], atol=2e-5)
    _, alive = psutil.wait_procs(tree[1:], timeout=60)
    pair.servers[0].process.wait()
    assert alive == []
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", int(pair.servers[0].address.url.rpartition(":")[2])))


@over_each_backend
@pytest.mark.usefixtures("backend")
def test_killed_while_published_to(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has the new weights, runs, and takes the next version too."""
    assert pair.publish("a", 1).bytes_sent > 2 * BUCKET_MB << 20
    before_bucket(monkeypatch, pair.servers[1].process.kill)
    start = time.monotonic()
    good, bad = pair.publish("b", 2).results
    assert time.monotonic() - start < 4 * LIMIT_S
    assert good.error == ""
    assert pair.difference("b") < 1e-4
    assert "version 2 to server 1" in bad.error
    good, bad = pair.publish("a", 3).results
    assert good.error == ""
    assert "begin" in bad.error


@over_each_backend
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("call", ["join_group", "leave_group"])
def test_killed_while_the_group_changes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is not there to make the communicator, or to take it down."""
    if call == "leave_group":
        assert [r.error for r in pair.publish("a", 1).results] == ["", ""]
        monkeypatch.setattr(
            pair.publisher._transport, "_versions", {}
        )  # so that the group is formed anew
    before(monkeypatch, call, 1, pair.servers[1].process.kill)
    start = time.monotonic()
    good, bad = pair.publish("b", 2).results
    assert time.monotonic() - start < 4 * LIMIT_S
    assert good.error == ""
    assert pair.difference("b") < 1e-4
    assert "version 2 to server 1" in bad.error


@pytest.fixture
def late_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks is reported after a second, by the stand-in for NCCL in
    servers and learner.
    """
    monkeypatch.setenv(ERROR_AFTER, "1")


@pytest.mark.parametrize("backend", [PESSIMISTIC_NCCL], indirect=True)
@pytest.mark.usefixtures("backend", "late_errors")
def test_a_connection_breaks_while_published(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has died: once it is reported, and before any limit, both are sent
    everything again over a new group.
    """
    assert pair.publish("a", 1).bytes_sent > 2 * BUCKET_MB << 20
    before_bucket(monkeypatch, PessimisticNccl.made[-1].cut)
    published = pair.publish("b", 2)
    assert [r.error for r in published.results] == ["", ""]
    assert pair.difference("b") < 1e-4
    (again,) = [text for text in caplog.messages if "sending version 2 again" in text]
    assert "Failed to receive weights" in again
    assert "weights.timeout_s" not in again


@pytest.mark.slow
@over_each_backend
@pytest.mark.usefixtures("backend")
def test_standing_still_while_published_to(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.publish("a", 1).bytes_sent > 2 * BUCKET_MB << 20
    tree: list[psutil.Process] = []
    before_bucket(monkeypatch, lambda: tree.extend(freeze(pair.servers[1])))
    start = time.monotonic()
    good, bad = pair.publish("b", 2).results
    assert time.monotonic() - start < 8 * LIMIT_S
    assert good.error == ""
    assert pair.difference("b") < 1e-4
    assert "version 2 to server 1" in bad.error
    monkeypatch.undo()
    for process in tree:
        process.resume()
    assert [r.error for r in pair.publish("a", 3).results] == ["", ""]


async def test_standing_still_and_killed_in_a_pause(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    """The other server has the new weights and runs; the one that stood still takes the
    next version; a dead one is named.
    """
    assert [r.error for r in pair.publish("a", 1).results] == ["", ""]
    frozen: list[psutil.Process] = []
    with monkeypatch.context() as patch:
        before(patch, "pause", 1, lambda: frozen.extend(freeze(pair.servers[1])))
        began = time.monotonic()
        good, bad = (await asyncio.to_thread(pair.publish, "b", 2)).results
        seconds = time.monotonic() - began
    assert seconds < 6 * LIMIT_S
    record_property("stopped in the pause: publication took, seconds", round(seconds, 1))
    assert good.error == ""
    assert await asyncio.to_thread(pair.difference, "b") < 1e-4
    assert "publishing version 2 to server 1" in bad.error
    assert "pause: no answer within 8 s" in bad.error
    for process in frozen:
        process.resume()
    assert [r.error for r in (await asyncio.to_thread(pair.publish, "a", 3)).results] == ["", ""]

    with monkeypatch.context() as patch:
        before(patch, "pause", 1, pair.servers[1].stop)
        began = time.monotonic()
        good, bad = (await asyncio.to_thread(pair.publish, "b", 4)).results
    record_property(
        "killed in the pause: publication took, seconds", round(time.monotonic() - began, 1)
    )
    assert good.error == ""
    assert "version 4 to server 1" in bad.error
    async with client_of(pair.servers[0], pair.endpoints) as client:
        assert (await client.generate(PROMPT, 5)).spans[0].version == 4


async def test_standing_still_while_generating(pair: Pair, record_property: Any) -> None:
    """What had arrived goes on elsewhere, after the limit of a silent request."""
    assert [r.error for r in pair.publish("a", 1).results] == ["", ""]
    first = client_of(pair.servers[0], pair.endpoints, LIMIT_S)
    second = client_of(pair.servers[1], pair.endpoints)
    async with first, second:
        task = await under_way(first, PROMPT, 1400)
        freeze(pair.servers[0])
        began = time.monotonic()
        with pytest.raises(ServerLost) as caught:
            await task
        record_property(
            "until the request was given up, seconds", round(time.monotonic() - began, 1)
        )
        lost = caught.value
        assert 0 < len(lost.tokens) < 1400
        prefix = np.concatenate([PROMPT, lost.tokens])
        rest = await second.generate(prefix, 50)
    (reference,) = scores(pair.models["a"], [np.concatenate([prefix, rest.tokens])])
    logprobs = np.concatenate([lost.logprobs, rest.logprobs])
    np.testing.assert_allclose(logprobs, reference[len(PROMPT) - 1 :], atol=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_between_two_deltas_and_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two servers dies in a delta: the other, which may have a part of it, gets
    everything at once. It comes back with the weights of its directory: both get
    everything. Then deltas again.
    """
    pair.publisher._last = pair.publisher._transport._last = deltas.LastSent(100)  # type: ignore[attr-defined]
    chunks = pair.publisher._transport._weights.chunks  # type: ignore[attr-defined]
    addresses = tuple(server.address for server in pair.servers)
    victim = pair.servers[0]

    def publish(version: int) -> tuple[int, list[str], set[str]]:
        nudge(chunks, version)
        published = pair.publisher.publish(Publish(version, addresses), "test")
        assert published is not None
        found = published.results
        return (
            published.bytes_sent,
            [r.error for r in found],
            {r.checksum for r in found if not r.error},
        )

    whole, errors, _ = publish(1)
    size, errors, sums = publish(2)
    assert (size < 0.02 * whole, errors, len(sums)) == (True, ["", ""], 1)

    before(monkeypatch, "receive", 0, victim.stop)
    size, errors, sums = publish(3)
    assert errors[0]
    assert (errors[1], size, len(sums)) == ("", whole, 1)
    monkeypatch.undo()

    victim.process = serve(RunDir(pair.recipe.run.path), victim.address, victim.log)
    wait_ready(victim.address.url, START_LIMIT_S, victim.process.poll)
    size, errors, sums = publish(4)
    assert (size, errors, len(sums)) == (whole, ["", ""], 1)
    size, errors, sums = publish(5)
    assert (size < 0.02 * whole, errors, len(sums)) == (True, ["", ""], 1)
