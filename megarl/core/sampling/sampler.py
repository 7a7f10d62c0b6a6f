"""One rollout from its prompt to its last token, over as many requests and servers as
it takes.

    turns ─► (interruption phrase) ─► answer leg                   length_control.py has the details
      │      the answer leg has `answer_tokens` or, unless length.control is interruption, the rest of a common budget
      └ one turn; with an environment: leg ─► its reply, masked ─► leg ─► … until it is done or a limit is reached
        each leg: take a place ─► generate ─► done
                       ▲             │ server lost: the tokens received are kept, the rest is requested elsewhere
                       └─────────────┘

A task with an agent works differently: the agent asks for turns, each of which is one
leg (`_session`).

Every request goes to a server that is eligible at that moment (places.py). An
environment's replies count in the budget before the answer, so no rollout is longer
than one of a single turn may be. An episode that reaches a limit continues with the
answer leg, without its environment. But nothing can follow an end token: there the
rollout ends, truncated.
"""

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
    Verdict,
)
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import KEPT_FROM_INPUT
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Branch, Episode, FinishReason, Prompt, Segment
from megarl.core.recipe import Recipe
from megarl.core.sampling import length_control
from megarl.core.sampling.places import Order, Places, Waits
from megarl.core.server.client import ServerClient, ServerLost, ServerRefused
from megarl.core.telemetry.spans import spans

LARGEST_RECORD = 1 << 32
"""Bytes that a record of the journal, a group, may have (journal/file.py)."""
MAX_RETRIES = 5
"""With more lost requests than this a rollout is void: it is unlikely that so many
servers died by chance.
"""


class Void(Exception):
    """The rollout cannot be made; the text says why."""


@dataclass(frozen=True)
class Job:
    """What to sample."""

    prompt: Prompt
    order: Order
    take: Callable[
        [], Awaitable[tuple[int, int]]
    ]  # as Places.take; the sampler gives the place back
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
    kept: int = 0  # tokens of prompt and completion that the last server's cache should hold
    text: str = ""  # the last message, without its stop token
    truncated: bool = False  # a length limit cut the last message off
    routing: list[np.ndarray] = field(default_factory=list)  # tables of the requests so far
    message: list[np.ndarray] = field(
        default_factory=list
    )  # tokens of the message in progress, without replies
    verdict: Verdict | None = (
        None  # of environment or agent; without one the task's grader judges the text
    )
    episode: Episode | None = None
    paths: tuple[Branch, ...] = ()
    down: GraderDown | None = (
        None  # why environment or agent could not go on; it then cannot be judged
    )

    @property
    def tokens(self) -> np.ndarray:
        """[completion_len] int32"""
        return np.concatenate([np.zeros(0, np.int32), *(s.tokens for s in self.segments)])

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
        self.segments += segments
        self.message += [s.tokens for s in segments]


class ServerPool(Protocol):
    """The servers that requests go to, and those among them that are lost."""

    @property
    def clients(self) -> Mapping[int, ServerClient]: ...

    @property
    def places(self) -> Places: ...

    def life(self, server: int) -> int:
        """Return a number that changes when the server is lost or its requests are
        aborted.
        """

    def server_lost(self, server: int, life: int, reason: str) -> None: ...


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
    choices = model.moe_layers * model.experts_per_token * (1 if model.experts <= 256 else 2)
    if (
        size := recipe.sampling.generations * recipe.length.context_tokens * (choices + 8)
    ) >= LARGEST_RECORD:
        what = (
            f"the experts of a group of the longest rollouts take {size / 2**30:.1f} GiB, and a"
            " record of the journal has 4"
        )
        raise MegarlError(
            f"model.moe.routing_replay: {what}; lower sampling.generations or length.*, or leave"
            " it out"
        )
    return model


