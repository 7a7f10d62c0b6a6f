"""One session: an agent, its key, its tree, its limits, and which client waits for
which answer.

    resume(digest) ─► the PendingTurn of the same body, if its client has gone, or if this one is marked as a retry
    begin(request) ─► PendingTurn ─► tree.find ─► rendering ─► policy ─► tree.answer ─► done
       └ a limit was reached, or the session is over: 400

    a limit on requests, paths or tokens ─► close: no new requests; those in progress are answered, if they keep the limits
    time, the agent's end, the run's ─────► end: those in progress get 400, too

A generation continues after its client has gone, since the client may come back; an
answer that nobody collects is not trained.
"""

import asyncio
import hashlib
import itertools
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from msgspec import structs

from megarl.core.base.contracts import AgentRollout, Policy, PolicyTurn, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Episode, Segment, int32
from megarl.core.recipe import Recipe
from megarl.tasks.agents.bounds import ByteBudget, RequestBounds
from megarl.tasks.agents.calls import read_turn
from megarl.tasks.agents.errors import ContextFull, WireError, session_over
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ReadMessages
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.agents.tree import SessionTree, TreeNode, tokens_of

LONG_TAIL = 20_000
"""Characters. A longer tail is rendered in a thread, because the event loop would stand
still for tens of milliseconds.
"""


@dataclass(eq=False)
class PendingTurn:
    """A request in progress.

    asked: when it came, by the tree's clock. rendered: set once its prompt is known;
    placed: once the prompt is allowed, too; both if it has failed or been cancelled.
    clients: one function per client, which returns whether its connection is still
    open.
    """

    asked: int
    rendered: asyncio.Event = field(default_factory=asyncio.Event)
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Callable[[], bool]] = field(default_factory=list)
    node: TreeNode | None = None
    done: "asyncio.Task[ServedTurn]" = field(init=False)

    @property
    def abandoned(self) -> bool:
        """Return whether no client has received the answer or is still waiting for it."""
        delivered = self.node is not None and self.node.delivered >= 0
        return not delivered and not any(is_open() for is_open in self.clients)

    @property
    def failed(self) -> bool:
        """Return whether there will be no answer."""
        return self.done.done() and (self.done.cancelled() or self.done.exception() is not None)


@dataclass(frozen=True)
class ServedTurn:
    """An answer. prompt_tokens, completion_tokens: the usage reported to the client."""

    node: TreeNode
    message: CanonicalMessage
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int


