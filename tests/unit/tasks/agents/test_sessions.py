"""Agents in processes of their own: rewards, crashes, limits,
and what is left of them.
"""

import asyncio
import json
import socket
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.core.base.contracts import AgentDown, AgentRollout, PolicyTurn, TurnRequest, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Prompt, int32
from megarl.core.recipe import from_tree
from megarl.tasks.agents import registry
from megarl.tasks.agents.registry import TaskAgents, Turns
from tests import make
from tests.unit.tasks.agents.serving import LENGTH, gateway
from tests.unit.tasks.agents.templates import QWEN, tokenizer_of

pytestmark = pytest.mark.processes
HERE = "tests.unit.tasks.agents.programs"
COMMAND = [sys.executable, "-m", HERE]


class Lost(Exception):
    """What a policy raises when no server can be asked."""


def agents_of(
    folder: Path, agent: Any, sandbox: str = "rlimits", **settings: Any
) -> tuple[TaskAgents, Any]:
    """sandbox: in bubblewrap an agent could leave no file for a test to find."""
    tokenizer = tokenizer_of(folder, QWEN)
    task = {"train": "x", "heldout": "y", "grader": "exact", "agent": agent}
    data = {"tasks": {"t": task}, "sandbox": sandbox}
    recipe = from_tree(
        {"run": {"dir": str(folder)}, "length": LENGTH, "data": data, "agent": settings}
    )
    return TaskAgents(recipe, tokenizer), tokenizer


def play(
    folder: Path, agent: Any, count: int = 1, fails: bool = False, **settings: Any
) -> list[AgentRollout]:
    """Sessions at once, of a policy that always says `7`."""
    agents, tokenizer = agents_of(folder, agent, **settings)

    async def policy(request: TurnRequest) -> PolicyTurn:
        if fails:
            raise Lost
        ids = int32([*tokenizer.ids("7"), tokenizer.end])
        return PolicyTurn((make.segment(ids),), True)

    async def run() -> list[AgentRollout]:
        prompt = Prompt(id="p", tokens=tokenizer.ids("3+4="), answer="7", task="t")
        try:
            return await asyncio.gather(
                *(agents.run_session(prompt, (1, 0, n), policy, float) for n in range(count))
            )
        finally:
            await agents.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("agent", "verdict", "sandbox"),
    [
        (f"{HERE}:judged", Verdict(0.5), "rlimits"),
        (f"{HERE}:judged", Verdict(0.5), "bubblewrap"),
        (f"{HERE}:judged_by_numpy", Verdict(-1.0), "rlimits"),
        (f"{HERE}:unjudged", None, "rlimits"),
        (COMMAND, Verdict(0.25), "rlimits"),
        (COMMAND, Verdict(0.25), "bubblewrap"),
    ],
)
def test_functions_and_commands_are_given_the_task_and_rewarded(
    tmp_path: Path, agent: Any, verdict: Verdict | None, sandbox: str
) -> None:
    (made,) = play(tmp_path, agent, sandbox=sandbox)
    assert (made.text, made.verdict, made.finish, made.truncated) == ("7", verdict, "stop", False)
    assert [s.trained for s in made.segments] == [False, True]
    assert (made.episode.turns, made.episode.limited, len(made.paths)) == (1, False, 1)


def test_a_reward_is_the_credit_of_the_turns_before_it(tmp_path: Path) -> None:
    """The last one, after all requests, is the session's; of the two conversations the
    second has turns 0, 2 and 3.
    """
    (made,) = play(tmp_path, f"{HERE}:rewarded_by_turn", credit="turn")
    assert made.verdict == Verdict(0.5)
    told = [(s.turn, s.credit) for s in made.segments if s.trained]
    assert told == [(1, 2.0), (0, 3.0), (2, 2.0), (3, 0.0)]
    assert [path.segments for path in made.paths] == [2, 6]
    (whole,) = play(tmp_path, f"{HERE}:rewarded_by_turn")
    assert whole.verdict == Verdict(0.5)
    assert {(s.turn, s.credit) for s in whole.segments} == {(-1, 0.0)}


def test_a_program_of_the_policy_cannot_reward_itself(tmp_path: Path) -> None:
    (made,) = play(tmp_path, f"{HERE}:runs_the_policys_program")
    assert (made.text, made.verdict) == ("7", None)


def test_a_turns_reward_does_not_excuse_a_crash(tmp_path: Path) -> None:
    """By episode it is the session's, so the session counts."""
    (whole,) = play(tmp_path, f"{HERE}:crashes_after_a_turns_reward")
    assert whole.verdict == Verdict(1.0)
    with pytest.raises(
        AgentDown, match="failed 2 times without a reward, the last time: it ended with status 3"
    ):
        play(tmp_path, f"{HERE}:crashes_after_a_turns_reward", credit="turn")


def test_a_command_finds_the_packages_of_its_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "theirs")
    told = (
        f'test "$PYTHONPATH" = theirs || exit 3; PYTHONPATH={Path.cwd()} exec {" ".join(COMMAND)}'
    )
    assert play(tmp_path, ["sh", "-c", told])[0].verdict == Verdict(0.25)


