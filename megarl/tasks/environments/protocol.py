"""What an environment is. One instance is made for each rollout, in a process that has all those of its class.

    class Echo(Environment):
        def __init__(self, setting: Setting) -> None:
            self._setting = setting

        async def step(self, tokens):                     # of the turn, as they were sampled, its end token included
            if "=" not in self._setting.said(tokens):     # its text, without its thinking
                return DONE
            return Observation(tokens[:-1][: self._setting.reply_tokens])

`data.tasks.NAME.environment: package.module:Echo` plays it. It must not block that process (asyncio.to_thread for
what does).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt, int32
from megarl.tasks.environments.framing import Framing
from megarl.tasks.graders.answer import GraderDown, Verdict
from megarl.tasks.graders.sandbox import Sandbox


class EnvironmentDown(GraderDown):
    """An environment does not answer or fails. The rollout cannot be judged, as if its grader were down."""


class Observation(NamedTuple):
    """The answer to a turn. tokens [m] int32: put in behind it, masked from the loss; done: the turn was the last one, and
    nothing is put in; error: the policy called a tool wrongly, or the tool failed at what it was given (a metric)."""

    tokens: np.ndarray
    done: bool = False
    error: bool = False


DONE = Observation(int32(()), done=True)


@dataclass(frozen=True)
class Setting:
    """What an environment is made with. task: its name; reply_tokens: most tokens of an observation.

    framing: from a text to the tokens of an observation, in the policy's chat template; sandbox: runs programs.
    """

    task: str
    tokenizer: Tokenizer
    framing: Framing
    sandbox: Sandbox
    end_of_thinking: str
    reply_tokens: int

    def said(self, tokens: np.ndarray) -> str:
        """The text of a turn without its thinking, if that is closed."""
        return self.tokenizer.decode(tokens).rpartition(self.end_of_thinking)[2]


@runtime_checkable
class Environment(Protocol):
    """One episode. `step` is all that has to be written."""

    stop_tokens: tuple[int, ...] = ()
    """Ids that end a turn besides the end token. After one of these the policy goes on in the same message."""

    async def reset(self, prompt: Prompt) -> None:
        """Begin; its tokens are the first thing the policy sees."""

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn. tokens [n] int32, the end or stop token included."""
        ...

    async def reward(self) -> Verdict | None:
        """After the last turn: right or wrong, or None: the task's grader judges the text of the last message."""
        return None

    async def close(self) -> None:
        """Let go of what it holds; called in any case."""
