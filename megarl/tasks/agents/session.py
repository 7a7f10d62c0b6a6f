"""One session: an agent, its key, its tree, its limits, and which client waits for which answer.

    begin(request) ─► PendingTurn ─► tree.find ─► rendering ─► policy ─► tree.answer ─► await done
       │ same body as a request whose client has gone, or same body and marked as a retry: the same PendingTurn
       └ session over: 400

A generation continues after its client has gone, since the client may come back; an answer that nobody collects is not trained.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import structs

from megarl.core.base.contracts import AgentRollout, Policy, PolicyTurn, Verdict
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Episode, Segment, int32
from megarl.core.recipe import Recipe
from megarl.tasks.agents.calls import read_turn
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages, WireError
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.agents.tree import SessionTree, TreeNode, tokens_of


class ContextFull(WireError):
    """The prompt has `tokens` tokens, of at most `limit`: no room for an answer. Agents know each protocol's wording for it."""

    def __init__(self, tokens: int, limit: int) -> None:
        said = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens."
        super().__init__(400, f"{said} Please reduce the length of the messages.", "context_length_exceeded")
        self.tokens, self.limit = tokens, limit


@dataclass(eq=False)
class PendingTurn:
    """A request in progress. asked: when it came, by the tree's clock; placed: set once its prompt is known and allowed, or it
    has failed; clients: one function per client, which returns whether its connection is still open."""

    asked: int
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Callable[[], bool]] = field(default_factory=list)
    node: TreeNode | None = None
    done: "asyncio.Task[ServedTurn]" = field(init=False)

    @property
    def abandoned(self) -> bool:
        """Return whether no client has received the answer or is still waiting for it."""
        delivered = self.node is not None and self.node.delivered >= 0
        return not delivered and not any(is_open() for is_open in self.clients)


@dataclass(frozen=True)
class ServedTurn:
    """An answer. prompt_tokens, completion_tokens: the usage reported to the client."""

    node: TreeNode
    message: CanonicalMessage
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int


