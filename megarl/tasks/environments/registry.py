"""A recipe's environments, by task; each plays an episode within limits set by the
recipe.

    async with bounded.played(prompt):      reset … close
        observation = await bounded.step(turn)
    bounded.record()                        the rollout's record of the episode

If another episode brings down the process, the episode goes on in a new one: that is
given the same turns again, and must reply to them in the same way.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from megarl.core.base.contracts import EnvironmentDown, GraderDown, Observation, Verdict
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Episode, Prompt
from megarl.core.recipe import Recipe, Rows
from megarl.tasks.environments.host import Died, Host, Process
from megarl.tasks.environments.worker import (
    BUILT_IN,
    Act,
    EpisodeReply,
    EpisodeRequest,
    Episodes,
    Part,
    Setup,
)

log = logging.getLogger(__name__)
REPLY_LIMIT_S = 600.0
"""Time limit for a reply, including the wait for a free sandbox, which may take minutes
when many episodes wait.
"""
LIVES = 3
"""Number of successive processes in which an episode may be played."""


class Bounded:
    """An episode of an environment, within limits: a `PlayedEnvironment`."""

    def __init__(self, host: Host, key: str, task: Rows, vocabulary: int) -> None:
        self._host = host
        self._task = task
        self._vocabulary = vocabulary
        self._name = f"{key}: environment {task.environment}"
        self.turns = task.turns
        self.stop_tokens: tuple[int, ...] = ()
        self._episode = next(host.numbers)
        self._prompt: Prompt | None = None
        self._process: Process | None = None
        # The turns so far, each with what was observed: a new process replays them.
        self._past: list[tuple[np.ndarray, Observation]] = []
        self._calls = 0
        self._errors = 0
        self._seconds = 0.0

    @asynccontextmanager
    async def played(self, prompt: Prompt) -> AsyncIterator[None]:
        """Play from reset to close; a failing close is only logged. GraderDown if the
        environment cannot begin the episode.
        """
        self._prompt = prompt
        try:
            await self._in_live_process(lambda: asyncio.sleep(0))  # only begins the episode
            yield
        finally:
            try:
                if self._process is not None and not self._process.over:
                    await self._answered("close")
            except (GraderDown, Died) as error:
                log.warning("%s", error)

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn. GraderDown if the environment fails, or answers nothing that
        the policy could read.
        """
        began = time.monotonic()
        reply = await self._in_live_process(lambda: self._observed(tokens))
        self._past.append((tokens, reply))
        self._seconds += time.monotonic() - began
        if reply.done:
            return reply
        self._calls += 1
        self._errors += reply.error
        if len(reply.tokens) > self._task.reply_tokens:
            raise self._down(
                f"replied {len(reply.tokens)} tokens, more than"
                f" reply_tokens={self._task.reply_tokens}"
            )
        self._check_tokens(reply.tokens.tolist(), "replied")
        return reply

    async def reward(self) -> Verdict | None:
        """Return the environment's verdict after the last turn, if it has one."""
        answer = await self._in_live_process(lambda: self._answered("reward"))
        verdict = answer.verdict
        if verdict is not None and not math.isfinite(verdict.score):
            raise self._down(f"gave the reward {verdict.score}")
        return verdict

    def record(self, turns: int, limited: bool) -> Episode:
        """Return the record of an episode with this many turns. limited: the limit on
        turns ended it.
        """
        return Episode(
            turns=turns,
            calls=self._calls,
            errors=self._errors,
            seconds=self._seconds,
            limited=limited,
        )

    async def _in_live_process[T](self, act: Callable[[], Awaitable[T]]) -> T:
        """Return what `act` returns, called while a process plays the episode; if that
        dies, called again with the next one, up to LIVES. EnvironmentDown if none is
        left, if this episode is to blame, or if anything else fails.
        """
        reason = ""
        for _ in range(LIVES):
            try:
                if self._process is None or self._process.over:
                    await self._start()
                return await act()
            except Died as died:
                reason = str(died)
                if died.culprit == self._episode:
                    raise self._down(reason) from None
            except (GraderDown, MegarlError):
                raise
            except Exception as error:  # no episode may end the controller
                log.exception("%s failed in a way that nobody foresaw", self._name)
                raise self._down(f"{type(error).__name__}: {error}", ": ") from None
        raise self._down(
            f"{reason}; the last of {LIVES} processes, and it is unknown which episode was to blame"
        )

    async def _start(self) -> None:
        """Begin the episode in the live process; an episode already in progress is
        replayed up to where it was.
        """
        is_replay = self._process is not None
        self._process = await self._host.process()
        reset = await self._answered("reset", prompt=self._prompt)
        self._check_tokens(reset.stop_tokens, "stops at")
        self.stop_tokens = reset.stop_tokens
        for tokens, earlier_reply in self._past:
            reply = await self._observed(tokens)
            if not _same(reply, earlier_reply):
                raise self._down(
                    "was replayed, because its process had ended, and answered the same turns"
                    " differently"
                )
        if is_replay:
            log.info("%s goes on in another process after %d turns", self._name, len(self._past))

    async def _observed(self, tokens: np.ndarray) -> Observation:
        """Return the environment's observation of a turn. Raises as `_answered`."""
        reply = await self._answered("step", tokens=tokens)
        if reply.observation is None:
            raise self._down("answered a turn without an observation")
        return reply.observation

    async def _answered(self, act: Act, **arguments: Any) -> EpisodeReply:
        """Return the process's reply to a call of the episode. arguments: further
        fields of the request. EnvironmentDown if the reply is an error; Died if the
        process ends.
        """
        assert self._process is not None
        request = EpisodeRequest(
            call=next(self._host.numbers),
            episode=self._episode,
            limit_s=REPLY_LIMIT_S,
            act=act,
            **arguments,
        )
        reply = await self._process.ask(request)
        if reply.error is not None:
            raise self._down(reply.error, ": ")
        return reply

    def _check_tokens(self, tokens: list[int] | tuple[int, ...], verb: str) -> None:
        """Raise EnvironmentDown if one of these token ids is not in the vocabulary.
        verb: what the environment does with it, for the message.
        """
        for token in tokens:
            if not 0 <= token < self._vocabulary:
                raise self._down(
                    f"{verb} token {token}, which is not in the vocabulary of {self._vocabulary}"
                )

    def _down(self, reason: str, joint: str = " ") -> EnvironmentDown:
        """Return an error that names the environment; joint: what stands between that
        name and the reason.
        """
        return EnvironmentDown(f"{self._name}{joint}{reason}")


