"""`megarl serve --join` where it cannot: one message, before a server starts. And the
limits of what it waits for.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megarl.cli import main
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import (
    Ack,
    FromServer,
    Join,
    Joined,
    Leave,
    Refused,
    Reply,
    Stop,
    Wait,
)
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir
from megarl.core.client import membership
from megarl.core.client.client import ServerLost
from megarl.core.controller import servers as controller_servers
from megarl.core.controller.conversation import Link
from megarl.core.controller.servers import Servers
from megarl.core.journal.file import FILE_HEADER, MAGIC
from megarl.core.recipe import Recipe, dump
from megarl.run import join
from megarl.run.launcher import LocalLauncher, LocalProcess, RoleCommand
from megarl.run.nodes import this_node
from megarl.run.placement import Place
from megarl.run.process import StopRequest, free_ports
from megarl.run.restart import Role

LIMIT_S = 60.0
SILENT = "192.0.2.1"
"""In TEST-NET-1 (RFC 5737), which no network has."""


@pytest.fixture
def run(
    recipe: Recipe, write_run: Callable[[int], RunDir], monkeypatch: pytest.MonkeyPatch
) -> RunDir:
    """A run that seems to live; nobody listens where its controller should."""
    monkeypatch.setattr(join, "JOIN_LIMIT_S", 2.0)
    rundir = write_run(20)
    live(rundir, f"tcp://127.0.0.1:{free_ports(1)[0]}")
    Path(recipe.model.path).mkdir(parents=True, exist_ok=True)
    return rundir


def live(rundir: RunDir, controller: str, session: str = "s") -> Endpoints:
    endpoints = Endpoints(
        session=session,
        controller=controller,
        servers=("http://127.0.0.1:1",),
        api_key="a",
        admin_key="b",
        link=LinkKeys.new(),
        rendezvous_port=1,
    )
    rundir.write_endpoints(endpoints)
    return endpoints


def refused(capsys: pytest.CaptureFixture[str], rundir: Path, *words: str) -> str:
    assert main(["serve", "--join", str(rundir), *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not (rundir / "logs" / "server").exists(), "no server was started"
    return said


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a run directory" in refused(capsys, tmp_path)


def test_not_started(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.endpoints_file.unlink()
    assert "the run is not live" in refused(capsys, run.path)


def test_ended(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.summary.write_text("{}")
    assert "this run has ended" in refused(capsys, run.path)


def test_another_schema(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.rollouts / "000000.journal").write_bytes(FILE_HEADER.pack(MAGIC, 99))
    assert "written in schema version 99" in refused(capsys, run.path)
    run.endpoints_file.write_text('{"session": 3}')
    (run.rollouts / "000000.journal").unlink()
    assert "this version of megarl cannot read it" in refused(capsys, run.path)


def test_servers_that_share_the_learners_gpus(
    run: RunDir, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = recipe.weights.model_copy(update={"transport": "cuda_ipc"})
    together = recipe.resources.model_copy(update={"colocate": True})
    serving = recipe.serving.model_copy(update={"memory_fraction": 0.4})
    sections = {"weights": weights, "resources": together, "serving": serving}
    run.recipe.write_text(dump(recipe.model_copy(update=sections)))
    assert "no server can join a run with resources.colocate=true" in refused(capsys, run.path)


def test_nobody_listens(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, run.path)
    assert "nobody listens at tcp://127.0.0.1:" in said
    assert "has no run.interface" in said


def test_unreachable(
    run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_comes(*_: object) -> None:
        raise TimeoutError("timed out")

    live(run, f"tcp://{SILENT}:4000")
    monkeypatch.setattr(socket, "create_connection", nothing_comes)
    assert f"does not reach the run's controller at tcp://{SILENT}:4000, named in" in refused(
        capsys, run.path
    )


def test_silent_or_other_keys(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        live(run, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        assert "does not answer: the keys in that file" in refused(capsys, run.path)


def test_an_interface_for_a_run_on_loopback(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--interface: the run listens only on loopback" in refused(
        capsys, run.path, "--interface", "eth0"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("quickstart", "--join", "runs/x"),
            "--join takes the run's recipe and serves its policy; leave out quickstart",
        ),
        (("quickstart",), "give --join RUN"),
        (("quickstart", "--index", "0", "--port", "9", "--interface", "lo"), "give --join RUN"),
        (
            ("quickstart", "--index", "1", "--port", "9"),
            "--index: 1, and the recipe's servers are numbered from 0 to 0",
        ),
    ],
)
def test_the_command_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err


# The server's side, with a stand-in for the server.


class Answering(threading.Thread):
    """A controller that gives the number 5, and lets a server go when it asks for the
    second time. said: what it heard.
    """

    def __init__(self, endpoints: Endpoints, to_join: Reply) -> None:
        super().__init__(daemon=True)
        self._endpoints = endpoints
        self._to_join = to_join
        self.said: list[FromServer] = []
        self.heard_all = threading.Event()  # the second word
        self.start()

    def run(self) -> None:
        asyncio.run(self._answer())

    async def _answer(self) -> None:
        link = Link(self._endpoints.controller, self._endpoints.link)
        while True:
            peer, said = await link.receive()
            assert isinstance(said, FromServer)
            self.said.append(said)
            to_join = self._to_join
            leaving: Reply = Ack() if self.lets_go() else Wait(reason="")
            await link.reply(peer, leaving if isinstance(said, Leave) else to_join)
            if len(self.said) == 2:
                self.heard_all.set()

    def lets_go(self) -> bool:
        return [type(s) for s in self.said[-2:]] == [Leave, Leave]


def stays(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    then: Callable[[StopRequest], object],
    to_join: Reply,
) -> list[FromServer]:
    """A guest whose server is this Python code stays until `then` has happened, after
    some words and a moment; what the controller heard.
    """
    for limit, seconds in (("BEAT_S", 0.2), ("TICK_S", 0.05), ("JOIN_LIMIT_S", 60.0)):
        monkeypatch.setattr(join, limit, seconds)
    monkeypatch.setattr(
        LocalLauncher, "sweep", lambda *_: None
    )  # the other children are the tests'
    endpoints = run.endpoints()
    asked = StopRequest()
    controller = Answering(endpoints, to_join)
    role = RoleCommand(Role("server"), ("-c", code), {}, Place((this_node(1, ""),)), run)
    guest = join.Guest(endpoints, role, "http://127.0.0.1:9", asked)
    over = threading.Event()

    def later() -> None:
        time.sleep(2.5)
        while len(controller.said) < 3 and not over.wait(0.05):
            pass
        if not over.is_set():
            then(asked)

    timer = threading.Thread(target=later, daemon=True)
    timer.start()
    try:
        guest.stay()
    finally:
        over.set()
        guest.link.close()
        assert guest._process is None or guest._process.status() is not None, (
            "no server outlives its guest"
        )
    return controller.said


def told(asked: StopRequest) -> None:
    asked.heard(signal.SIGTERM, None)


SERVE = "import time; time.sleep(100)"


def test_it_says_that_it_is_there_and_goodbye(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    said = stays(run, monkeypatch, SERVE, told, Joined(server=5))
    joins = [s for s in said if isinstance(s, Join)]
    assert len(joins) > 2
    assert [s.server for s in joins] == [-1, *[5] * (len(joins) - 1)]
    assert len({s.life for s in said}) == 1
    assert [type(s) for s in said[-2:]] == [Leave, Leave], "until it may go"


def test_slurms_sigterm_to_all_processes_does_not_end_the_server_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)"
    assert isinstance(stays(run, monkeypatch, code, told, Joined(server=5))[-1], Leave)


def test_it_leaves_within_its_limit_without_an_answer(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "LEAVE_LIMIT_S", 1.0)
    monkeypatch.setattr(Answering, "lets_go", lambda _: False)
    began = time.monotonic()
    stays(run, monkeypatch, SERVE, told, Joined(server=5))
    assert time.monotonic() - began >= 3.5


def test_the_runs_end_is_its_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = stays(run, monkeypatch, SERVE, lambda _: run.summary.write_text("{}"), Joined(server=5))
    assert not any(isinstance(s, Leave) for s in ended)
    run.summary.unlink()
    live(run, f"tcp://127.0.0.1:{free_ports(1)[0]}")
    stays(run, monkeypatch, SERVE, told, Stop(reason="all steps are done"))


def test_a_server_that_ends_by_itself(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        MegarlError, match=r"server 5 ended with status 3: ValueError: no memory \("
    ):
        stays(
            run,
            monkeypatch,
            "print('ValueError: no memory'); raise SystemExit(3)",
            told,
            Joined(server=5),
        )


def test_refused(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegarlError, match="the run goes on without this server"):
        stays(run, monkeypatch, SERVE, told, Refused(error="the run goes on without this server"))


class OneAnswer(Answering):
    """Takes a server in, and tells it at its next word that the run ends."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(endpoints, Joined(server=5))

    def lets_go(self) -> bool:
        self._to_join = Stop(reason="signal SIGUSR1")
        return False


