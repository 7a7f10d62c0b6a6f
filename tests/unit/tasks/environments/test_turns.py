"""The loop of turns, with servers that are made up: whatever they sample, lose and
publish, and whatever is replied.

What the servers were asked and what they sent is all that is looked at, beside the
completion: the sampler's own record is not.
"""

import asyncio
import base64
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.architecture import read
from megarl.core.base.contracts import (
    AgentDown,
    AgentRollout,
    GraderDown,
    Policy,
    TurnRequest,
    Verdict,
)
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import Batch, Episode, Group, Prompt, Rollout, float32, int32
from megarl.core.client.client import Generation, ServerLost, VersionSpan
from megarl.core.client.membership import Membership
from megarl.core.controller.metrics import task_statistics
from megarl.core.recipe import Recipe, from_tree
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import MAX_RETRIES, Completion, Job, Sampler, Void
from megarl.tasks.environments.registry import TaskEnvironments
from tests.server_pool import Pool
from tests.unit.tasks.environments import scripted
from tests.unit.tasks.environments.scripted import CALL, Near, Script

END = 0
CLOSE = 1
PHRASE = [8, 8, CLOSE]
PROMPT = Prompt(id="p", tokens=int32([7, 7, 2]), answer="5", task="game")
DUE = 20
LAG = 8
ROUTED = replace(
    read("qwen3-30b-a3b"), layers=1, expert_layers=(0,), experts=1000, experts_per_token=1
)


class Letters:
    """A tokenizer of ten tokens; 1 is `</think>`."""

    end = END
    ends = (END,)
    vocabulary = 10
    path = Path()

    def ids(self, text: str) -> np.ndarray:
        return int32(PHRASE)

    def decode(self, tokens: np.ndarray) -> str:
        return "".join("</think>" if t == CLOSE else str(t) for t in tokens.tolist())

    continued = decode


LETTERS: Any = Letters()


class Servers:
    """Stand-ins that sample at random. log: of each request the ids it was sent, the
    tokens it sent back, their versions, whether the end token alone stopped it.
    """

    def __init__(self, rng: random.Random, lossy: float) -> None:
        self.rng = rng
        self.lossy = lossy
        self.members = Membership([ServerAddress(id=n, url="") for n in range(3)])
        for server, version in ((0, DUE - LAG), (1, DUE - LAG - 1), (2, DUE - LAG + 1)):
            self.members.answered(server)
            self.members.publish([server], version, "a")
            self.members.published(server, version, "a", "")
        self.log: list[tuple[np.ndarray, np.ndarray, list[int], bool]] = []

    def client(self, server: int) -> "Client":
        return Client(self, server)

    def publish(self, server: int) -> int:
        """The next version, in flight."""
        version = self.members.clean()[server] + 1
        self.members.publish([server], version, "a")
        self.members.published(server, version, "a", "")
        return version


class Client:
    def __init__(self, servers: Servers, server: int) -> None:
        self.servers = servers
        self.server = server

    async def generate(
        self,
        ids: np.ndarray,
        limit: int,
        *,
        stop_token_ids: tuple[int, ...],
        routing_from: int,
        **_: Any,
    ) -> Generation:
        rng = self.servers.rng
        version = self.servers.members.clean()[self.server]
        assert version >= DUE - LAG, "the request went to a server that is not eligible"
        assert limit >= 1
        tokens: list[int] = []
        while len(tokens) < limit and not (tokens and tokens[-1] in stop_token_ids):
            tokens.append(rng.choice([END, CLOSE, CALL, CALL, 4, 5, 6, 4, 5, 6]))
        await asyncio.sleep(0)
        if rng.random() < self.servers.lossy:
            sent = tokens[: rng.randint(0, len(tokens))]
            self.servers.log.append(
                (ids, int32(sent), [version] * len(sent), stop_token_ids == (END,))
            )
            raise ServerLost("gone", int32(sent), float32([-1.0] * len(sent)))
        spans = [VersionSpan(version, 0, len(tokens))]
        versions = [version] * len(tokens)
        if rng.random() < 0.5:
            at = rng.randint(0, len(tokens))
            newer = self.servers.publish(self.server)
            spans = [VersionSpan(version, 0, at), VersionSpan(newer, at, len(tokens))]
            versions = [version] * at + [newer] * (len(tokens) - at)
        self.servers.log.append((ids, int32(tokens), versions, stop_token_ids == (END,)))
        rows = np.arange(routing_from, len(ids) + len(tokens) - 1, dtype="<i2")
        finish: Any = "stop" if tokens[-1] in stop_token_ids else "length"
        table = base64.b64encode(rows.tobytes()).decode()
        return Generation(int32(tokens), float32([-1.0] * len(tokens)), tuple(spans), finish, table)