def _same(reply: Observation, other_reply: Observation) -> bool:
    """Return whether two observations are equal; the tokens, the first field, are an
    array.
    """
    return reply[1:] == other_reply[1:] and np.array_equal(reply.tokens, other_reply.tokens)


class TaskEnvironments:
    """Environments by task or suite, with one process per environment. MegarlError if
    one of the recipe's is unusable here.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._keys = {name: f"data.tasks.{name}.environment" for name in recipe.data.tasks}
        self._keys |= {
            name: f"evaluation.suites.{name}.environment" for name in recipe.evaluation.sampled
        }
        self._tasks = {name: task for name, task in recipe.sampled.items() if task.environment}
        self._tokenizer = tokenizer
        self._hosts: dict[str, Host] = {}
        for environment in dict.fromkeys(task.environment for task in self._tasks.values()):
            setup = Setup(
                environment=environment,
                tokenizer=str(tokenizer.path),
                sandbox=recipe.data.sandbox,
                end_of_thinking=recipe.length.end_of_thinking,
                parts=self._parts(environment),
            )
            host = Host(setup)
            self._hosts[environment] = host
            if environment in BUILT_IN:
                Episodes(setup, tokenizer, int)  # only to see whether it can be made
            else:
                host.check()

    def _parts(self, environment: str) -> dict[str, Part]:
        """Return what the environment needs to know about its tasks and suites."""
        return {
            name: Part(
                key=self._keys[name],
                template=task.template,
                reply_tokens=task.reply_tokens,
                template_options=task.template_options,
            )
            for name, task in self._tasks.items()
            if task.environment == environment
        }

    def of(self, task: str) -> Bounded | None:
        """Return a new environment for an episode of this task; None if its rollouts
        have a single turn.
        """
        if task not in self._tasks:
            return None
        rows = self._tasks[task]
        key = self._keys[task].removesuffix(".environment")
        return Bounded(self._hosts[rows.environment], key, rows, self._tokenizer.vocabulary)

    def close(self) -> None:
        """End the environments' processes."""
        for host in self._hosts.values():
            host.close()