def test_it_follows_a_run_that_made_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which goes on elsewhere, with other keys, and is then stopped by hand."""
    for limit, seconds in (("BEAT_S", 0.2), ("TICK_S", 0.05), ("JOIN_LIMIT_S", 60.0)):
        monkeypatch.setattr(join, limit, seconds)
    start = LocalLauncher.start
    started = list[tuple[str, ...]]()

    def stand_in(self: LocalLauncher, task: RoleCommand, n: int = 0) -> LocalProcess:
        started.append(task.arguments)
        return start(self, replace(task, arguments=("-c", SERVE)), n)

    def goes_on() -> None:
        run.summary.write_text('{"outcome": "stopped"}')
        run.stop(signal.SIGUSR1)
        time.sleep(1.0)
        for file in (run.stop_file, run.status, run.summary):
            file.unlink()
        lives.append(OneAnswer(live(run, f"tcp://127.0.0.1:{free_ports(1)[0]}", "another")))
        time.sleep(0.5)
        assert len(started) == 1, "its controller has written nothing"
        run.status.write_text("{}")
        lives[1].heard_all.wait(LIMIT_S)
        run.stop(signal.SIGINT)
        run.summary.write_text('{"outcome": "stopped"}')

    monkeypatch.setattr(LocalLauncher, "start", stand_in)
    monkeypatch.setattr(
        LocalLauncher, "sweep", lambda *_: None
    )  # the other children are the tests'
    lives = [OneAnswer(run.endpoints())]
    queue = threading.Thread(target=lambda: (lives[0].heard_all.wait(LIMIT_S), goes_on()))
    queue.start()
    assert main(["serve", "--join", str(run.path)]) == 0
    queue.join()
    assert [[s.server for s in each.said if isinstance(s, Join)] for each in lives] == [
        [-1, 5],
        [-1, 5],
    ]
    assert len({s.life for each in lives for s in each.said}) == len(started) == 2
    assert capfd.readouterr().out.count("leaving: the run is ending: signal SIGUSR1") == 2


@pytest.mark.parametrize(
    ("outcome", "number"),
    [("finished", None), ("failed", signal.SIGTERM), ("stopped", 0), ("stopped", signal.SIGINT)],
)
def test_it_follows_no_run_that_has_ended_for_good(
    run: RunDir, outcome: str, number: int | None
) -> None:
    if number is not None:
        run.stop(number)
    run.summary.write_text(f'{{"outcome": "{outcome}"}}')
    assert not join.resumed(run, "s", StopRequest())


def test_it_waits_for_no_run_longer_than_it_may(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, seconds in (("BEAT_S", 0.1), ("FOLLOW_LIMIT_S", 1.0)):
        monkeypatch.setattr(join, limit, seconds)
    asked = StopRequest()
    began = time.monotonic()
    assert not join.resumed(run, "s", asked)
    assert time.monotonic() - began >= 1.0
    told(asked)
    assert not join.resumed(run, "of an earlier one", asked)


# The controller's side.


@contextmanager
def hung() -> Iterator[str]:
    """A server that takes connections and never answers, like one whose machine has
    gone without a word.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_requests_on_a_machine_that_is_gone_go_on_elsewhere(
    recipe: Recipe, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "FORGET_S", 0.3)
    for limit, seconds in (("POLL_S", 0.05), ("DRAIN_S", 0.2)):
        monkeypatch.setattr(controller_servers, limit, seconds)

    async def go() -> None:
        servers = Servers(recipe, run.endpoints(), lambda: None)
        task = asyncio.create_task(servers.run())
        await asyncio.sleep(0)
        with hung() as url:
            said = Join(life="x", url=url)
            joined = servers.answer(said)
            assert isinstance(joined, Joined)
            here = joined.server
            assert here == 1
            held = servers.membership
            held.answered(here)
            held.publish([here], 3, "learner")
            held.published(here, 3, "learner", "")
            servers.places.refresh()
            server, version = await servers.places.take((1, 0, 0), lambda s, v: True)
            assert (server, version) == (here, 3)
            request = asyncio.create_task(servers.clients[here].generate([1, 2], 8))
            await asyncio.sleep(0.05)
            began = time.monotonic()
            servers.server_lost(here, servers.life(here), "test")
            with pytest.raises(ServerLost):
                await request
            assert time.monotonic() - began > 0.2
            assert here in held.members, "as long as a place is taken"
            servers.places.give_back(here)
            while here in servers.clients:
                await asyncio.sleep(0.02)
            assert list(held.members) == list(servers.places.use) == [0]
            assert isinstance(servers.answer(Leave(life="x")), Ack)
            assert isinstance(servers.answer(Join(life="x", url=url, server=1)), Joined), (
                "it may come back"
            )
        task.cancel()
        await servers.close()

    asyncio.run(asyncio.wait_for(go(), LIMIT_S))