class AgentSession:
    """A session, open until `close` or `end`.

    key: for requests; reward_key: for rewards. over: why it accepts no more requests,
    "" while it does; limited: whether a limit of the recipe ended it. rewards: those
    the agent posted, as (moment, reward); refused: why the last one was refused, "" if
    it was not. failure: the exception that the policy raised. idle_since: when the last
    request was done (time.monotonic), None while one is in progress. bounds, budget: of
    its requests' bodies.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, rendering: Rendering, policy: Policy
    ) -> None:
        self.key, self.reward_key = secrets.token_hex(16), secrets.token_hex(16)
        self.bounds = RequestBounds.of(recipe.length)
        self.budget = ByteBudget(2 * self.bounds.body_bytes)
        self.tree, self.known = SessionTree(), ReadMessages(self.bounds)
        self.over = ""
        self.limited = False
        self.rewards: list[tuple[int, float]] = []
        self.refused = ""
        self.failure: BaseException | None = None
        self.began = time.monotonic()
        self.idle_since: float | None = self.began
        self._settings = recipe.agent
        self._length = recipe.length
        self._tokenizer = tokenizer
        self._rendering = rendering
        self._policy = policy
        self._asked: dict[bytes, list[PendingTurn]] = {}
        self._requests = 0
        self._working = 0
        self._paths = 0
        self._alone = 0.0
        self._asked_last = 0
        self._room, self._lent, self._returned = recipe.agent.trained_tokens, 0, asyncio.Event()

    def resume(self, body: bytes, retried: bool, is_open: Callable[[], bool]) -> PendingTurn | None:
        """Return the generation whose answer this request wants, None if it is a new
        request. body: its digest; retried: the client marked it as a retry. Parallel
        sub-agents may send the same request, so while the first one's client waits, the
        second is not a retry.
        """
        before = [turn for turn in self._asked.get(body, ()) if not turn.failed]
        left = [turn for turn in before if turn.abandoned]
        again = left[-1:] or (before[-1:] if retried else [])
        if not again:
            return None
        again[0].clients.append(is_open)
        return again[0]

    def begin(self, request: AgentRequest, body: bytes, is_open: Callable[[], bool]) -> PendingTurn:
        """Start to answer a request. WireError if the session accepts no more."""
        self.check()
        if self._requests >= self._settings.requests:
            raise self._closed(f"agent.requests={self._settings.requests} were served")
        self._requests += 1
        self._asked_last = self.tree.moment()
        generation = PendingTurn(self._asked_last, clients=[is_open])
        generation.done = asyncio.create_task(self._generate(request, generation))
        generation.done.add_done_callback(partial(self._settled, body, generation))
        self._asked.setdefault(body, []).append(generation)
        return generation

    def _settled(
        self, body: bytes, generation: PendingTurn, _done: "asyncio.Task[ServedTurn]"
    ) -> None:
        """Let its clients go on, also if it was cancelled before it began. A failure is
        not kept: it would keep the request.
        """
        generation.rendered.set()
        generation.placed.set()
        if generation.failed:
            self._asked[body].remove(generation)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the block's time as time in which the agent waits for us."""
        self._working += 1
        if self.idle_since is not None:
            self._alone += time.monotonic() - self.idle_since
        self.idle_since = None
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self.idle_since = time.monotonic()

    def post(self, reward: float) -> None:
        """Accept a reward. If several come without a request in between, the last one
        counts.
        """
        if self.rewards and self.rewards[-1][0] > self._asked_last:
            self.rewards.pop()
        self.rewards.append((self.tree.moment(), reward))
        self.refused = ""

    @property
    def reward(self) -> float | None:
        """The session's reward: the last one posted. With `agent.credit: turn`, None
        unless it came after the last request.
        """
        if not self.rewards or (
            self._settings.credit == "turn" and self.rewards[-1][0] < self._asked_last
        ):
            return None
        return self.rewards[-1][1]

    def check(self) -> None:
        """Raise WireError if the session accepts no more requests."""
        if self.over:
            raise session_over(self.over)

    def close(self, why: str) -> None:
        """Accept no more requests, because a limit was reached. Those in progress are
        answered.
        """
        if not self.over:
            self.over = why
            self.limited = True

    @property
    def answering(self) -> bool:
        """Return whether a request is in progress."""
        return any(not turn.done.done() for turn in itertools.chain(*self._asked.values()))

    def end(self, why: str, limited: bool = False) -> None:
        """Accept no more requests, and cancel those in progress: their clients get 400."""
        if not self.over:
            self.over = why
            self.limited = limited
        for generation in itertools.chain(*self._asked.values()):
            generation.done.cancel()

    def rollout(self) -> AgentRollout:
        """Return the tokens to train on, and the text to grade if there is no `reward`:
        the last message the agent received.
        """
        final = self.reward
        if self._settings.credit == "turn":
            self.tree.credit(self.rewards[:-1] if final is not None else self.rewards)
        segments, paths = self.tree.paths()
        served = [node for node in self.tree.nodes if node.delivered >= 0]
        last = max(served, key=lambda node: node.delivered, default=None)
        calls = sum(len(node.served.calls) for node in served)
        episode = Episode(
            turns=len(served),
            calls=calls,
            errors=0,
            seconds=self._alone,
            limited=self.limited,
            untrained=self.tree.untrained_tokens(),
        )
        text = "" if last is None else self._text(last.segments, last.stopped)
        truncated = last is not None and not last.stopped and not self._ended_itself(last.segments)
        verdict = None if final is None else Verdict(final)
        return AgentRollout(
            segments, paths, text, "length" if self.limited else "stop", verdict, episode, truncated
        )

    async def prompt_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens that the policy would be sent for the request. Of
        one that is much too long they are counted until that is clear.
        """
        try:
            parent, _, put = await self._placed(request)
        except ContextFull as full:
            return full.tokens
        return len(put) + (0 if parent is None else len(parent.tokens))

    async def _generate(self, request: AgentRequest, generation: PendingTurn) -> ServedTurn:
        with self.busy():
            return await self._served(request, generation)

    async def _served(self, request: AgentRequest, generation: PendingTurn) -> ServedTurn:
        parent, key, put = await self._placed(request)
        generation.rendered.set()
        before = np.concatenate([int32(()) if parent is None else parent.tokens, put])
        while (
            self._room <= 0 < self._lent
        ):  # parallel requests may not use all the tokens they were allotted
            self._returned.clear()
            await self._returned.wait()
        limit = self._allowed(request, len(before), parent is None or bool(parent.children))
        generation.node = node = self.tree.add(parent, put, request, key, generation.asked)
        generation.placed.set()
        turn, node.stopped = await self._sampled(
            before, limit, len(before) - len(put), request.stop
        )
        text = self._text(turn.segments, node.stopped)
        cut = bool(node.stopped) or not turn.ended
        form = self._rendering.calls if request.tools else None
        prompt = self._tokenizer.decode(before[-8:]).rstrip()
        served = read_turn(
            text, form, self._length.end_of_thinking, node.number, request.tools, cut, prompt
        )
        self.tree.answer(node, turn.segments, served)
        finish: Literal["stop", "length", "tool_calls"] = (
            "stop" if turn.ended or node.stopped else "length"
        )
        return ServedTurn(
            node, served, "tool_calls" if served.calls else finish, len(before), len(node.sampled)
        )

    async def _sampled(
        self, before: np.ndarray, limit: int, kept: int, stops: tuple[str, ...]
    ) -> tuple[PolicyTurn, str]:
        """Return the policy's turn after these tokens [n], and the stop text that ended
        it, or "". The session lends it `limit` tokens, and gets back what is left.
        """
        self._room -= limit
        self._lent += limit
        written = 0
        try:
            turn = await self._policy(before, limit, kept)
            segments, stopped = self._stopped(turn, stops)
            written = sum(len(s.tokens) for s in segments)
            return PolicyTurn(segments, turn.ended), stopped
        except (
            Exception
        ) as error:  # no server could answer; TaskAgents.session raises this error again
            self.failure = error
            why = f"the policy cannot be asked: {error}"
            self.end(why)
            raise session_over(why) from None
        finally:
            self._room += limit - written
            self._lent -= limit
            self._returned.set()

    async def _placed(
        self, request: AgentRequest
    ) -> tuple[TreeNode | None, "hashlib._Hash", np.ndarray]:
        """Return the node that the request continues (None: a new root), the request's
        hash, and the tokens to append.
        """
        longest = self.bounds.prompt_tokens
        try:
            parent, key = self.tree.find(request)
            if parent is not None:
                tail = partial(self._rendering.tail, parent, request, longest)
                added = request.messages[len(parent.history) + 1 :]
                is_long = sum(len(message.text) for message in added) > LONG_TAIL
                put = await asyncio.to_thread(tail) if is_long else tail()
                if put is not None:
                    return parent, key, put
            # 200,000 tokens take half a second, too long for the event loop.
            return None, key, await asyncio.to_thread(self._rendering.whole, request, longest)
        except RecursionError:
            raise WireError(400, "messages, tools: the JSON is nested too deeply") from None
        except MegarlError as error:  # the tokenizer lacks a character
            raise WireError(400, f"messages: {error}") from None

    def _allowed(self, request: AgentRequest, before: int, branches: bool) -> int:
        """Return how many tokens may be sampled after a prompt of `before` tokens.
        branches: whether a new path begins. WireError if there is no room for any, or
        if `agent.paths` is exceeded.
        """
        settings = self._settings
        if before > self.bounds.prompt_tokens:
            raise ContextFull(before, self.bounds.prompt_tokens)
        if branches and self._paths >= settings.paths:
            raise self._closed(f"agent.paths={settings.paths} conversations were begun")
        if self._room <= 0:
            raise self._closed(
                f"the policy has written agent.trained_tokens={settings.trained_tokens}"
            )
        self._paths += branches
        longest = (
            self._length.completion_tokens if request.max_tokens is None else request.max_tokens
        )
        return min(
            longest,
            self._length.completion_tokens,
            self._length.context_tokens - before,
            self._room,
        )

    def _closed(self, why: str) -> WireError:
        """Close the session; return the error for the request that reached the limit."""
        self.close(why)
        return session_over(why)

    def _stopped(self, turn: PolicyTurn, stops: tuple[str, ...]) -> tuple[tuple[Segment, ...], str]:
        """Return the turn up to the token that completes the first stop text in it, and
        that text ("" if it has none).
        """
        tokens = tokens_of(turn.segments)

        def found(count: int) -> str:
            text = self._tokenizer.continued(tokens[:count])
            return min((stop for stop in stops if stop in text), key=text.index, default="")

        if not stops or not found(len(tokens)):
            return turn.segments, ""
        count = 1 + bisect_left(range(1, len(tokens) + 1), True, key=lambda n: bool(found(n)))
        kept = list[Segment]()
        left = count
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
        """Return the sampled text, without the end token, up to the stop text that
        ended it.
        """
        tokens = tokens_of(segments)
        if self._ended_itself(segments):
            tokens = tokens[:-1]
        text = self._tokenizer.continued(tokens)
        return text.partition(stopped)[0] if stopped else text
