"""The controller's answers to what the learner says of publications, and its end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import Join, Joined, Published, ServerResult
from megarl.core.base.rundir import META, RunDir, step_folder
from megarl.core.client.client import ServerClient
from megarl.core.controller import controller as module
from megarl.core.controller.controller import PUBLISH_TRIES, Controller
from megarl.core.controller.decision import TrainStep
from megarl.core.controller.servers import Servers
from megarl.core.journal.journal import Journal
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import from_tree
from megarl.run.process import free_ports
from tests.unit.core.controller.test_servers import servers_of


def controller_of(servers: Servers, failures: list[str]) -> Any:
    """A controller that takes notes of publications, and the reasons to end its run."""
    return controller_with(servers=servers, _fail=failures.append, _on_change=lambda: None)


def controller_with(**parts: Any) -> Any:
    """A controller with these parts only."""
    controller: Any = Controller.__new__(Controller)
    vars(controller).update(parts)
    return controller


def broken(server: int, version: int) -> Published:
    """A publication that did not reach its only server."""
    return Published(
        incarnation="a",
        version=version,
        results=(ServerResult(id=server, error="refused"),),
        pause_seconds=0.0,
        transfer_seconds=0.0,
        resume_seconds=0.0,
        bytes_sent=0,
        staged=True,
    )


@pytest.mark.parametrize(
    ("answering", "failed", "state"),
    [(True, True, "unknown"), (False, False, "lost")],
    ids=["answers", "killed"],
)
def test_the_only_server_misses_three_publications(
    answering: bool, failed: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail within a second if it was killed while no request was under way: then
    it is lost, and may come back.
    """

    async def health(_: ServerClient) -> bool:
        return answering

    monkeypatch.setattr(ServerClient, "health", health)

    async def scenario() -> None:
        servers = servers_of(1)
        failures = list[str]()
        told = controller_of(servers, failures)
        for _ in range(PUBLISH_TRIES):
            assert servers.membership.members[0].state in ("clean", "unknown")
            assert not failures
            servers.membership.publish([0], 1, "a")
            await told.published(broken(0, 1))
        assert servers.membership.members[0].state == state
        assert bool(failures) == failed
        if failed:
            assert failures == ["weights did not reach server 0 3 times in a row: refused"]
        else:
            servers.membership.answered(0)
            assert servers.membership.members[0].failures == 0, "it has as many tries as any"

    asyncio.run(scenario())


def test_a_joined_server_misses_three_publications_and_the_last_is_told_twice() -> None:
    """The learner repeats what has no answer within its limit."""

    async def scenario() -> None:
        servers = servers_of(1)
        failures = list[str]()
        told = controller_of(servers, failures)
        members = servers.membership
        running = asyncio.create_task(servers.run())
        await asyncio.sleep(0)
        joined = servers.answer(Join(life="x", url=f"http://127.0.0.1:{free_ports(1)[0]}"))
        assert isinstance(joined, Joined)
        members.answered(joined.server)
        for _ in range(PUBLISH_TRIES):
            members.publish([joined.server], 1, "a")
            await told.published(broken(joined.server, 1))
        assert members.leaves(joined.server)
        await told.published(broken(joined.server, 1))
        while joined.server in servers.clients:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not running.done()
        assert not failures
        running.cancel()
        await servers.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_status_that_cannot_be_written_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STATUS_S", 0.01)
    rundir = RunDir(tmp_path / "run")
    told = controller_with(
        rundir=rundir,
        stop_reason="",
        recipe=SimpleNamespace(start_limit_s=60.0),
        compute=SimpleNamespace(join=print),
        conversation=SimpleNamespace(incarnation=""),
        meter=SimpleNamespace(totals=dict),
        _status=lambda: {"step": 7},
        servers=SimpleNamespace(
            seconds_without=lambda: 0.0, membership=SimpleNamespace(joined_servers=dict)
        ),
        _address="",
        _status_is_written=True,
    )

    async def scenario() -> None:
        ticking = asyncio.create_task(told._watch())
        for said in (1, 2):
            while len(caplog.records) < said:
                await asyncio.sleep(0.01)
                assert not ticking.done()
            await asyncio.sleep(0.05)  # more failures, of which nothing is said
            rundir.path.mkdir()
            while not rundir.status.exists():
                await asyncio.sleep(0.01)
            rundir.path.rename(
                tmp_path / f"gone-{said}"
            )  # at once, though files in it are being written
        ticking.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    messages = [record.message for record in caplog.records]
    assert len(messages) in (2, 3), "once for each time"
    assert all("status.json: cannot be written: No such file" in message for message in messages)


