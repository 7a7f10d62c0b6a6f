"""Environments that do what a test has told them."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from megarl.environments import DONE, Environment, Observation, Setting
from megarl.grading import Verdict
from megarl.types import Prompt, int32

CALL = 9
"""The token that ends a turn within a message."""


@dataclass
class Script:
    """replies: lengths of them, None: done; after the last one too. seen: turns; closed: how often."""

    replies: list[int | None] = field(default_factory=list)
    verdict: Verdict | None = None
    seen: list[np.ndarray] = field(default_factory=list)
    told: list[np.ndarray] = field(default_factory=list)
    closed: int = 0


SCRIPT = Script()


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


class Faulty(Environment):
    """Fails where its task's name says."""

    def __init__(self, setting: Setting) -> None:
        self._where = setting.task
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