class AgentSession:
    """A session, open until `end`. key: for requests; reward_key: for rewards. over: why it serves no more, "" while it does;
    limited: whether a limit of the recipe ended it. rewards: those the agent posted, as (moment, reward). refused: why a reward
    was refused. failure: the exception that the policy raised. idle_since: when the last request was done (time.monotonic),
    None while one is in progress."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, rendering: Rendering, policy: Policy) -> None:
        self.key, self.reward_key = secrets.token_hex(16), secrets.token_hex(16)
        self.tree, self.known = SessionTree(), ReadMessages()
        self.over, self.limited = "", False
        self.rewards: list[tuple[int, float]] = []
        self.refused = ""
        self.failure: BaseException | None = None
        self.began = time.monotonic()
        self.idle_since: float | None = self.began
        self._settings, self._length = recipe.agent, recipe.length
        self._tokenizer, self._rendering, self._policy = tokenizer, rendering, policy
        self._asked: dict[bytes, list[PendingTurn]] = {}
        self._working, self._paths, self._alone, self._asked_last = 0, 0, 0.0, 0
        self._room, self._lent, self._returned = recipe.agent.trained_tokens, 0, asyncio.Event()

    def begin(self, request: AgentRequest, body: bytes, retried: bool, is_open: Callable[[], bool]) -> PendingTurn:
        """Return the generation that answers this request. body: its digest; retried: the client marked it as a retry. Parallel
        sub-agents may send the same request, so while the first one's client waits, the second is not a retry."""
        self.check()
        before = self._asked.setdefault(body, [])
        left = [g for g in before if g.abandoned and not g.done.cancelled()]
        if again := left[-1:] or (before[-1:] if retried else []):
            again[0].clients.append(is_open)
            return again[0]
        if sum(map(len, self._asked.values())) >= self._settings.requests:
            raise self._ended(f"agent.requests={self._settings.requests} were served")
        self._asked_last = self.tree.moment()
        generation = PendingTurn(self._asked_last, clients=[is_open])
        generation.done = asyncio.create_task(self._generate(request, generation))
        before.append(generation)
        return generation

    def post(self, reward: float) -> None:
        """Accept a reward. If several come without a request in between, the last one counts."""
        if self.rewards and self.rewards[-1][0] > self._asked_last:
            self.rewards.pop()
        self.rewards.append((self.tree.moment(), reward))

    @property
    def reward(self) -> float | None:
        """The session's reward: the last one posted. With `agent.credit: turn`, None unless it came after the last request."""
        if not self.rewards or (self._settings.credit == "turn" and self.rewards[-1][0] < self._asked_last):
            return None
        return self.rewards[-1][1]

    def check(self) -> None:
        """Raise WireError if the session is over."""
        if self.over:
            raise WireError(400, f"the session is over: {self.over}", "session_over")

    def end(self, why: str, limited: bool = False) -> None:
        """End the session: cancel the requests in progress and refuse further ones."""
        if not self.over:
            self.over, self.limited = why, limited
            for generation in itertools.chain(*self._asked.values()):
                generation.done.cancel()

    def rollout(self) -> AgentRollout:
        """Return the tokens to train on, and the text to grade if there is no `reward`: the last message the agent received."""
        final = self.reward
        if self._settings.credit == "turn":
            self.tree.credit(self.rewards[:-1] if final is not None else self.rewards)
        segments, paths = self.tree.paths()
        served = [node for node in self.tree.nodes if node.delivered >= 0]
        last = max(served, key=lambda node: node.delivered, default=None)
        calls = sum(len(node.served.calls) for node in served)
        episode = Episode(
            turns=len(served), calls=calls, errors=0, seconds=self._alone, limited=self.limited,
            untrained=self.tree.untrained_tokens(),
        )  # fmt: skip
        text = "" if last is None else self._text(last.segments, last.stopped)
        truncated = last is not None and not last.stopped and not self._ended_itself(last.segments)
        verdict = None if final is None else Verdict(final)
        return AgentRollout(segments, paths, text, "length" if self.limited else "stop", verdict, episode, truncated)

    async def prompt_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens that the policy would be sent for the request."""
        parent, _, put = await self._placed(request)
        return len(put) + (0 if parent is None else len(parent.tokens))

    async def _generate(self, request: AgentRequest, generation: PendingTurn) -> ServedTurn:
        self._working += 1
        if self.idle_since is not None:
            self._alone += time.monotonic() - self.idle_since
        self.idle_since = None
        try:
            return await self._served(request, generation)
        finally:
            generation.placed.set()
            self._working -= 1
            self.idle_since = None if self._working else time.monotonic()

    async def _served(self, request: AgentRequest, generation: PendingTurn) -> ServedTurn:
        parent, key, put = await self._placed(request)
        before = np.concatenate([int32(()) if parent is None else parent.tokens, put])
        while self._room <= 0 < self._lent:  # parallel requests may not use all the tokens they were allotted
            self._returned.clear()
            await self._returned.wait()
        limit = self._allowed(request, len(before), parent is None or bool(parent.children))
        generation.node = node = self.tree.add(parent, put, request, key, generation.asked)
        generation.placed.set()
        self._room, self._lent = self._room - limit, self._lent + limit
        try:
            turn = await self._policy(before, limit, len(before) - len(put))
        except Exception as error:  # no server could answer; TaskAgents.session raises this error again
            self.failure = error
            raise self._ended(f"the policy cannot be asked: {error}", limited=False) from None
        segments, node.stopped = self._stopped(turn, request.stop)
        self._room, self._lent = self._room + limit - sum(len(s.tokens) for s in segments), self._lent - limit
        self._returned.set()
        text, cut = self._text(segments, node.stopped), bool(node.stopped) or not turn.ended
        form, prompt = self._rendering.calls if request.tools else None, self._tokenizer.decode(before[-8:]).rstrip()
        served = read_turn(text, form, self._length.end_of_thinking, node.number, request.tools, cut, prompt)
        self.tree.answer(node, segments, served)
        finish: Literal["stop", "length", "tool_calls"] = "stop" if turn.ended or node.stopped else "length"
        return ServedTurn(node, served, "tool_calls" if served.calls else finish, len(before), len(node.sampled))

    async def _placed(self, request: AgentRequest) -> tuple[TreeNode | None, "hashlib._Hash", np.ndarray]:
        """Return the node that the request continues (None: a new root), the request's hash, and the tokens to append."""
        parent, key = self.tree.find(request)
        if parent is not None:
            put = self._rendering.tail(parent, request)
            if put is not None:
                return parent, key, put
        # 200,000 tokens take half a second, too long for the event loop.
        return None, key, await asyncio.to_thread(self._rendering.whole, request)

    def _allowed(self, request: AgentRequest, before: int, branches: bool) -> int:
        """Return how many tokens may be sampled after a prompt of `before` tokens. branches: whether a new path begins.
        WireError if there is no room for any, or if `agent.paths` is exceeded."""
        settings, context = self._settings, self._length.context_tokens
        self._paths += branches
        if self._paths > settings.paths:
            raise self._ended(f"agent.paths={settings.paths} conversations were begun")
        if self._room <= 0:
            raise self._ended(f"the policy has written agent.trained_tokens={settings.trained_tokens}")
        if before > (most := context - KEPT_FROM_INPUT - 1):
            raise ContextFull(before, most)
        longest = self._length.completion_tokens if request.max_tokens is None else request.max_tokens
        return min(longest, self._length.completion_tokens, context - before, self._room)

    def _ended(self, why: str, limited: bool = True) -> WireError:
        """End the session; return the error for the request during which it ended."""
        self.end(why, limited)
        return WireError(400, f"the session is over: {why}", "session_over")

    def _stopped(self, turn: PolicyTurn, stops: tuple[str, ...]) -> tuple[tuple[Segment, ...], str]:
        """Return the turn up to the token that completes the first stop text in it, and that text ("" if it has none)."""
        tokens = tokens_of(turn.segments)

        def found(count: int) -> str:
            text = self._tokenizer.continued(tokens[:count])
            return min((stop for stop in stops if stop in text), key=text.index, default="")

        if not stops or not found(len(tokens)):
            return turn.segments, ""
        count = 1 + bisect_left(range(1, len(tokens) + 1), True, key=lambda n: bool(found(n)))
        kept, left = list[Segment](), count
        for s in turn.segments:
            if left:
                kept.append(structs.replace(s, tokens=s.tokens[:left], logprobs=s.logprobs[:left]))
            left = max(0, left - len(s.tokens))
        return tuple(kept), found(count)

    def _ended_itself(self, segments: tuple[Segment, ...]) -> bool:
        """Return whether the last token is an end token."""
        tokens = tokens_of(segments)
        return len(tokens) > 0 and int(tokens[-1]) in self._tokenizer.ends

    def _text(self, segments: tuple[Segment, ...], stopped: str) -> str:
        """Return the sampled text, without the end token, up to the stop text that ended it."""
        tokens = tokens_of(segments)
        if self._ended_itself(segments):
            tokens = tokens[:-1]
        text = self._tokenizer.continued(tokens)
        return text.partition(stopped)[0] if stopped else text