@pytest.fixture(autouse=True, scope="module")
def in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.tasks.environments.registry.Host", Near)
        patch.setattr(Near, "tokenizer", Letters())
        yield


def recipe_of(control: str, thinking: int, answer: int, turns: int, reply_tokens: int) -> Recipe:
    task = {
        "train": "",
        "heldout": "",
        "grader": "exact",
        "environment": "tests.unit.tasks.environments.scripted:Scripted",
        "turns": turns,
        "reply_tokens": reply_tokens,
    }
    length = {"control": control, "thinking_tokens": [thinking, thinking], "answer_tokens": answer}
    return from_tree({"data": {"tasks": {"game": task}}, "length": length})


def play(recipe: Recipe, servers: Servers, script: Script) -> Completion | None:
    """The rollout; None if it is void. Closed once, in any case."""
    scripted.SCRIPT = script
    placed: list[int] = []

    async def run() -> Completion:
        places = Places(servers.members, 4)
        clients = {n: servers.client(n) for n in range(3)}
        sampler = Sampler(recipe, LETTERS, Pool(clients, places), TaskEnvironments(recipe, LETTERS))

        async def take() -> tuple[int, int]:
            server, version = await places.take((1, 0, 0), lambda _, version: version >= DUE - LAG)
            placed.append(server)
            return server, version

        job = Job(PROMPT, (1, 0, 0), take, "", recipe.length.thinking_tokens[1], 1.0, 1.0, ROUTED)
        done = await asyncio.wait_for(sampler.complete(job), 10)
        assert all(use.running == 0 for use in places.use.values())
        return done

    try:
        return asyncio.run(run())
    except Void:
        return None
    finally:
        assert script.closed == 1
        assert 1 not in placed


def rollout_of(done: Completion) -> Rollout:
    return Rollout(
        sample=0,
        segments=tuple(done.segments),
        reward=1.0,
        correct=True,
        finish=done.finish,
        interrupted=done.interrupted,
        retries=done.retries,
        episode=done.episode,
    )


