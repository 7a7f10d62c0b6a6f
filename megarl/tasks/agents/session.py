"""One session: an agent, its key, its tree, its limits, and which client waits for
which answer.

    resume(digest) ─► the PendingTurn of the same body, if its client has gone, or if
                      this one is marked as a retry
    start(request) ─► PendingTurn ─► tree.find ─► rendering ─► policy ─► tree.answer
       └ a limit was reached, or the session is over: 400

    a limit on requests, paths or tokens ─► close: no new requests; those in progress
                                            are answered, if they keep the limits
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
from typing import Literal, NamedTuple

import numpy as np
from msgspec import structs

from megarl.core.base.contracts import AgentRollout, Policy, PolicyTurn, TurnRequest, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Episode, FinishReason, Segment
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

type TurnFinish = Literal["stop", "length", "tool_calls"]


@dataclass(eq=False)
class PendingTurn:
    """A request in progress.

    asked_at: when it came, by the tree's clock. rendered: set once its prompt is known;
    placed: once the prompt is allowed, too; both if it has failed or been cancelled.
    clients: one function per client, which returns whether its connection is still
    open.
    """

    asked_at: int
    rendered: asyncio.Event = field(default_factory=asyncio.Event)
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Callable[[], bool]] = field(default_factory=list)
    node: TreeNode | None = None
    done: "asyncio.Task[ServedTurn]" = field(init=False)

    @property
    def abandoned(self) -> bool:
        """Whether no client has received the answer or is still waiting for it."""
        is_delivered = self.node is not None and self.node.delivered >= 0
        return not is_delivered and not any(is_open() for is_open in self.clients)

    @property
    def failed(self) -> bool:
        """Whether there will be no answer."""
        return self.done.done() and (self.done.cancelled() or self.done.exception() is not None)


@dataclass(frozen=True)
class ServedTurn:
    """An answer. prompt_tokens, completion_tokens: the usage reported to the client."""

    node: TreeNode
    message: CanonicalMessage
    finish: TurnFinish
    prompt_tokens: int
    completion_tokens: int


class Placement(NamedTuple):
    """Where a request belongs in the tree. parent: the node that it continues (None: a
    new root); key: the request's hash; suffix [n] int32: the tokens to append.
    """

    parent: TreeNode | None
    key: "hashlib._Hash"
    suffix: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        """The tokens that the policy is sent, [n] int32."""
        if self.parent is None:
            return self.suffix
        return np.concatenate([self.parent.tokens, self.suffix])

    def turn_request(self, prompt: np.ndarray, limit: int) -> TurnRequest:
        """Return what to ask the policy for: at most `limit` tokens after `prompt`, the
        tokens of this placement.
        """
        routed = 0
        if self.parent is not None:
            routed = self.parent.line_routed
        return TurnRequest(prompt, limit, len(prompt) - len(self.suffix), routed)

    @property
    def is_new_path(self) -> bool:
        """Whether the answer begins a path that the tree does not have yet."""
        return self.parent is None or bool(self.parent.children)


class AgentSession:
    """A session, open until `close` or `end`.

    key: for requests; reward_key: for rewards. over: why it accepts no more requests,
    "" while it does; limited: whether a limit of the recipe ended it. rewards: those
    the agent posted, as (moment, reward); refused: why the last one was refused, "" if
    it was not. failure: the exception that the policy raised. idle_since: when the last
    request was done (time.monotonic), None while one is in progress. bounds, budget: of
    its requests' bodies; message_cache: of the messages in them.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, rendering: Rendering, policy: Policy
    ) -> None:
        self.key = secrets.token_hex(16)
        self.reward_key = secrets.token_hex(16)
        self.bounds = RequestBounds.of(recipe.length)
        self.budget = ByteBudget(2 * self.bounds.body_bytes)
        self.tree = SessionTree()
        self.message_cache = ReadMessages(self.bounds)
        self.over = ""
        self.limited = False
        self.rewards: list[tuple[int, float]] = []
        self.refused = ""
        self.failure: BaseException | None = None
        self.began = time.monotonic()
        self.idle_since: float | None = self.began
        self.asks_for_forms = recipe.agent.forms == "ask"
        self._settings = recipe.agent
        self._length = recipe.length
        self._tokenizer = tokenizer
        self._rendering = rendering
        self._policy = policy
        self._turns: dict[bytes, list[PendingTurn]] = {}  # by the digest of their body
        self._requests = 0
        self._working = 0  # blocks of `busy` that run
        self._paths = 0
        self._idle_seconds = 0.0
        self._last_asked_at = 0
        self._room = recipe.agent.trained_tokens  # tokens that may still be allotted
        self._lent = 0  # allotted to requests in progress, which may not use them all
        self._returned = asyncio.Event()  # set when a request gives its tokens back

    def resume(self, body: bytes, retried: bool, is_open: Callable[[], bool]) -> PendingTurn | None:
        """Return the generation whose answer this request wants, None if it is a new
        request. body: its digest; retried: the client marked it as a retry. Parallel
        sub-agents may send the same request, so while the first one's client waits, the
        second is not a retry.
        """
        candidates = [turn for turn in self._turns.get(body, ()) if not turn.failed]
        abandoned = [turn for turn in candidates if turn.abandoned]
        if abandoned:
            turn = abandoned[-1]
        elif candidates and retried:
            turn = candidates[-1]
        else:
            return None
        turn.clients.append(is_open)
        return turn

    def start(self, request: AgentRequest, body: bytes, is_open: Callable[[], bool]) -> PendingTurn:
        """Start to answer a request. WireError if the session accepts no more."""
        self.check()
        if self._requests >= self._settings.requests:
            raise self._closed(f"agent.requests={self._settings.requests} were served")
        self._requests += 1
        self._last_asked_at = self.tree.moment()
        pending = PendingTurn(self._last_asked_at, clients=[is_open])
        pending.done = asyncio.create_task(self._generate(request, pending))
        pending.done.add_done_callback(partial(self._settled, body, pending))
        self._turns.setdefault(body, []).append(pending)
        return pending

    def _settled(
        self, body: bytes, pending: PendingTurn, _done: "asyncio.Task[ServedTurn]"
    ) -> None:
        """Note that a request is done: its clients go on, also if it was cancelled
        before it began. A failed one is forgotten, so that a retry is a new request.
        body: its body's digest.
        """
        pending.rendered.set()
        pending.placed.set()
        if pending.failed:
            self._turns[body].remove(pending)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the block's time as time in which the agent waits for us. Only when no
        such block runs is the agent idle, as seen from here: it works by itself.
        """
        self._working += 1
        if self.idle_since is not None:
            self._idle_seconds += time.monotonic() - self.idle_since
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
        if self.rewards and self.rewards[-1][0] > self._last_asked_at:
            self.rewards.pop()
        self.rewards.append((self.tree.moment(), reward))
        self.refused = ""

    @property
    def reward(self) -> float | None:
        """The session's reward: the last one posted. With `agent.credit: turn`, None
        unless it came after the last request.
        """
        if not self.rewards:
            return None
        moment, reward = self.rewards[-1]
        if self._settings.credit == "turn" and moment < self._last_asked_at:
            return None
        return reward

    def check(self) -> None:
        """Raise WireError if the session accepts no more requests."""
        if self.over:
            raise session_over(self.over)

    def close(self, reason: str) -> None:
        """Accept no more requests, because a limit was reached. Those in progress are
        answered.
        """
        if not self.over:
            self.over = reason
            self.limited = True

    @property
    def answering(self) -> bool:
        """Whether a request is in progress."""
        return any(not turn.done.done() for turn in self._all_turns())

    def end(self, reason: str, limited: bool = False) -> None:
        """Accept no more requests, and cancel those in progress: their clients get
        400.
        """
        if not self.over:
            self.over = reason
            self.limited = limited
        for turn in self._all_turns():
            turn.done.cancel()

    def _all_turns(self) -> Iterator[PendingTurn]:
        return itertools.chain.from_iterable(self._turns.values())

    def rollout(self) -> AgentRollout:
        """Return the tokens to train on, and the text to grade if there is no `reward`:
        the last message the agent received.
        """
        reward = self.reward
        if self._settings.credit == "turn":
            earlier_rewards = self.rewards if reward is None else self.rewards[:-1]
            self.tree.credit(earlier_rewards)
        segments, paths, experts = self.tree.paths()
        delivered = [node for node in self.tree.nodes if node.delivered >= 0]
        episode = Episode(
            turns=len(delivered),
            calls=sum(len(node.answer.calls) for node in delivered),
            errors=0,
            seconds=self._idle_seconds,
            limited=self.limited,
            untrained=self.tree.untrained_tokens(),
        )
        text = ""
        truncated = False
        if delivered:
            last = max(delivered, key=lambda node: node.delivered)
            text = self._text(last.segments, last.stopped)
            truncated = not last.stopped and not self._ended_itself(last.segments)
        verdict = None if reward is None else Verdict(reward)
        finish: FinishReason = "length" if self.limited else "stop"
        return AgentRollout(segments, paths, text, finish, verdict, episode, truncated, experts)

    async def prompt_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens that the policy would be sent for the request. Of
        one that is much too long they are counted until that is clear.
        """
        try:
            placement = await self._placed(request)
        except ContextFull as full:
            return full.tokens
        return len(placement.prompt)

    async def _generate(self, request: AgentRequest, pending: PendingTurn) -> ServedTurn:
        """Place a request in the tree, have the policy answer it, and return the
        answer. pending: gets the node, and word when the prompt is rendered and placed.
        WireError if the request is refused, or the policy cannot be asked.
        """
        with self.busy():
            placement = await self._placed(request)
            pending.rendered.set()
            prompt = placement.prompt
            # No tokens are left, but parallel requests may give some back.
            while self._room <= 0 and self._lent > 0:
                self._returned.clear()
                await self._returned.wait()
            limit = self._allowed(request, len(prompt), placement.is_new_path)
            node = self.tree.add(
                placement.parent, placement.suffix, request, placement.key, pending.asked_at
            )
            pending.node = node
            pending.placed.set()
            turn_request = placement.turn_request(prompt, limit)
            turn, node.stopped = await self._sampled(turn_request, request.stop)
            answer = self._answered(request, prompt, node, turn)
            if turn.experts is not None:
                self.tree.note_experts(node, turn_request.routed, turn.experts)
            return answer

    def _answered(
        self, request: AgentRequest, prompt: np.ndarray, node: TreeNode, turn: PolicyTurn
    ) -> ServedTurn:
        """Read the policy's turn after this prompt [n], and record it in its node."""
        message = read_turn(
            self._text(turn.segments, node.stopped),
            self._rendering.calls if request.tools else None,
            self._length.end_of_thinking,
            node.number,
            request.tools,
            cut=bool(node.stopped) or not turn.ended,
            # its end, which tells whether the template has opened the thinking
            prompt=self._tokenizer.decode(prompt[-8:]).rstrip(),
        )
        self.tree.answer(node, turn.segments, message)
        finish: TurnFinish = "length"
        if message.calls:
            finish = "tool_calls"
        elif turn.ended or node.stopped:
            finish = "stop"
        return ServedTurn(node, message, finish, len(prompt), len(node.sampled))

    async def _sampled(
        self, request: TurnRequest, stops: tuple[str, ...]
    ) -> tuple[PolicyTurn, str]:
        """Return the policy's turn, and the stop text that ended it, or "". The session
        lends the turn `request.limit` tokens, and gets back those that it does not use.
        """
        self._room -= request.limit
        self._lent += request.limit
        written = 0
        try:
            turn = await self._policy(request)
            segments, stopped = self._stopped(turn, stops)
            written = sum(len(s.tokens) for s in segments)
            return turn._replace(segments=segments), stopped
        except Exception as error:
            # no server could answer; TaskAgents.run_session raises this error again
            self.failure = error
            reason = f"the policy cannot be asked: {error}"
            self.end(reason)
            raise session_over(reason) from None
        finally:
            self._room += request.limit - written
            self._lent -= request.limit
            self._returned.set()

    async def _placed(self, request: AgentRequest) -> Placement:
        """Find where the request belongs in the tree, and render it: its tail, or all
        of it. WireError if it cannot be rendered, ContextFull if it is much too long.
        """
        longest = self.bounds.prompt_tokens
        try:
            parent, key = self.tree.find(request)
            if parent is not None:
                suffix = await self._tail(parent, request)
                if suffix is not None:
                    return Placement(parent, key, suffix)
            # 200,000 tokens take half a second, too long for the event loop.
            prompt = await asyncio.to_thread(self._rendering.full_prompt, request, longest)
            return Placement(None, key, prompt)
        except RecursionError:
            raise WireError(400, "messages, tools: the JSON is nested too deeply") from None
        except MegarlError as error:  # the tokenizer lacks a character
            raise WireError(400, f"messages: {error}") from None

    async def _tail(self, parent: TreeNode, request: AgentRequest) -> np.ndarray | None:
        """Return the tokens to append to the parent's; None if the request has to be
        rendered whole.
        """
        longest = self.bounds.prompt_tokens
        messages = request.messages[len(parent.conversation) :]
        if sum(len(message.text) for message in messages) > LONG_TAIL:
            return await asyncio.to_thread(self._rendering.tail, parent, request, longest)
        return self._rendering.tail(parent, request, longest)

    def _allowed(self, request: AgentRequest, prompt_tokens: int, is_new_path: bool) -> int:
        """Return how many tokens may be sampled after a prompt of this length.
        WireError if there is no room for any, or if `agent.paths` is exceeded.
        """
        settings = self._settings
        if prompt_tokens > self.bounds.prompt_tokens:
            raise ContextFull(prompt_tokens, self.bounds.prompt_tokens)
        if is_new_path and self._paths >= settings.paths:
            raise self._closed(f"agent.paths={settings.paths} conversations were begun")
        if self._room <= 0:
            raise self._closed(
                f"the policy has written agent.trained_tokens={settings.trained_tokens}"
            )
        if is_new_path:
            self._paths += 1
        limits = [
            self._length.completion_tokens,
            self._length.context_tokens - prompt_tokens,
            self._room,
        ]
        if request.max_tokens is not None:
            limits.append(request.max_tokens)
        return min(limits)

    def _closed(self, reason: str) -> WireError:
        """Close the session; return the error for the request that reached the
        limit.
        """
        self.close(reason)
        return session_over(reason)

    def _stopped(self, turn: PolicyTurn, stops: tuple[str, ...]) -> tuple[tuple[Segment, ...], str]:
        """Return the turn up to the token that completes the first stop text in it, and
        that text ("" if it has none).
        """
        tokens = tokens_of(turn.segments)

        def first_stop(count: int) -> str:
            """Return the first stop text in so many of the tokens, or ""."""
            text = self._tokenizer.continued(tokens[:count])
            return min((stop for stop in stops if stop in text), key=text.index, default="")

        if not stops or not first_stop(len(tokens)):
            return turn.segments, ""
        # The first count of tokens in whose text a stop is: all larger ones have it,
        # too.
        counts = range(1, len(tokens) + 1)
        count = counts[bisect_left(counts, True, key=lambda count: bool(first_stop(count)))]
        return _shortened(turn.segments, count), first_stop(count)

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
        if stopped:
            return text.partition(stopped)[0]
        return text


def _shortened(segments: tuple[Segment, ...], count: int) -> tuple[Segment, ...]:
    """Return the segments' first `count` tokens."""
    shortened: list[Segment] = []
    for segment in segments:
        if count <= 0:
            break
        shortened.append(
            structs.replace(
                segment, tokens=segment.tokens[:count], logprobs=segment.logprobs[:count]
            )
        )
        count -= len(segment.tokens)
    return tuple(shortened)