def test_a_new_learner_while_a_server_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of all servers that were being published to are aborted, whatever the
    first of them does.
    """
    aborted: list[int] = []

    async def abort(client: ServerClient) -> None:
        await asyncio.sleep(0.05 if client.address.id == 0 else 0.0)
        aborted.append(client.address.id)

    monkeypatch.setattr(ServerClient, "abort_all", abort)

    async def scenario() -> None:
        servers = servers_of(2)
        servers.membership.publish([0, 1], 1, "a")
        async with asyncio.TaskGroup() as tasks:
            told: Any = SimpleNamespace(servers=servers, _tasks=tasks)
            Controller.new_learner(told)
            await asyncio.sleep(0.02)
            del servers.clients[1]  # as of one that has joined and left
        assert sorted(aborted) == [0, 1]

    asyncio.run(scenario())


def test_a_journal_that_fails_at_the_end_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    def part(name: str) -> Any:
        async def close() -> None:
            closed.append(name)
            if name == "records":
                raise MegarlError("the disk is full")

        return SimpleNamespace(close=close)

    def at_once(name: str) -> Any:
        return lambda: closed.append(name)

    made: Any = SimpleNamespace(
        **{name: part(name) for name in ("agents", "servers", "records", "teacher")},
        **{
            name: SimpleNamespace(close=at_once(name))
            for name in ("graders", "environments", "link")
        },
        _close_metrics=at_once("metrics"),
    )
    monkeypatch.setattr(module.spans, "flush", at_once("spans"))
    with pytest.raises(MegarlError, match="the disk is full"):
        asyncio.run(Controller._close(made))
    assert {"records", "link", "spans", "metrics"} <= {*closed}


def test_a_journal_that_is_older_than_the_checkpoints_is_left_to_the_learners_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller must live to tell why."""
    monkeypatch.setattr(module, "DROP_S", 0.01)
    rundir = RunDir(tmp_path)
    journal = Journal.open(tmp_path / "rollouts", 1, 0)
    checkpoint = rundir.checkpoints / "step-0000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / META).touch()
    recipe = from_tree({"journal": {"keep": "checkpoints"}})

    async def scenario() -> None:
        records = JournalWriter(journal)
        told: Any = SimpleNamespace(
            recipe=recipe,
            rundir=rundir,
            records=records,
            pipeline=SimpleNamespace(batches=lambda: 0),
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Controller._drop_old(told), 0.2)
        await records.close()

    asyncio.run(scenario())


def test_a_checkpoint_that_is_kept_as_a_milestone_does_not_keep_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing restarts from it: the journal goes back to the older of the
    two newest.
    """
    monkeypatch.setattr(module, "DROP_S", 0.01)
    rundir = RunDir(tmp_path)
    for step in (5, 30, 40):
        step_folder(rundir.checkpoints, step).mkdir(parents=True)
        (step_folder(rundir.checkpoints, step) / META).touch()
    recipe = from_tree(
        {"journal": {"keep": "checkpoints"}, "checkpoint": {"keep": 2, "milestones": [5]}}
    )
    dropped: list[int] = []

    async def drop_before(step: int) -> None:
        dropped.append(step)

    told: Any = SimpleNamespace(
        recipe=recipe,
        rundir=rundir,
        records=SimpleNamespace(drop_before=drop_before),
        pipeline=SimpleNamespace(batches=lambda: 50),
    )
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(Controller._drop_old(told), 0.1))
    assert set(dropped) == {30}


@pytest.mark.parametrize(
    ("step", "replay", "keep_best", "saved"),
    [
        (4, False, True, True),  # is being evaluated
        (3, False, True, True),  # has its score already
        (5, False, True, False),
        (3, True, True, False),  # a replay: servers have later weights
        (4, False, False, False),
    ],
)
def test_weights_that_are_evaluated_are_saved_for_keep_best(
    step: int, replay: bool, keep_best: bool, saved: bool
) -> None:
    controller: Any = SimpleNamespace(
        evaluations=SimpleNamespace(tasks={4: None}),
        pipeline=SimpleNamespace(state=SimpleNamespace(evaluations={0: None, 3: None})),
        recipe=from_tree({"checkpoint": {"keep_best": keep_best}}),
    )
    assert Controller._to_be_saved(controller, TrainStep(step, replay)) is saved
