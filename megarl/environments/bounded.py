"""One environment in one episode: whatever it does, the episode goes on or ends within limits that are named.

async with bounded.played(prompt):      reset … close
    observation = await bounded.step(turn)
bounded.told()                          what the rollout's record keeps
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import numpy as np

from megarl.environments.protocol import Environment, EnvironmentDown, Observation
from megarl.grading import GraderDown, Verdict
from megarl.recipe import Rows
from megarl.types import Episode, Prompt

log = logging.getLogger(__name__)


class Bounded:
    """turns, turn_tokens: as in the recipe. What is awaited raises EnvironmentDown if the environment fails or is late."""

    def __init__(self, environment: Environment, name: str, task: Rows) -> None:
        self._environment, self._name, self._task = environment, name, task
        self.turns, self.turn_tokens = task.turns, task.turn_tokens
        self.stop_tokens = environment.stop_tokens
        self._calls, self._errors, self._seconds = 0, 0, 0.0

    @asynccontextmanager
    async def played(self, prompt: Prompt) -> AsyncIterator[None]:
        """From its reset to its close, which is only logged if it fails."""
        try:
            await self._within("reset", self._environment.reset(prompt))
            yield
        finally:
            try:
                await self._within("close", self._environment.close())
            except GraderDown as error:
                log.warning("%s", error)

    async def step(self, tokens: np.ndarray) -> Observation:
        """Its answer to a turn [n]."""
        began = time.monotonic()
        reply = await self._within("step", _answer(self._environment, tokens))
        self._seconds += time.monotonic() - began
        if reply.done:
            return reply
        self._calls += 1
        self._errors += reply.error
        if len(reply.tokens) > self._task.reply_tokens:
            raise EnvironmentDown(
                f"{self._where()} replied {len(reply.tokens)} tokens, more than reply_tokens={self._task.reply_tokens}"
            )
        return reply._replace(tokens=np.asarray(reply.tokens, np.int32))

    async def reward(self) -> Verdict | None:
        return await self._within("reward", self._environment.reward())

    def told(self, turns: int, limited: bool) -> Episode:
        """The record of an episode of so many turns. limited: a limit of turns ended it."""
        return Episode(turns=turns, calls=self._calls, errors=self._errors, seconds=self._seconds, limited=limited)

    async def _within[T](self, what: str, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._task.reply_timeout_s) as limit:
                return await answer
        except GraderDown:
            raise
        except Exception as error:  # of a user's environment: anything
            if limit.expired():
                took = f"took longer than {self._task.reply_timeout_s:g} s (reply_timeout_s)"
                raise EnvironmentDown(f"{self._where()}: {what} {took}") from None
            log.exception("%s: %s failed", self._where(), what)
            raise EnvironmentDown(f"{self._where()}: {what} failed: {type(error).__name__}: {error}") from None

    def _where(self) -> str:
        return f"data.tasks.{self._name}: environment {self._task.environment}"


async def _answer(environment: Environment, tokens: np.ndarray) -> Observation:
    """Of a user's environment: maybe none."""
    answer = await environment.step(tokens)
    if not isinstance(answer, Observation):
        raise TypeError(f"it answered {answer!r:.80}, not an Observation")
    return answer
