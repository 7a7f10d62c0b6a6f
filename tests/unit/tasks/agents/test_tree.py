"""Random agents against a session: what is sent, what is trained. The oracle knows only
requests, answers and tokens.

It has no tree: whom a request continued is told by comparing tokens, as is what each
path trains.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.contracts import PolicyTurn, TurnRequest
from megarl.core.base.types import Routing, int32, paths_of
from megarl.core.recipe import from_tree
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ToolCall
from megarl.tasks.agents.session import AgentSession
from tests import make
from tests.unit.tasks.agents.templates import MERGES, SPECIAL, rendering_of

LONG = {
    "prompt_tokens": 100_000,
    "thinking_tokens": [100_000, 100_000],
    "answer_tokens": 1,
    "control": "none",
}
MANY = {"trained_tokens": 1_000_000, "requests": 100_000, "paths": 100_000}
SETTINGS = from_tree({"length": LONG, "agent": MANY})
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
SYSTEM = CanonicalMessage("system", "s")
FIRST_SPECIAL = 256 + len(MERGES)
CALL = '\n<tool_call>\n{"name": "f", "arguments": {"b":%d, "a": 1.0}}\n</tool_call>'
type Said = list[int | None]
"""By message of a conversation: the generation that said it, None for others'."""


@dataclass
class Made:
    """A generation as the policy saw it; its number is the version of its weights.
    experts: those with which it computed each of its tokens but the last one. told: how
    many of them the session was told.
    """

    sent: np.ndarray
    sampled: np.ndarray = field(default_factory=lambda: int32(()))
    experts: np.ndarray = field(default_factory=lambda: int32(()))
    told: int = 0

    @property
    def whole(self) -> list[int]:
        return [*self.sent.tolist(), *self.sampled.tolist()]


@dataclass
class Asked:
    """A request of the agent. got: the generation whose answer it took whole; asked,
    at: before and after, by its own clock.
    """

    messages: tuple[CanonicalMessage, ...]
    said: Said
    asked: int
    edited: set[int]
    got: int | None = None
    at: int = -1