def test_an_agent_in_bubblewrap_has_its_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the runs lie on another disk, to which a link leads, and the temporary
    folders as well.
    """
    for name in ("runs", "temporary"):
        (tmp_path / "disk" / name).mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "runs")
    (tmp_path / "run" / "key").write_text("a secret")
    (tmp_path / "temporary").symlink_to(tmp_path / "disk" / "temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("LOOKED_AT", str(tmp_path))
    for sandbox, found in (("bubblewrap", 10), ("rlimits", 1111)):
        (made,) = play(tmp_path, f"{HERE}:looks_around", sandbox=sandbox)
        assert made.verdict == Verdict(found), sandbox
    assert (tmp_path / "left").exists()


def listening(family: socket.AddressFamily, address: Any) -> socket.socket:
    """A socket that every user may connect to."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()
    if isinstance(address, str) and address[0] == "/":
        Path(address).chmod(0o666)
    return server


def test_an_agent_in_bubblewrap_reaches_no_socket_but_the_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the machine's sockets: a port, an abstract one, one in a temporary folder and
    one in a folder that agents see.
    """
    here = tmp_path / "here"
    here.mkdir()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        Path(temporary).chmod(0o755)
        places: list[tuple[socket.AddressFamily, Any]] = [
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, f"\0{tmp_path}"),
            (socket.AF_UNIX, f"{temporary}/socket"),
            (socket.AF_UNIX, f"{here}/socket"),
        ]
        for n, (family, address) in enumerate(places):
            server = servers.enter_context(listening(family, address))
            places[n] = (family, server.getsockname() if family == socket.AF_INET else address)
        monkeypatch.setenv("SOCKETS", json.dumps(places))
        monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
        monkeypatch.syspath_prepend(Path.cwd())
        monkeypatch.chdir(here)
        for sandbox, reached in (("bubblewrap", 0), ("rlimits", 1111)):
            (made,) = play(tmp_path, f"{HERE}:reaches", sandbox=sandbox)
            assert made.verdict == Verdict(reached), sandbox


def test_a_sandbox_forwards_many_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the gateway's socket is longer than a socket's address may be."""
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (made,) = play(tmp_path, f"{HERE}:asks_at_once", sandbox="bubblewrap", paths=50)
    assert made.verdict == Verdict(40.0)
    assert list(temporary.iterdir()) == []


def test_nothing_that_an_agent_leaves_in_its_folder_ends_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        (made,) = play(tmp_path, f"{HERE}:nests", sandbox="bubblewrap")
        assert made.verdict == Verdict(0.5)
        assert not list(Path(temporary).iterdir())


def test_an_error_that_nobody_foresaw_costs_that_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(registry, "environment", fails)
    with pytest.raises(
        AgentDown,
        match="failed 2 times without a reward, the last time: it cannot be run: too deep",
    ):
        play(tmp_path, COMMAND)


def test_a_sandbox_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2; exit 1")
    (tmp_path / "bwrap").chmod(0o755)
    for path, said in (
        (str(tmp_path), r"no namespaces\); in a container"),
        ("/nowhere", r"No such file.*\); install it"),
    ):
        monkeypatch.setenv("PATH", path)
        expected = rf"^data.sandbox: the agent of t cannot be run .*{said}.*data.sandbox=rlimits"
        with pytest.raises(MegarlError, match=expected):
            agents_of(tmp_path, COMMAND, sandbox="bubblewrap")


def test_a_crash_is_tried_once_more_and_then_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_MARK", str(tmp_path / "crashed"))
    (made,) = play(tmp_path, f"{HERE}:crashes_once")
    assert made.verdict == Verdict(1.0)
    (tmp_path / "crashed").unlink()
    (made,) = play(tmp_path, f"{HERE}:posts_nan_first")
    assert made.verdict == Verdict(0.5)
    failures = {
        "crashes": "status 1, and printed: .*a bug of mine",
        "fills_its_output": "nothing to do",
        "returns_nan": "returned nan",
        "posts_text": "reward: should be a finite number, .* got '1.0'",
    }
    for agent, said in failures.items():
        with pytest.raises(
            AgentDown, match=rf"(?s)task t failed 2 times without a reward, the last time: .*{said}"
        ):
            play(tmp_path, f"{HERE}:{agent}")


def test_an_agent_for_which_the_machine_has_no_room_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when others have filled the disk, or taken all processes."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(
        AgentDown, match=r"failed 2 times without a reward, the last time: it cannot be run: .*file"
    ):
        play(tmp_path, f"{HERE}:judged")


def test_out_of_time_is_graded_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHILD_MARK", str(tmp_path / "child"))
    monkeypatch.setattr(registry, "KILL_LIMIT_S", 2.0)
    began = time.monotonic()
    (made,) = play(tmp_path, f"{HERE}:sleeps", time_s=18.0)
    assert 6 < time.monotonic() - began < 18, "a third of its time without a request"
    assert (made.text, made.finish, made.verdict, made.episode.limited) == (
        "7",
        "length",
        None,
        True,
    )
    assert (tmp_path / "child.ended").exists(), "it could clean up"
    until = time.monotonic() + 10  # a killed process takes a moment to end
    for child in map(int, (tmp_path / "child").read_text().split()):
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until, "the agent's child lives on"
                time.sleep(0.05)
    (made,) = play(tmp_path, f"{HERE}:speaks_on", time_s=9.0, requests=1_000_000)
    assert (made.finish, made.episode.limited) == ("length", True)


