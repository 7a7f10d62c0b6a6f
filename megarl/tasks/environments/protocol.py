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

import numpy as np

from megarl.core.base.tokenizer import Tokenizer
from megarl.tasks.environments.framing import Framing
from megarl.tasks.graders.sandbox import Sandbox


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