def sampled(servers: Servers, done: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of the completion a server sent, and of which version; every request
    saw all that stands before.
    """
    from_server = np.zeros(len(done.tokens), bool)
    versions = np.full(len(done.tokens), -1)
    whole = np.concatenate([PROMPT.tokens, done.tokens])
    for ids, tokens, of, _ in servers.log:
        np.testing.assert_array_equal(ids, whole[: len(ids)])
        at = slice(len(ids) - len(PROMPT.tokens), len(ids) - len(PROMPT.tokens) + len(tokens))
        np.testing.assert_array_equal(tokens, done.tokens[at], "not as they were sampled")
        assert not from_server[at].any()
        from_server[at] = True
        versions[at] = of
    return from_server, versions


@given(
    seed=st.integers(0, 2**32),
    lossy=st.sampled_from([0.0, 0.2]),
    control=st.sampled_from(["interruption", "none", "overlong_penalty"]),
    sizes=st.tuples(st.integers(5, 30), st.integers(1, 6), st.integers(1, 12)),
    replies=st.lists(st.sampled_from([0, 1, 2, 3, 4, 4, 4, None]), min_size=3, max_size=12),
)
@settings(max_examples=400)
@example(seed=0, lossy=0.0, control="interruption", sizes=(30, 6, 5), replies=[4, 4, 4, 4, 4, 4])
def test_every_episode(
    seed: int, lossy: float, control: str, sizes: tuple[int, int, int], replies: list[int | None]
) -> None:
    thinking, answer, turns = sizes
    recipe = recipe_of(control, thinking, answer, turns, 4)
    servers = Servers(random.Random(seed), lossy)
    script = Script(replies=list(replies))
    done = play(recipe, servers, script)
    if done is None:
        assert lossy
        assert len(servers.log) > MAX_RETRIES
        return
    rollout = rollout_of(done)
    (from_server, versions) = sampled(servers, done)

    # Masked are exactly the replies, in order, but perhaps the last, and the phrase.
    np.testing.assert_array_equal(rollout.trained, from_server)
    phrase = PHRASE if done.interrupted else []
    kept = [
        [token for reply in some for token in reply] for some in (script.told, script.told[:-1])
    ]
    assert done.tokens[~from_server].tolist() in [[*tokens, *phrase] for tokens in kept]
    assert not rollout.logprobs[~from_server].any()

    # Versions are those of sampling; what is put in has that of the token before it.
    np.testing.assert_array_equal(rollout.versions[from_server], versions[from_server])
    for at in np.flatnonzero(~from_server):
        assert rollout.versions[at] == rollout.versions[at - 1]
    statistics = batch_statistics(
        Batch(step=DUE, groups=(Group(ticket=0, prompt=PROMPT, rollouts=(rollout,)),))
    )
    assert statistics["lag_max"] == DUE - versions[from_server].min() <= LAG
    assert statistics["generated_tokens"] == from_server.sum()

    # Everything is bounded.
    longest = thinking + answer + (len(PHRASE) if done.interrupted else 0)
    assert len(done.tokens) <= longest
    assert done.episode is not None
    assert len(script.seen) <= done.episode.turns <= turns
    assert all(turn[-1] in (END, CALL) for turn in script.seen)
    assert not any(token in (END, CALL) for turn in script.seen for token in turn[:-1].tolist())
    assert (done.episode.calls, done.episode.errors) == (
        len(script.told),
        sum(len(t) == 1 for t in script.told),
    )

    # Turns are what was sampled between two replies, whole.
    starts = np.flatnonzero(from_server & ~np.concatenate([[False], from_server[:-1]]))
    for turn in script.seen:
        assert any(
            np.array_equal(turn, done.tokens[at : at + len(turn)])
            for at in (*starts, *_after_empty(script, done))
        )

    # The record of experts has no gap.
    rows = ROUTED.routing(done.routing).table[:, 0, 0] if done.routing else np.zeros(0)
    np.testing.assert_array_equal(rows, np.arange(len(rows)))
    if not lossy:
        assert len(rows) == len(PROMPT.tokens) + len(done.tokens) - 1

    # It ends as it says.
    answered = sum(len(tokens) for _, tokens, _, last_leg in servers.log if last_leg)
    if done.finish == "stop":
        assert done.tokens[-1] in ((END,) if answered else (END, CALL))
        assert answered or len(script.seen) == len(script.told) + 1
    elif control == "interruption":
        assert answered == answer or (
            done.tokens[-1] == END and not answered and len(script.told) == len(script.seen)
        )
    else:
        assert len(done.tokens) == longest or (
            done.tokens[-1] == END and len(script.told) == len(script.seen)
        )


def _after_empty(script: Script, done: Completion) -> list[int]:
    """Turns behind a reply without tokens begin where the turn before ended."""
    if all(len(reply) for reply in script.told):
        return []
    return list(range(len(done.tokens)))


class OneTurnEach:
    """A stand-in server that says these turns, one a request; `asked`: limits and stop
    tokens.
    """

    def __init__(self, turns: list[list[int]]) -> None:
        self.asked = list[tuple[int, tuple[int, ...]]]()
        self.turns = turns

    async def generate(
        self, ids: np.ndarray, limit: int, *, stop_token_ids: tuple[int, ...], **_: Any
    ) -> Generation:
        self.asked.append((limit, stop_token_ids))
        tokens = self.turns.pop(0)[:limit]
        finish: Any = "stop" if tokens[-1] in stop_token_ids else "length"
        return Generation(
            int32(tokens), float32([-1.0] * len(tokens)), (VersionSpan(3, 0, len(tokens)),), finish
        )


def say(
    spoken: list[list[int]],
    script: Script,
    control: str = "interruption",
    positions: int = sys.maxsize,
    **sizes: int,
) -> tuple[Completion, OneTurnEach]:
    scripted.SCRIPT = script
    chosen = {"thinking": 20, "answer": 4, "turns": 3, "reply_tokens": 4} | sizes
    recipe = recipe_of(control, **chosen)
    server = OneTurnEach(spoken)
    members = Membership([ServerAddress(id=0, url="")])
    members.answered(0)
    members.publish([0], 3, "a")
    members.published(0, 3, "a", "")

    async def run() -> Completion:
        places = Places(members, 1)
        sampler = Sampler(
            recipe,
            LETTERS,
            Pool({0: server}, places),
            TaskEnvironments(recipe, LETTERS),
            positions=positions,
        )
        return await sampler.complete(
            Job(
                PROMPT,
                (1, 0, 0),
                partial(places.take, (1, 0, 0), lambda *_: True),
                "",
                chosen["thinking"],
                1.0,
                1.0,
            )
        )

    return asyncio.run(run()), server


def said(done: Completion) -> list[tuple[list[int], bool]]:
    return [(s.tokens.tolist(), s.trained) for s in done.segments]


def test_a_call_within_a_thought_is_one_message() -> None:
    done, server = say([[4, CALL], [CLOSE, 5, END]], Script([2]))
    assert said(done) == [([4, CALL], True), ([3, 3], False), ([CLOSE, 5, END], True)]
    assert (done.text, done.finish, done.interrupted) == (f"4{CALL}</think>5", "stop", False)
    assert not done.truncated
    assert server.asked == [(20, (END, CALL)), (16, (END, CALL))]


def test_behind_the_end_token_a_new_message_begins_whose_text_alone_is_graded() -> None:
    done, _ = say([[CLOSE, 4, END], [5, CLOSE, 6, END]], Script([2]))
    assert said(done) == [([CLOSE, 4, END], True), ([3, 3], False), ([5, CLOSE, 6, END], True)]
    assert (done.text, done.finish) == ("5</think>6", "stop")


def test_thinking_is_interrupted_in_the_message_in_which_it_is_open() -> None:
    """The first message's thinking was closed; the second one's is not when the budget
    of both is used up.
    """
    done, server = say([[CLOSE, 4, END], [5] * 10, [6, END]], Script([2]), thinking=10)
    assert said(done)[2:] == [([5] * 5, True), (PHRASE, False), ([6, END], True)]
    assert [limit for limit, _ in server.asked] == [10, 5, 4]
    assert server.asked[-1][1] == (END,), "in the answer leg no tool is called"
    assert done.interrupted
    assert done.text.endswith("</think>6")


def test_out_of_turns_it_answers_if_its_message_is_not_over() -> None:
    done, server = say([[4, CALL], [5, CALL], [6, END]], Script([1, 1]), turns=2)
    assert said(done) == [
        ([4, CALL], True),
        ([3], False),
        ([5, CALL], True),
        (PHRASE, False),
        ([6, END], True),
    ]
    assert server.asked[-1] == (4, (END,))
    assert done.episode is not None
    assert (done.episode.turns, done.episode.calls, done.episode.errors, done.episode.limited) == (
        2,
        2,
        2,
        True,
    )
    done, _ = say([[4, END], [5, END]], Script([2, 2]), turns=2)
    assert said(done) == [([4, END], True), ([3, 3], False), ([5, END], True)]
    assert (done.finish, done.text, done.truncated) == ("length", "5", False)


@pytest.mark.parametrize("control", ["none", "overlong_penalty", "interruption"])
def test_a_message_that_a_limit_cuts_off_is_truncated(control: str) -> None:
    done, _ = say([[4] * 20, [5] * 4], Script([]), control, thinking=10)
    assert (done.finish, done.truncated) == ("length", True)
    done, _ = say([[4, END]], Script([]), control)
    assert (done.finish, done.truncated) == ("stop", False)


def test_a_reply_that_does_not_fit_is_left_out() -> None:
    done, server = say([[4] * 7 + [CALL], [6, END]], Script([4]), thinking=11)
    assert said(done) == [([4] * 7 + [CALL], True), (PHRASE, False), ([6, END], True)]
    assert [limit for limit, _ in server.asked] == [11, 4]


@pytest.mark.parametrize("control", ["none", "overlong_penalty", "interruption"])
def test_a_reply_that_fills_the_models_context_ends_the_rollout(control: str) -> None:
    """7 of 27 positions are kept, and 3 are the prompt's. The reply fits into the
    budget, but no token fits behind it.
    """
    done, server = say([[4] * 12 + [END]], Script([4]), control, positions=27)
    phrase = PHRASE if control == "interruption" else []
    assert said(done) == [([4] * 12 + [END], True), ([3] * 4 + phrase, False)]
    assert [limit for limit, _ in server.asked] == [17]
    assert (done.finish, done.interrupted) == ("length", bool(phrase))
    assert done.text == ("88</think>" if phrase else ""), "nothing of the new message was sampled"


def test_the_environment_may_judge() -> None:
    done, _ = say([[4, END]], Script(verdict=Verdict(0.5)))
    assert done.verdict == Verdict(0.5)


def test_one_that_fails_ends_the_rollout_which_then_cannot_be_judged() -> None:
    task = {
        "train": "",
        "heldout": "",
        "environment": "tests.unit.tasks.environments.scripted:Faulty",
        "reply_tokens": 4,
    }
    recipe = from_tree({"data": {"tasks": {"step": task}}})
    members = Membership([ServerAddress(id=0, url="")])
    members.answered(0)
    members.publish([0], 3, "a")
    members.published(0, 3, "a", "")

    async def run() -> None:
        places = Places(members, 1)
        sampler = Sampler(
            recipe,
            LETTERS,
            Pool({0: OneTurnEach([[4, END]])}, places),
            TaskEnvironments(recipe, LETTERS),
        )
        prompt = Prompt(id="", tokens=PROMPT.tokens, answer="", task="step")
        done = await sampler.complete(
            Job(
                prompt,
                (1, 0, 0),
                partial(places.take, (1, 0, 0), lambda *_: True),
                "",
                20,
                1.0,
                1.0,
            )
        )
        assert done.tokens.tolist() == [4, END]
        with pytest.raises(
            GraderDown, match=r"data\.tasks\.step: environment .*: step failed: KeyError"
        ):
            raise done.down or AssertionError
        assert places.use[0].running == 0

    asyncio.run(run())


def test_metrics_of_turns() -> None:
    recipe = recipe_of("none", 20, 4, 3, 4)
    found = [say([[4, CALL], [5, END]], Script([n]))[0] for n in (1, 2)] + [
        say([[4, END]], Script())[0]
    ]
    groups = (Group(ticket=0, prompt=PROMPT, rollouts=tuple(rollout_of(done) for done in found)),)
    statistics = task_statistics(Batch(step=3, groups=groups), recipe)
    assert statistics["turns_mean"] == pytest.approx(5 / 3)
    assert statistics["tool_error_rate"] == 0.5
    assert statistics["turn_limit_rate"] == 0
    assert 0 <= statistics["tool_seconds"] < 10
    assert (
        task_statistics(
            Batch(step=3, groups=groups),
            from_tree({"data": {"tasks": {"g": {"train": "", "heldout": ""}}}}),
        )
        == {}
    )


class Asks:
    """An agent that asks once, and lets a place be had when it has been told of the
    wait.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.told = 0.0

    def work(self, task: str) -> bool:
        return True

    async def run_session(
        self,
        prompt: Prompt,
        order: tuple[int, int, int],
        policy: Policy,
        waited: Callable[[], float],
    ) -> AgentRollout:
        asked: asyncio.Task[Any] = asyncio.create_task(policy(TurnRequest(prompt.tokens, 5)))  # type: ignore[arg-type]
        while (told := waited()) < 0.02:
            await asyncio.sleep(0.005)
        self.gate.set()
        turn = await asked
        self.told = waited()
        assert told <= self.told
        made = AgentRollout(
            turn.segments,
            (),
            "",
            "stop",
            None,
            Episode(turns=1, calls=0, errors=0, seconds=0.0, limited=False),
        )
        raise AgentDown("it crashed", made)


def test_an_agent_is_told_how_long_its_requests_wait_and_its_tokens_survive_a_crash() -> None:
    async def run() -> None:
        servers = Servers(random.Random(0), lossy=0.0)
        agent = Asks()
        pool = Pool({n: servers.client(n) for n in range(3)}, Places(servers.members, 4))
        sampler = Sampler(recipe_of("none", 5, 5, 1, 1), Letters(), pool, {}, agent)  # type: ignore[arg-type]

        async def take() -> tuple[int, int]:
            await agent.gate.wait()
            return await pool.places.take((1, 0, 0), lambda _, version: version >= DUE - LAG)

        done = await sampler.complete(Job(PROMPT, (1, 0, 0), take, "", 5, 1.0, 1.0, ROUTED))
        assert len(done.tokens) > 0
        assert str(done.down) == "it crashed"
        assert agent.told >= 0.02

    asyncio.run(asyncio.wait_for(run(), 10))
