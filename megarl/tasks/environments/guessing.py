"""A guessing game: the prompt's answer is a secret whole number, and the last number in
each turn is a guess at it.

    50 ─► lower ─► 25 ─► higher ─► 37 ─► (right: done)

It gives the reward itself: right if the number was guessed within the allowed turns,
else wrong. Text written after the thinking budget has run out no longer counts as a
guess.
"""

import re

import numpy as np

from megarl.core.base.contracts import DONE, Environment, Observation, Verdict
from megarl.core.base.types import Prompt
from megarl.tasks.environments.framing import Setting
from megarl.tasks.graders.answer import judged

NUMBER = re.compile(r"-?\d{1,30}")


class Guessing(Environment):
    """Replies `higher` (than the guess), `lower`, or `no number`."""

    def __init__(self, setting: Setting) -> None:
        setting.framing.check()
        self._setting = setting
        self._secret = 0
        self._is_right = False  # the last guess

    async def reset(self, prompt: Prompt) -> None:
        """Take the prompt's answer as the secret."""
        self._secret = int(prompt.answer)

    async def step(self, tokens: np.ndarray) -> Observation:
        """Compare the turn's last number with the secret."""
        numbers = NUMBER.findall(self._setting.answer_text(tokens))
        if not numbers:
            return Observation(self._setting.framing.tokens("no number", tokens), error=True)
        guess = int(numbers[-1])
        self._is_right = guess == self._secret
        if self._is_right:
            return DONE
        hint = "higher" if guess < self._secret else "lower"
        return Observation(self._setting.framing.tokens(hint, tokens))

    async def reward(self) -> Verdict | None:
        """Return whether the number was guessed."""
        return judged(self._is_right)
