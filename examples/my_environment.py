"""An environment of your own: a game in which the policy looks for a number, and earns
more the sooner it names it. Copy it to where you start megarl, and name it in the
recipe:

data: {tasks: {search: {environment: "my_environment:Search", turns: 6, grader: exact}}}

A row of the data is `{"prompt": "Find a number from 1 to 50.", "answer": "37"}`. The
policy reads the replies, but is not trained on them (docs/how-to/tools.md).
"""

import re

import numpy as np

from megarl.core.base.types import Prompt
from megarl.environments import DONE, Environment, Observation, Setting, Verdict

NUMBER = re.compile(r"\d{1,9}")
COST = 0.1


class Search(Environment):
    """Says after each guess whether the number is higher or lower."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.number = 0
        self.guesses = 0
        self.is_right = False

    async def reset(self, prompt: Prompt) -> None:
        """Begin an episode."""
        self.number = int(prompt.answer)

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn, whose last number outside of the thinking is the guess."""
        self.guesses += 1
        numbers = NUMBER.findall(self.setting.answer_text(tokens))
        if not numbers:
            return Observation(self.setting.framing.tokens("Write a number.", tokens), error=True)
        guess = int(numbers[-1])
        self.is_right = guess == self.number
        if self.is_right:
            return DONE
        hint = "higher" if guess < self.number else "lower"
        return Observation(self.setting.framing.tokens(f"It is {hint}.", tokens))

    async def reward(self) -> Verdict:
        """Return 1 for the first guess, a tenth less for each further one; -1 if the
        number was not found. Above 0 counts as right.
        """
        if not self.is_right:
            return Verdict(-1.0)
        return Verdict(max(COST, 1 - COST * (self.guesses - 1)))