class Sampler:
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
        # Only if rollouts can be interrupted does the tokenizer have to know the
        # phrase.
        self._phrase = tokenizer.ids(
            recipe.length.interruption if recipe.length.control == "interruption" else ""
        )
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
        done = Completion()
        environment = self._environments.of(job.prompt.task)
        if environment is None:
            if not await self._leg(job, done, self._before_answer(job), self._ends):
                await self._answer(job, done)
        else:
            try:
                async with environment.played(job.prompt):
                    if not await self._turns(job, done, environment):
                        await self._answer(job, done)
                    done.verdict = await environment.reward()
            except EnvironmentDown as down:
                done.down = down
        done.segments = list(length_control.joined(done.segments))
        tokens = done.message_tokens
        ended = done.finish == "stop" or (len(tokens) > 0 and int(tokens[-1]) in self._ends)
        done.text = self._tokenizer.continued(tokens[:-1] if ended else tokens)
        done.truncated = not ended
        return done

    async def _session(self, job: Job, agents: Agents) -> Completion:
        """Run a session of the task's agent, which asks for turns; each is one leg,
        without a thinking budget.
        """
        retries = 0
        waits = Waits()

        async def policy(tokens: np.ndarray, limit: int, kept: int) -> PolicyTurn:
            nonlocal retries
            turn = Completion(kept=kept)
            prompt = structs.replace(job.prompt, tokens=tokens)
            asked = replace(job, prompt=prompt, take=partial(waits.taken, job.take))
            ended = await self._leg(asked, turn, limit, self._ends)
            retries += turn.retries
            return PolicyTurn(length_control.joined(turn.segments), ended)

        down = None
        try:
            made = await agents.session(job.prompt, job.order, policy, waits.seconds)
        except AgentDown as error:
            down = error
            made = error.rollout
        return Completion(
            segments=list(made.segments),
            paths=made.paths,
            finish=made.finish,
            retries=retries,
            text=made.text,
            truncated=made.truncated,
            verdict=made.verdict,
            episode=made.episode,
            down=down,
        )

    async def _turns(self, job: Job, done: Completion, environment: PlayedEnvironment) -> bool:
        """Sample turns and add the environment's replies; return whether that completes
        the rollout.
        """
        budget = self._before_answer(job)
        stop_tokens = (*self._ends, *environment.stop_tokens)
        for turns in range(1, environment.turns + 1):
            begin = len(done.tokens)
            over = False
            limited = False
            if not await self._leg(job, done, budget - begin, stop_tokens):
                break
            turn = done.tokens[begin:]
            reply = await environment.step(turn)
            over = (
                reply.done or int(turn[-1]) not in environment.stop_tokens
            )  # if so, the message has ended, too
            if reply.done:
                break
            done.finish = "length"
            limited = turns == environment.turns
            if limited or len(reply.tokens) >= budget - len(done.tokens):
                break
            done.segments.append(length_control.put_in(reply.tokens, done.version))
            if over:
                done.message.clear()
        done.episode = environment.record(turns, limited)
        return over

    def _before_answer(self, job: Job) -> int:
        """Return the number of tokens that may precede the answer leg."""
        answer = 0 if self._length.control == "interruption" else self._length.answer_tokens
        return job.thinking_tokens + answer

    async def _answer(self, job: Job, done: Completion) -> None:
        """Sample the answer after the thinking; only the end token stops it."""
        limit = self._before_answer(job) - len(done.tokens)
        if self._length.control == "interruption":
            limit = self._length.answer_tokens
            if self._length.end_of_thinking not in self._tokenizer.decode(done.message_tokens):
                done.write([length_control.put_in(self._phrase, done.version)])
                done.interrupted = True
        await self._leg(job, done, limit, self._ends)

    async def _leg(
        self, job: Job, done: Completion, limit: int, stop_tokens: tuple[int, ...]
    ) -> bool:
        """Add at most `limit` tokens, or as many as a server has room for; return
        whether a stop token was among them.
        """
        room = self._longest - len(job.prompt.tokens) - len(done.tokens)
        if room < 1 and not done.segments:
            most = f"a server takes at most {self._longest - 1}"
            raise Void(f"its prompt has {len(job.prompt.tokens)} tokens, but {most}")
        limit = min(limit, room)
        name = "{} {}.{}".format(("evaluation", "ticket")[job.order[0]], *job.order[1:])
        while limit > 0:
            server, version = await job.take()
            begin = time.monotonic()
            segments = list[Segment]()
            spans.open(f"server {server}/requests", name, begin)
            life = self.servers.life(server)
            try:
                generation = await self.servers.clients[server].generate(
                    np.concatenate([job.prompt.tokens, done.tokens]),
                    limit,
                    temperature=job.temperature,
                    top_p=job.top_p,
                    stop_token_ids=stop_tokens,
                    cache_salt=job.salt,
                    # From the first token whose experts are unknown: a lost request has
                    # reported none.
                    routing_from=None if job.routed is None else sum(map(len, done.routing)),
                    started=job.started,
                )
                self._note_cache(job, done, server, generation.cached)
                segments = length_control.sampled(
                    generation.tokens, generation.logprobs, generation.spans
                )
                finish: FinishReason | None = generation.finish
                if job.routed is not None:
                    done.routing.append(job.routed.routed_experts(generation.routing))
            except ServerLost as lost:
                if not lost.alone:
                    self.servers.server_lost(server, life, str(lost))
                done.retries += not self.servers.places.membership.leaves(
                    server
                )  # a leaving server is not a failure
                if done.retries > MAX_RETRIES:
                    raise Void(f"{done.retries} requests were lost, the last: {lost}") from None
                # The version at the start of the request: later ones are unknown, and
                # an older one only looks staler.
                segments = length_control.sampled(
                    lost.tokens, lost.logprobs, [(version, 0, len(lost.tokens))]
                )
                finish = (
                    "stop" if len(lost.tokens) and int(lost.tokens[-1]) in stop_tokens else None
                )
            except ServerRefused as refused:
                raise Void(str(refused)) from None
            finally:
                job.started()
                self.servers.places.give_back(server)
                tokens = sum(len(s.tokens) for s in segments)
                end = time.monotonic()
                spans.span(
                    f"server {server}/requests", name, begin, end, version=version, tokens=tokens
                )
            done.write(segments)
            done.kept = (
                len(job.prompt.tokens) + len(done.tokens) - 1
            )  # the last token was sampled but not computed on
            self.servers.places.use[server].tokens += tokens
            limit -= tokens
            if finish is not None:
                done.finish = finish
                return finish == "stop"
        return False

    def _note_cache(self, job: Job, done: Completion, server: int, cached: int) -> None:
        """Count the part of a training request's input that its group had sent or
        received before, and the cached part.
        """
        kind, _, sample = job.order
        if kind == 1:
            first = (
                len(job.prompt.tokens) - 1 if sample else 0
            )  # the last token is always computed, to sample the next
            self.servers.places.use[server].reusable += done.kept or first
            self.servers.places.use[server].cached += cached
