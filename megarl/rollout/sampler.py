"""One rollout from its prompt to its last token, over as many requests and servers as that takes.

    thinking leg ─► (interruption phrase) ─► answer leg            interruption.py says which
    or one leg of both lengths, if length.control is not interruption
        each leg: take a place ─► generate ─► done
                       ▲             │ server lost: what it had sent is kept, the rest is asked for elsewhere
                       └─────────────┘

Every request, also a second one, goes to a server that is eligible at that moment (places.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megarl.data.tokenizer import Tokenizer
from megarl.recipe import Recipe
from megarl.rollout import interruption
from megarl.rollout.client import Generation, ServerClient, ServerLost, ServerRefused
from megarl.rollout.places import MayUse, Order, Places
from megarl.rollout.routing import RoutedLayers
from megarl.types import Finish, Segment


class Void(Exception):
    """This rollout cannot be made; the text says why."""


@dataclass(frozen=True)
class Job:
    """What to sample. `salt`: requests with the same one share cached prefixes. Tokens are limits of the two legs."""

    prompt: np.ndarray
    order: Order
    may_use: MayUse
    salt: str
    thinking_tokens: int
    temperature: float
    top_p: float
    placed: Callable[[int], None] = lambda server: None  # told where each request goes
    routed: RoutedLayers | None = None  # record the experts that the servers choose


@dataclass
class Completion:
    """What has been sampled for a job so far, or in the end. `text` without the end token, once complete."""

    segments: list[Segment] = field(default_factory=list)
    finish: Finish = "length"
    interrupted: bool = False
    retries: int = 0
    text: str = ""
    routing: list[np.ndarray] = field(default_factory=list)  # tables of the requests so far

    @property
    def rows(self) -> int:
        """Tokens of prompt and completion whose experts are known."""
        return sum(len(table) for table in self.routing)

    @property
    def tokens(self) -> np.ndarray:
        """[completion_len] int32"""
        return np.concatenate([np.zeros(0, np.int32), *(s.tokens for s in self.segments)])


class Watcher(Protocol):
    """Who is told what happens to servers."""

    def life(self, server: int) -> int:
        """A number that changes when the server is lost or what it runs is aborted."""

    def server_lost(self, server: int, life: int, reason: str) -> None:
        """A request to the server failed that was sent in this life."""


class Sampler:
    """Samples jobs on the servers behind `places`."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, clients: dict[int, ServerClient], places: Places, watcher: Watcher
    ) -> None:
        self._length = recipe.length
        self._max_retries = recipe.serving.max_retries
        self._tokenizer = tokenizer
        self._phrase = tokenizer.ids(recipe.length.interruption)
        self._end = tokenizer.end
        self.clients = clients
        self._places = places
        self.watcher = watcher

    async def complete(self, job: Job) -> Completion:
        """The whole rollout. Raises Void."""
        done = Completion()
        if self._length.control != "interruption":
            await self._leg(job, done, job.thinking_tokens + self._length.answer_tokens)
        elif not await self._leg(job, done, job.thinking_tokens):
            if self._length.end_of_thinking not in self._tokenizer.decode(done.tokens):
                done.segments.append(interruption.put_in(self._phrase, done.segments[-1].weight_version))
                done.interrupted = True
            await self._leg(job, done, self._length.answer_tokens)
        done.segments = list(interruption.joined(done.segments))
        tokens = done.tokens
        done.text = self._tokenizer.decode(tokens[:-1] if done.finish == "stop" else tokens)
        return done

    async def _leg(self, job: Job, done: Completion, limit: int) -> bool:
        """Add at most `limit` tokens; whether the end token was among them."""
        while limit > 0:
            server, version = await self._places.take(job.order, job.may_use)
            job.placed(server)
            life = self.watcher.life(server)
            try:
                generation = await self._request(server, job, done, limit)
                segments = interruption.sampled(generation.tokens, generation.logprobs, generation.spans)
                finish: Finish | None = generation.finish
                if job.routed is not None:
                    done.routing.append(job.routed.decoded(generation.routing))
            except ServerLost as lost:
                self.watcher.server_lost(server, life, str(lost))
                done.retries += 1
                if done.retries > self._max_retries:
                    raise Void(f"{done.retries} requests were lost (serving.max_retries), the last: {lost}") from None
                segments = _salvaged(lost, version)
                finish = "stop" if len(lost.tokens) and lost.tokens[-1] == self._end else None
            except ServerRefused as refused:
                raise Void(str(refused)) from None
            finally:
                self._places.give_back(server)
            done.segments += segments
            count = sum(len(s.tokens) for s in segments)
            self._places.use[server].tokens += count
            limit -= count
            if finish is not None:
                done.finish = finish
                return finish == "stop"
        return False

    async def _request(self, server: int, job: Job, done: Completion, limit: int) -> Generation:
        return await self.clients[server].generate(
            np.concatenate([job.prompt, done.tokens]),
            limit,
            temperature=job.temperature,
            top_p=job.top_p,
            stop_token_ids=(self._end,),
            cache_salt=job.salt,
            # What a lost request has left unknown, the next one tells.
            routing_from=None if job.routed is None else done.rows,
        )


def _salvaged(lost: ServerLost, version: int) -> list[Segment]:
    """What had arrived, as of the version at sending: a later one is not known, and an older one only looks staler."""
    return interruption.sampled(lost.tokens, lost.logprobs, [(version, 0, len(lost.tokens))])