def test_time_for_which_no_server_answers_does_not_count(tmp_path: Path) -> None:
    """While servers restart, or the learner does, agents can do nothing."""
    limits = from_tree({"agent": {"time_s": 1.0}}).agent

    async def run(waits: bool) -> tuple[str, int | None]:
        async with gateway(tmp_path) as served:
            served.session.idle_since = None  # it waits for an answer
            process = await asyncio.create_subprocess_exec("sleep", "2.5")
            began = time.monotonic()
            await registry._ended(
                process, served.session, limits, lambda: waits * (time.monotonic() - began)
            )
            return served.session.over, process.returncode

    assert asyncio.run(run(True)) == ("", 0)
    assert asyncio.run(run(False))[0] == "its time is up (agent.time_s=1)"


def test_an_agent_that_reached_a_limit_lives_until_its_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "KILL_LIMIT_S", 0.2)
    monkeypatch.setattr(registry, "POLL_S", 0.05)
    limits = from_tree({}).agent

    async def run() -> tuple[bool, bool]:
        async with gateway(tmp_path, "a", requests=1) as served:
            served.hold.clear()
            asked = asyncio.create_task(served.chat())
            while not served.asked:
                await asyncio.sleep(0.01)
            assert (await served.chat([{"role": "user", "content": "one too many"}]))[0] == 400
            process = await asyncio.create_subprocess_exec("sleep", "60")
            ended = asyncio.create_task(
                registry._ended(process, served.session, limits, lambda: 0.0)
            )
            await asyncio.sleep(1)
            waited = not ended.done()
            served.hold.set()
            assert (await asked)[0] == 200
            await asyncio.wait_for(ended, 10)
            process.kill()
            await process.wait()
            return waited, served.session.limited

    assert asyncio.run(run()) == (True, True)


def test_a_limit_of_requests_ends_an_agent_that_is_told(tmp_path: Path) -> None:
    (made,) = play(tmp_path, f"{HERE}:speaks_on", requests=3)
    assert (made.finish, len(made.paths)) == ("length", 3)


def test_what_the_policy_raises_is_raised(tmp_path: Path) -> None:
    with pytest.raises(Lost):
        play(tmp_path, f"{HERE}:judged", fails=True)


def test_so_many_run_at_once_the_oldest_first() -> None:
    async def run() -> list[int]:
        turns = Turns(2)
        begun = list[int]()
        most = 0
        now = 0
        cancelled = asyncio.Event()

        async def one(order: int) -> None:
            nonlocal most, now
            async with turns.turn((1, order, 0)):
                begun.append(order)
                now += 1
                most = max(most, now)
                await cancelled.wait()
                await asyncio.sleep(0)
                now -= 1

        tasks = [asyncio.create_task(one(order)) for order in (5, 4, 9, 3, 8, 1)]
        while len(begun) < 2:
            await asyncio.sleep(0)
        tasks[3].cancel()
        cancelled.set()
        await asyncio.wait(tasks)
        assert most == 2
        assert turns._free == 2
        return begun

    assert asyncio.run(run()) == [5, 4, 1, 8, 9]


def test_what_cannot_be_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        MegarlError, match=r"data\.tasks\.t\.agent: there is no command 'no-such-agent'"
    ):
        agents_of(tmp_path, ["no-such-agent"])
    with pytest.raises(MegarlError, match=r"data\.tasks\.t\.agent: no\.such:agent cannot be used"):
        agents_of(tmp_path, "no.such:agent")
    suite = {
        "evaluation": {
            "suites": {"s": {"data": "x", "grader": "exact", "agent": ["no-such-agent"]}}
        }
    }
    with pytest.raises(
        MegarlError, match=r"evaluation\.suites\.s\.agent: there is no command 'no-such-agent'"
    ):
        TaskAgents(
            from_tree({"length": LENGTH, "data": {"sandbox": "rlimits"}} | suite),
            tokenizer_of(tmp_path, QWEN),
        )
    with pytest.raises(MegarlError, match=r"agent\.interface: .* set data\.sandbox=rlimits"):
        agents_of(tmp_path, COMMAND, sandbox="bubblewrap", interface="lo")
    with pytest.raises(MegarlError, match=r"agent\.interface: 'ib7' is not a network interface"):
        agents_of(tmp_path, COMMAND, interface="ib7")
    assert registry._address("lo") == "127.0.0.1"


def test_the_policy_is_asked_without_a_proxy_and_what_was_is_so_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for names in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv(names, "intern.example")
        made = registry._variables("http://10.0.0.1:80", "key", "/tmp")
        assert made["NO_PROXY"] == made["no_proxy"] == "intern.example,10.0.0.1"
    assert {made[name] for name in made if name.endswith("_MODEL")} == {"policy"}