def test_a_server_that_is_sent_away_is_told_why(recipe: Recipe, run: RunDir) -> None:
    async def go() -> None:
        servers = Servers(recipe, run.endpoints(), lambda: None)
        task = asyncio.create_task(servers.run())
        await asyncio.sleep(0)
        said = Join(life="x", url=f"http://127.0.0.1:{free_ports(1)[0]}")
        assert isinstance(servers.answer(said), Joined)
        servers.dismiss(1, "it is too slow")
        assert isinstance(reply := servers.answer(said), Refused)
        assert reply.error == "the run goes on without this server: it is too slow"
        assert isinstance(servers.answer(Join(life="y", url=said.url)), Wait), (
            "its address is not free yet"
        )
        while 1 in servers.clients:
            await asyncio.sleep(0.02)
        assert isinstance(servers.answer(Join(life="y", url=said.url)), Joined)
        own = Join(life="z", url="http://127.0.0.1:1")
        assert isinstance(servers.answer(own), Wait)
        assert isinstance(servers.answer(Leave(life="never seen")), Ack)
        task.cancel()
        await servers.close()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    "url", ["http://u@h:1", "https://h:1", "http://h", "http://h:1/x", "http://h:123456"]
)
def test_addresses_that_are_none(url: str) -> None:
    encoded = msgspec.msgpack.encode({"type": "join", "life": "x", "url": url})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Join)
    good = msgspec.msgpack.encode({"type": "join", "life": "x", "url": "http://10.0.0.5:30000"})
    assert msgspec.msgpack.decode(good, type=Join).server == -1