class World:
    """A policy that writes random texts in random pieces, and an agent that does all
    that agents do. Of cached tokens the policy's servers return the experts with which
    these were computed; one request in `evicting` finds nothing cached, and one in
    `losing` tells nothing, or not of the last tokens.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self, tokenizer, rendering, seed: int, evicting: float = 0.2, losing: float = 0.2
    ) -> None:
        self.evicting = evicting
        self.losing = losing
        self.cache: dict[bytes, int] = {}
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.session = AgentSession(SETTINGS, tokenizer, rendering, self.policy)
        self.made: list[Made] = []
        self.asked: list[Asked] = []
        self.open: list[tuple[tuple[CanonicalMessage, ...], Said]] = []
        self.clock = 0

    async def policy(self, request: TurnRequest) -> PolicyTurn:
        number = len(self.made)
        rng = self.rng
        self.made.append(Made(request.tokens))
        assert 0 <= request.cached <= len(request.tokens)
        await asyncio.sleep(0)
        text = (
            "".join(rng.choices(["abc", "the", "xy", " ", "\n"], k=4)) + f"#{rng.randrange(10**6)}"
        )
        if rng.random() < 0.4:
            text = f"<think>{text}</think>\n"
        text += "".join(CALL % n for n in range(rng.choices([0, 1, 2], [2, 2, 1])[0]))
        pieces = []
        ended = rng.random() < 0.9
        while text:
            n = rng.randint(1, 3)
            pieces.append(self.tokenizer.ids(text[:n]))
            text = text[n:]
        sampled = np.concatenate([*pieces, int32([self.tokenizer.end] * ended)])
        self.made[number].sampled = sampled
        parts = np.split(sampled, [len(sampled) // 2])
        return PolicyTurn(
            tuple(make.segment(p, number) for p in parts),
            ended,
            self.experts(self.made[number], request.routed),
        )

    def experts(self, made: Made, routed: int) -> np.ndarray | None:
        """Choose an expert for each token that the generation computed; return what
        the session is told of those from `routed` on.
        """
        whole = int32(made.whole)
        is_evicted = self.rng.random() < self.evicting
        for end in range(1, len(whole)):
            prefix = whole[:end].tobytes()
            is_sampled = end > len(made.sent)
            if is_sampled or is_evicted or prefix not in self.cache:
                self.cache[prefix] = self.rng.randrange(200)
        made.experts = int32([self.cache[whole[:end].tobytes()] for end in range(1, len(whole))])
        if self.rng.random() < self.losing:
            lost = self.rng.choice([3, len(whole)])
            made.told = max(len(made.experts) - lost, 0)
        else:
            made.told = len(made.experts)
        if made.told <= routed:
            return None
        return made.experts[routed : made.told].astype(np.uint8).reshape(-1, 1, 1)

    async def ask(
        self,
        messages: tuple[CanonicalMessage, ...],
        said: Said,
        stays: bool = True,
        again: bool = False,
    ) -> Asked:
        """Ask, and wait for the answer; if the agent does not stay, it closes the
        connection and takes nothing.
        """
        self.clock += 1
        edited = {
            g for m, g in zip(messages, said, strict=True) if g is not None and "EDITED" in repr(m)
        }
        asked = Asked(messages, said, self.clock, edited)
        self.asked.append(asked)
        open_ = True
        body = repr(messages).encode()
        pending = self.session.resume(body, again, lambda: open_)
        pending = pending or self.session.start(AgentRequest(messages, TOOLS), body, lambda: open_)
        await asyncio.sleep(0)
        open_ = stays
        turn = await pending.done
        self.clock += 1
        asked.at = self.clock
        if stays:
            self.session.tree.deliver(turn.node)
            asked.got = int(turn.node.segments[0].weight_version)
            sent = self.made[asked.got].sent
            for g in edited:
                assert not begins(sent, self.made[g]), (
                    "an edited message never passes for what was said"
                )
            if any("EDITED" in m.text or "EDITED" in repr(m.calls) for m in messages):
                assert "EDITED" in self.tokenizer.decode(sent), "the policy sees the edit"
        return asked

    def returned(self, message: CanonicalMessage) -> CanonicalMessage:
        """Return an answer as some agent sends it back."""
        match self.rng.choice(
            [
                "same",
                "same",
                "same",
                "reasoning",
                "blanks",
                "ids",
                "json",
                "text",
                "arguments",
                "thoughts",
            ]
        ):
            case "reasoning":
                return replace(message, reasoning="")
            case "blanks":
                return replace(message, text=f"\n {message.text.strip()}")
            case "ids":
                return replace(
                    message,
                    marks=frozenset(),
                    calls=tuple(c._replace(id="x") for c in message.calls),
                )
            case "json":
                calls = tuple(
                    ToolCall.of(c.id, c.name, c.json.replace(": ", ":")) for c in message.calls
                )
                return replace(message, calls=calls)
            case "text":
                return replace(message, text=message.text + "EDITED")
            case "arguments" if message.calls:
                return replace(
                    message, calls=tuple(c._replace(arguments={"EDITED": 1}) for c in message.calls)
                )
            case "thoughts" if message.reasoning:
                return replace(message, reasoning="EDITED")
        return message

    async def live(self, requests: int) -> None:
        rng = self.rng
        self.open.append(((SYSTEM, CanonicalMessage("user", "u")), [None, None]))
        while len(self.asked) < requests:
            messages, said = rng.choice(self.open[-6:])
            act = rng.random()
            if act < 0.1:  # a summary, or a sub-agent
                text = rng.choice(["summary", "task"]) + str(rng.randint(0, 3))
                messages = (SYSTEM, CanonicalMessage("user", text))
                said = [None, None]
            elif act < 0.2 and len(messages) > 3:  # the history is cut
                n = rng.choice([n for n, m in enumerate(messages) if m.role != "assistant"][1:])
                messages = messages[: n + 1]
                said = said[: n + 1]
            if act > 0.95 and self.asked:  # the same once more
                before = rng.choice(self.asked)
                await self.take(before.messages, before.said)
            else:
                await self.take(
                    tuple(self.returned(m) if m.role == "assistant" else m for m in messages), said
                )

    async def take(self, messages: tuple[CanonicalMessage, ...], said: Said) -> None:
        """Ask in one of the ways of agents: once, twice at a time, leaving early and
        coming back or not; then go on.
        """
        way = self.rng.random()
        taken = list[Asked]()
        if way < 0.15:
            taken = await asyncio.gather(*(self.ask(messages, said) for _ in range(2)))
            assert taken[0].got != taken[1].got, "parallel sub-agents get an answer each"
        elif way < 0.3:
            await self.ask(messages, said, stays=False)
            if self.rng.random() < 0.6:
                taken = [await self.ask(messages, said, again=self.rng.random() < 0.5)]
        else:
            taken = [await self.ask(messages, said)]
            if way < 0.35:
                again = await self.ask(messages, said, again=True)
                assert again.got == taken[0].got, "a marked retry gets what was made"
        for asked in taken:
            nodes = [n for n in self.session.tree.nodes if n.segments]
            served = next(n.answer for n in nodes if n.segments[0].weight_version == asked.got)
            after = [
                CanonicalMessage("tool", f"r{self.rng.randint(0, 1)}", answers=c.id)
                for c in served.calls
            ]
            after = after or [CanonicalMessage("user", f"go on {self.rng.randint(0, 1)}")]
            self.open.append(
                ((*messages, served, *after), [*said, asked.got, *[None] * len(after)])
            )

    def check_experts(self, made: Made, begin: int, known: np.ndarray) -> Counter[str]:
        """Assert that tokens of a generation, from `begin` on, have the experts that it
        told; where it told none, those with which a later one computed the token again,
        or none.
        """
        seen = Counter[str]()
        for position, expert in enumerate(known.tolist(), start=begin):
            if position < made.told:
                assert expert == made.experts[position], "those it was sampled with"
                seen["sampled experts"] += 1
            else:
                prefix = made.whole[: position + 1]
                later = [m for m in self.made if m.whole[: position + 1] == prefix]
                assert expert in {m.experts[position] for m in later if m.told > position}
                seen["computed again"] += 1
        return seen

    def check(self) -> Counter[str]:
        """Hold the invariants; return what happened."""
        made = self.made
        seen = Counter[str]()
        trained = Counter[int]()
        segments, paths, experts = self.session.tree.paths()
        routing = None
        if experts is not None:
            routing = Routing.of(experts, 256)
        tables = make.rollout(*segments, reward=0.0, paths=paths, routing=routing).path_experts
        left = iter(segments)
        for path, branch, table in zip(
            paths_of(segments, paths, int32(())), paths, tables, strict=True
        ):
            end = path.own_start
            rows = int32(() if table is None else table[:, 0, 0])
            seen["unknown experts"] += max(len(path.tokens) - 1 - len(rows), 0)
            assert not path.trained[:end].any()
            for s in [next(left) for _ in range(branch.segments)]:
                begin = end
                end = end + len(s.tokens)
                assert np.array_equal(path.tokens[begin:end], s.tokens)
                assert (path.trained[begin:end] == s.trained).all()
                if s.trained:
                    assert made[s.weight_version].whole[:end] == path.tokens[:end].tolist(), (
                        "ids sent are the path's"
                    )
                    trained[s.weight_version] += len(s.tokens)
                    seen += self.check_experts(made[s.weight_version], begin, rows[begin:end])
        assert all(count == len(made[g].sampled) for g, count in trained.items()), "whole, and once"
        taken = {a.got for a in self.asked if a.got is not None}
        for g in set(range(len(made))) - trained.keys():
            assert not any(begins(made[n].sent, made[g]) for n in taken - {g}), (
                f"{g} is continued, and not trained"
            )
            takers = [a for a in self.asked if a.got == g]
            first = min((a.at for a in takers), default=0)
            again = [
                a
                for a in self.asked
                if takers and a.got in taken - {g} and a.asked > first and same(a, takers[0])
            ]
            assert not takers or again, f"{g} was taken, and nobody asked the same again after it"
            seen["superseded" if takers else "abandoned"] += 1
        for g in trained:
            assert g in taken or any(begins(made[n].sent, made[g]) for n in taken), (
                f"nobody took {g}"
            )
        for a in self.asked:
            if a.got is not None and not a.edited and any(g is not None for g in a.said):
                assert any(begins(made[a.got].sent, g) for g in made), (
                    "what comes back unchanged is not rendered again"
                )
                seen["extended"] += 1
            seen["edited"] += bool(a.edited)
        return seen + Counter(trained=len(trained), paths=len(paths), requests=len(self.asked))


def begins(sent: np.ndarray, made: Made) -> bool:
    """Whether these tokens begin with the generation's, and the end token, which is put
    in if it was not sampled: without it an unfinished answer begins all longer ones.
    """
    end = SPECIAL.index("<|im_end|>") + FIRST_SPECIAL
    whole = made.whole + [end] * (made.whole[-1] != end)
    return len(made.sampled) > 0 and sent.tolist()[: len(whole)] == whole


def same(one: Asked, other: Asked) -> bool:
    """Whether two requests are the same to the policy, whatever ids and reasoning they
    have.
    """
    return [m.key for m in one.messages] == [m.key for m in other.messages]


async def lives(folder: Path, sessions: int, requests: int) -> Counter[str]:
    tokenizer, rendering = rendering_of(folder, "qwen")
    seen = Counter[str]()
    for seed in range(sessions):
        world = World(tokenizer, rendering, seed)
        await world.live(requests)
        seen += world.check()
    return seen


def test_what_random_agents_are_sent_and_what_is_trained(tmp_path: Path) -> None:
    seen = asyncio.run(lives(tmp_path, sessions=40, requests=25))
    assert seen["requests"] >= 1000
    assert (
        min(
            seen[what]
            for what in ("abandoned", "superseded", "extended", "edited", "trained", "paths")
        )
        > 20
    ), seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_requests_of_random_agents(tmp_path: Path) -> None:
    seen = asyncio.run(lives(tmp_path, sessions=250, requests=40))
    assert seen["requests"] >= 10_000
    assert min(seen[what] for what in ("abandoned", "superseded", "extended", "edited")) > 200, seen


def test_identical_parallel_sub_agents_are_both_trained(tmp_path: Path) -> None:
    async def run() -> Counter[str]:
        world = World(*rendering_of(tmp_path, "qwen"), 0)
        messages = (SYSTEM, CanonicalMessage("user", "u"))
        one, two = await asyncio.gather(*(world.ask(messages, [None, None]) for _ in range(2)))
        assert len(world.session.tree.trained()) == 2
        three = await world.ask(messages, [None, None])
        assert {one.got, two.got} == {0, 1}, "which is rendered first is left to threads"
        assert three.got == 2
        lines = world.session.tree.trained()
        assert [line[-1].number for line in lines] == [2], (
            "asked again after both answers: they were lost"
        )
        return world.check()

    assert asyncio.run(run())["superseded"] == 2


def test_each_token_has_its_experts_if_no_answer_is_lost(tmp_path: Path) -> None:
    """All but each path's last one, also where a prefix was computed again."""
    tokenizer, rendering = rendering_of(tmp_path, "qwen")
    seen = Counter[str]()
    for seed in range(8):
        world = World(tokenizer, rendering, seed, evicting=0.5, losing=0.0)
        asyncio.run(world.live(25))
        seen += world.check()
    assert not seen["unknown experts"]
    assert seen["sampled experts"] > 1000
