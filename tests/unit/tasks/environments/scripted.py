"""Environments that do what a test has told them."""

import asyncio
import itertools
import os
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from megarl.core.base.types import Prompt, decode, encode, int32
from megarl.environments import DONE, Environment, Observation, Setting, Verdict
from megarl.tasks.environments.worker import EpisodeReply, EpisodeRequest, Episodes, Setup

CALL = 9
"""The token that ends a turn within a message."""


@dataclass
class Script:
    """replies: lengths of them, None: done; after the last one too. seen: turns;
    closed: how often.
    """

    replies: list[int | None] = field(default_factory=list)
    verdict: Verdict | None = None
    seen: list[np.ndarray] = field(default_factory=list)
    told: list[np.ndarray] = field(default_factory=list)
    closed: int = 0


SCRIPT = Script()


class Plain(Environment):
    """Written with `def`, as users do who did not look closely."""

    def __init__(self, setting: Setting) -> None: ...

    def reset(self, prompt: Prompt) -> None: ...  # type: ignore[override]

    def step(self, tokens: np.ndarray) -> Observation:  # type: ignore[override]
        return Observation(int32([3]))

    def reward(self) -> Verdict:  # type: ignore[override]
        return Verdict(0.5)

    def close(self) -> None: ...  # type: ignore[override]


class Scripted(Environment):
    """Follows SCRIPT; what it replies is a run of 3."""

    stop_tokens = (CALL,)

    def __init__(self, setting: Setting) -> None:
        self._script = SCRIPT

    async def step(self, tokens: np.ndarray) -> Observation:
        self._script.seen.append(tokens.copy())
        await asyncio.sleep(0)
        length = self._script.replies.pop(0) if self._script.replies else None
        if length is None:
            return DONE
        self._script.told.append(int32([3] * length))
        return Observation(self._script.told[-1], error=length == 1)

    async def reward(self) -> Verdict | None:
        return self._script.verdict

    async def close(self) -> None:
        self._script.closed += 1


class Near:
    """In the place of Host: the episodes are played in the test's own process. What
    passes is sent and read all the same.
    """

    tokenizer: ClassVar[Any] = None
    over = False

    def __init__(self, setup: Setup) -> None:
        self.numbers = itertools.count(1)
        self._episodes = Episodes(setup, self.tokenizer, int)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def process(self) -> "Near":
        return self

    async def ask(self, request: EpisodeRequest) -> EpisodeReply:
        reply: EpisodeReply = decode(
            await self._episodes.answer(decode(encode(request), EpisodeRequest)), EpisodeReply
        )
        return reply


def scrawl() -> None:
    """Write into every pipe there is, and wait."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            if stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK):
                os.write(descriptor, b"\xff" * 64)
    time.sleep(9)


class Hostile(Environment):
    """Its prompt's answer is a program: what comes of `turn` in it is the reply; with
    no `turn` it is an echo of the turn.
    """

    def __init__(self, setting: Setting) -> None:
        pass

    async def reset(self, prompt: Prompt) -> None:
        self._names: dict[str, Any] = {
            "asyncio": asyncio,
            "os": os,
            "sys": sys,
            "time": time,
            "Observation": Observation,
        }
        self._names["scrawl"] = scrawl
        exec(prompt.answer, self._names)

    async def step(self, tokens: np.ndarray) -> Observation:
        if "turn" not in self._names:
            await asyncio.sleep(0.05)
            return Observation(tokens)
        reply: Observation = await self._names["turn"](tokens)
        return reply

    async def reward(self) -> Verdict | None:
        return Verdict(self._names.get("score", 0.5))


SAID: Any = None


class Fuzzed(Environment):
    """Says what SAID has."""

    def __init__(self, setting: Setting) -> None:
        self.stop_tokens = SAID.stops

    async def step(self, tokens: np.ndarray) -> Observation:
        reply: Observation = SAID.reply
        return reply

    async def reward(self) -> Verdict | None:
        verdict: Verdict | None = SAID.verdict
        return verdict


class Faulty(Environment):
    """Fails where its task's name says."""

    def __init__(self, setting: Setting) -> None:
        self._where = setting.task
        if self._where == "exit":
            sys.exit("no more")
        if self._where == "made":
            raise RuntimeError("no licence")

    async def reset(self, prompt: Prompt) -> None:
        if self._where == "reset":
            raise OSError("no such game")

    async def step(self, tokens: np.ndarray) -> Observation:
        match self._where:
            case "hang":
                await asyncio.sleep(3600)
            case "step":
                raise KeyError("x")
            case "nothing":
                return None  # type: ignore[return-value]
            case "long":
                return Observation(int32([3] * 99))
        return DONE

    async def close(self) -> None:
        if self._where == "close":
            raise RuntimeError("it will not go")
