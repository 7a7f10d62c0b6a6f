"""One rollout from its prompt to its last token, over as many requests and servers as
it takes.

    turns ─► (interruption phrase) ─► answer leg
      │
      └ one turn; with an environment: leg ─► its reply, masked ─► leg ─► …
                                       until it is done or a limit is reached
        each leg: take a place ─► generate ─► done
                       ▲             │ server lost: the tokens received are kept,
                       └─────────────┘              the rest is requested elsewhere

The answer leg has `answer_tokens` or, unless length.control is interruption, what is
left of a common budget (length_control.py).

A task with an agent works differently: the agent asks for turns, each of which is one
leg (`_session`).

Every request goes to a server that is eligible at that moment (places.py). An
environment's replies count in the budget before the answer, so no rollout is longer
than one of a single turn may be. An episode that reaches a limit continues with the
answer leg, without its environment. But nothing can follow an end token: a
rollout that reached its limit there ends truncated, without an answer leg.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import structs

from megarl.core.base.architecture import Architecture, in_directory
from megarl.core.base.contracts import (
    AgentDown,
    Agents,
    EnvironmentDown,
    Environments,
    GraderDown,
    PlayedEnvironment,
    PolicyTurn,
    TurnRequest,
    Verdict,
)
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Branch, Episode, FinishReason, Prompt, Segment
from megarl.core.client.client import ServerClient, ServerLost, ServerRefused
from megarl.core.recipe import Recipe
from megarl.core.sampling import length_control
from megarl.core.sampling.places import Order, Places, Waits
from megarl.core.telemetry.spans import spans

MAX_RETRIES = 5
"""With more lost requests than this a rollout is void: it is unlikely that so many
servers died by chance.
"""


TRAINING = 1
"""The first of an `Order`; an evaluation has 0."""


class Void(Exception):
    """The rollout cannot be made; the text says why."""


@dataclass(frozen=True)
class Job:
    """What to sample."""

    prompt: Prompt
    order: Order
    # As Places.take; the sampler gives the place back.
    take: Callable[[], Awaitable[tuple[int, int]]]
    salt: str  # only requests with the same salt share cached prefixes
    thinking_tokens: int  # limit on the part before the answer leg
    temperature: float
    top_p: float
    routed: Architecture | None = None  # record the experts of this model that the servers choose
    started: Callable[[], None] = lambda: None  # called when a request has a token, or has ended


@dataclass
class Completion:
    """The completion of a job, so far or final."""

    segments: list[Segment] = field(default_factory=list)
    finish: FinishReason = "length"
    interrupted: bool = False
    retries: int = 0
    cacheable: int = 0  # tokens of prompt and completion that the last server should have cached
    text: str = ""  # the last message, without its stop token
    truncated: bool = False  # a length limit cut the last message off
    routed: int = 0  # first tokens whose experts are known and not in `routing`
    routing: list[np.ndarray] = field(default_factory=list)  # tables of the requests so far
    # Tokens of the message in progress, without replies.
    message: list[np.ndarray] = field(default_factory=list)
    # Of the environment or agent; without one the task's grader judges the text.
    verdict: Verdict | None = None
    episode: Episode | None = None
    paths: tuple[Branch, ...] = ()
    # Why the environment or agent could not go on; the rollout then cannot be judged.
    down: GraderDown | None = None

    @property
    def tokens(self) -> np.ndarray:
        """[completion_len] int32"""
        parts = [segment.tokens for segment in self.segments]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    @property
    def message_tokens(self) -> np.ndarray:
        """The tokens of `message`, [n] int32; n is 0 if a reply left no room for
        another message.
        """
        return np.concatenate([np.zeros(0, np.int32), *self.message])

    @property
    def version(self) -> int:
        """Version of the last sampled token; inserted segments get the same."""
        return self.segments[-1].weight_version

    def write(self, segments: list[Segment]) -> None:
        """Append segments to the completion and to the message in progress."""
        self.segments += segments
        self.message += [s.tokens for s in segments]


class ServerPool(Protocol):
    """The servers that requests go to, and those among them that are lost."""

    @property
    def clients(self) -> Mapping[int, ServerClient]:
        """The client of each server, by its number."""

    @property
    def places(self) -> Places:
        """The places of all servers."""

    def life(self, server: int) -> int:
        """Return a number that changes when the server is lost or its requests are
        aborted.
        """

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """Note that a request to this life of the server failed."""


def routed_model(recipe: Recipe) -> Architecture | None:
    """Return the model whose chosen experts a run of this recipe records; None if it
    records none.
    """
    if not recipe.model.moe.routing_replay:
        return None
    model = in_directory(recipe.model.path)
    if not model.experts:
        raise MegarlError(
            f"model.moe.routing_replay: {recipe.model.path} has no experts; leave it out"
        )
    return model


class Sampler:
    """Samples rollouts of the policy on the servers."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        servers: ServerPool,
        environments: Environments,
        agents: Agents | None = None,
        positions: int = sys.maxsize,
    ) -> None:
        """positions: the most tokens of one sequence for which a server has room."""
        self._length = recipe.length
        self._tokenizer = tokenizer
        # The tokenizer has to know the phrase only if rollouts can be interrupted.
        phrase = ""
        if recipe.length.control == "interruption":
            phrase = recipe.length.interruption
        self._phrase = tokenizer.ids(phrase)
        self._ends = tokenizer.ends
        self.servers = servers
        self._environments = environments
        self._agents = agents
        self._longest = positions - KEPT_FROM_INPUT

    def has_agent(self, task: str) -> bool:
        """Return whether this task has an agent; then it is unknown when the first
        request of a rollout comes.
        """
        return self._agents is not None and self._agents.work(task)

    async def complete(self, job: Job) -> Completion:
        """Sample the whole rollout, or as much as its environment or agent allows
        (`down`). Raises Void.
        """
        if self._agents is not None and self._agents.work(job.prompt.task):
            return await self._session(job, self._agents)
        completion = Completion()
        environment = self._environments.of(job.prompt.task)
        if environment is None:
            await self._single_turn(job, completion)
        else:
            await self._episode(job, completion, environment)
        completion.segments = list(length_control.merge(completion.segments))
        message = completion.message_tokens
        has_end_token = len(message) > 0 and int(message[-1]) in self._ends
        has_ended = completion.finish == "stop" or has_end_token
        if has_ended:
            message = message[:-1]
        completion.text = self._tokenizer.continued(message)
        completion.truncated = not has_ended
        return completion

    async def _single_turn(self, job: Job, completion: Completion) -> None:
        """Sample one turn, and the answer leg if its end token did not come."""
        complete = await self._leg(job, completion, self._before_answer(job), self._ends)
        if not complete:
            await self._answer(job, completion)

    async def _episode(
        self, job: Job, completion: Completion, environment: PlayedEnvironment
    ) -> None:
        """Sample turns with an environment, which gives the verdict."""
        try:
            async with environment.played(job.prompt):
                complete = await self._turns(job, completion, environment)
                if not complete:
                    await self._answer(job, completion)
                completion.verdict = await environment.reward()
        except EnvironmentDown as down:
            completion.down = down

    async def _session(self, job: Job, agents: Agents) -> Completion:
        """Run a session of the task's agent, which asks for turns; each is one leg,
        without a thinking budget.
        """
        retries = 0
        waits = Waits()

        async def policy(request: TurnRequest) -> PolicyTurn:
            """Sample one turn of the session (contracts.Policy)."""
            nonlocal retries
            turn = Completion(cacheable=request.cached, routed=request.routed)
            prompt = structs.replace(job.prompt, tokens=request.tokens)
            turn_job = replace(job, prompt=prompt, take=partial(waits.measure, job.take))
            has_ended = await self._leg(turn_job, turn, request.limit, self._ends)
            retries += turn.retries
            experts = None
            if turn.routing:
                experts = np.concatenate(turn.routing)
            return PolicyTurn(length_control.merge(turn.segments), has_ended, experts)

        down = None
        try:
            rollout = await agents.run_session(job.prompt, job.order, policy, waits.seconds)
        except AgentDown as error:
            down = error
            rollout = error.rollout
        routing: list[np.ndarray] = []
        if rollout.experts is not None:
            routing = [rollout.experts]
        return Completion(
            segments=list(rollout.segments),
            paths=rollout.paths,
            routing=routing,
            finish=rollout.finish,
            retries=retries,
            text=rollout.text,
            truncated=rollout.truncated,
            verdict=rollout.verdict,
            episode=rollout.episode,
            down=down,
        )

    async def _turns(
        self, job: Job, completion: Completion, environment: PlayedEnvironment
    ) -> bool:
        """Sample turns and add the environment's replies. Return whether no answer leg
        can follow: the episode is done, or a limit was reached where the policy had
        ended its message. The environment's stop tokens end a turn, but no message.
        """
        budget = self._before_answer(job)
        stop_tokens = (*self._ends, *environment.stop_tokens)
        for turns in range(1, environment.turns + 1):
            turn_start = len(completion.tokens)
            message_has_ended = False
            turn_limit_reached = False
            stopped = await self._leg(job, completion, budget - turn_start, stop_tokens)
            if not stopped:
                break
            turn = completion.tokens[turn_start:]
            reply = await environment.step(turn)
            message_has_ended = reply.done or int(turn[-1]) not in environment.stop_tokens
            if reply.done:
                break
            completion.finish = "length"
            turn_limit_reached = turns == environment.turns
            room = budget - len(completion.tokens)
            if turn_limit_reached or len(reply.tokens) >= room:
                break
            completion.segments.append(length_control.masked(reply.tokens, completion.version))
            if message_has_ended:
                completion.message.clear()
        completion.episode = environment.record(turns, turn_limit_reached)
        return message_has_ended

    def _before_answer(self, job: Job) -> int:
        """Return the number of tokens that may precede the answer leg."""
        if self._length.control == "interruption":
            return job.thinking_tokens
        return job.thinking_tokens + self._length.answer_tokens

    async def _answer(self, job: Job, completion: Completion) -> None:
        """Sample the answer after the thinking; only the end token stops it."""
        limit = self._before_answer(job) - len(completion.tokens)
        if self._length.control == "interruption":
            limit = self._length.answer_tokens
            message = self._tokenizer.decode(completion.message_tokens)
            if self._length.end_of_thinking not in message:
                completion.write([length_control.masked(self._phrase, completion.version)])
                completion.interrupted = True
        await self._leg(job, completion, limit, self._ends)

    async def _leg(
        self, job: Job, completion: Completion, limit: int, stop_tokens: tuple[int, ...]
    ) -> bool:
        """Add at most `limit` tokens, or as many as a server has room for; return
        whether a stop token was among them.
        """
        room = self._longest - len(job.prompt.tokens) - len(completion.tokens)
        if room < 1 and not completion.segments:
            raise Void(
                f"its prompt has {len(job.prompt.tokens)} tokens, but a server takes at most"
                f" {self._longest - 1}"
            )
        limit = min(limit, room)
        while limit > 0:
            server, version = await job.take()
            output = await self._request(job, completion, server, version, limit, stop_tokens)
            completion.write(output.segments)
            # The last token was sampled but not computed on.
            completion.cacheable = len(job.prompt.tokens) + len(completion.tokens) - 1
            self.servers.places.use[server].tokens += output.tokens
            limit -= output.tokens
            if output.finish is not None:
                completion.finish = output.finish
                return output.finish == "stop"
        return False

    async def _request(
        self,
        job: Job,
        completion: Completion,
        server: int,
        version: int,
        limit: int,
        stop_tokens: tuple[int, ...],
    ) -> "RequestOutput":
        """Send one request and return what came of it, which may be only a part of it
        if the server was lost. Gives the place back. Raises Void.
        """
        start = time.monotonic()
        lane = f"server {server}/requests"
        name = _request_name(job.order)
        output = RequestOutput([], None)
        spans.open(lane, name, start)
        life = self.servers.life(server)
        try:
            generation = await self.servers.clients[server].generate(
                np.concatenate([job.prompt.tokens, completion.tokens]),
                limit,
                temperature=job.temperature,
                top_p=job.top_p,
                stop_token_ids=stop_tokens,
                cache_salt=job.salt,
                group=f"{job.order[0]}/{job.order[1]}",
                routing_from=_unknown_experts_from(job, completion),
                started=job.started,
            )
            self._note_cache(job, completion, server, generation.cached)
            segments = length_control.sampled(
                generation.tokens, generation.logprobs, generation.spans
            )
            output = RequestOutput(segments, generation.finish)
            if job.routed is not None:
                # In a thread: a rollout of 128k tokens has 50 MB.
                completion.routing.append(
                    await asyncio.to_thread(job.routed.routed_experts, generation.routing)
                )
        except ServerLost as lost:
            if not lost.server_is_alive:
                self.servers.server_lost(server, life, str(lost))
            # A leaving server is not a failure.
            if not self.servers.places.membership.leaves(server):
                completion.retries += 1
            if completion.retries > MAX_RETRIES:
                raise Void(f"{completion.retries} requests were lost, the last: {lost}") from None
            output = _received(lost, version, stop_tokens)
        except ServerRefused as refused:
            raise Void(str(refused)) from None
        finally:
            job.started()
            self.servers.places.give_back(server)
            spans.span(lane, name, start, time.monotonic(), version=version, tokens=output.tokens)
        return output

    def _note_cache(self, job: Job, completion: Completion, server: int, cached: int) -> None:
        """Count the part of a training request's input that its group had sent or
        received before, and the cached part.
        """
        kind, _, sample = job.order
        if kind != TRAINING:
            return
        reusable = completion.cacheable
        if reusable == 0 and sample > 0:
            # The first request of a further rollout: the group's first one has cached
            # the prompt. Its last token is always computed, to sample the next.
            reusable = len(job.prompt.tokens) - 1
        use = self.servers.places.use[server]
        use.reusable += reusable
        use.cached += cached


@dataclass(frozen=True)
class RequestOutput:
    """What a request added. finish: None if the rest has to be requested elsewhere."""

    segments: list[Segment]
    finish: FinishReason | None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return sum(len(segment.tokens) for segment in self.segments)


def _received(failure: ServerLost, version: int, stop_tokens: tuple[int, ...]) -> RequestOutput:
    """Return what came of a request before its server was lost.

    version: at the start of the request. Later ones are unknown, and an older one only
    looks staler.
    """
    segments = length_control.sampled(
        failure.tokens, failure.logprobs, [(version, 0, len(failure.tokens))]
    )
    if len(failure.tokens) and int(failure.tokens[-1]) in stop_tokens:
        return RequestOutput(segments, "stop")
    return RequestOutput(segments, None)


def _request_name(order: Order) -> str:
    """Return the name of a request in the trace: `ticket 12.3` or `evaluation 0.3`."""
    kind, ticket, sample = order
    if kind == TRAINING:
        return f"ticket {ticket}.{sample}"
    return f"evaluation {ticket}.{sample}"


def _unknown_experts_from(job: Job, completion: Completion) -> int | None:
    """Return the first token whose experts are unknown, None if none are recorded. A
    lost request has reported none.
    """
    if job.routed is None:
        return None
    return completion.routed + sum(len(table) for table in completion.routing)
