"""How far ahead of the learner prompts are drawn, in steps: with `pipeline.window: auto` only as far as it would otherwise wait.

    L   seconds from the moment when all prompts of a batch are drawn until it is complete, the longest of late
    T   seconds that the learner is busy with a step, mean

    ceil(L / T) + 1     batches are drawn, of which the learner trains the first: the last one has L seconds until its turn

The law of the pipeline allows k + 1 (`base/admission.py`). So many are open at the start, when nothing is measured, and where an
evaluation will hold servers. The window opens as soon as a batch took longer, and closes when all of as many batches as it holds
would have been in time with less. Here is decided only when a prompt is drawn, never which one: the journal has what was
drawn, and a replay draws nothing.
"""

import asyncio
import math
from collections import deque

from megarl.core.recipe import Recipe

SPARE = 0.03
"""Share of L that batches are kept ready early."""
SMOOTHING = 0.1
"""Weight of a new step in the mean T."""


class Window:
    """The window of a run: `steps` batches may be drawn and not yet trained. Times are those of the running event loop."""

    def __init__(self, recipe: Recipe) -> None:
        self.steps = self._most = recipe.pipeline.window_steps
        self._auto = recipe.pipeline.window == "auto"
        self._drawn: dict[int, float] = {}  # when all prompts of a batch were drawn, by step
        self._complete: dict[int, float] = {}
        self._counted = 0  # batches known to be complete
        self._waiting: float | None = None  # since when the learner waits for a batch
        self._taken, self._busy = 0.0, 0.0  # when the last batch was taken; T
        self._recent: deque[float] = deque(maxlen=self._most + 1)  # L of the last batches

    def drawn(self, batches: int) -> None:
        """Note that all prompts of this many batches, from the first on, are drawn."""
        self._drawn[batches - 1] = asyncio.get_running_loop().time()

    def complete(self, batches: int) -> None:
        """Note that this many batches, from the first on, are complete."""
        now = asyncio.get_running_loop().time()
        self._complete |= dict.fromkeys(range(self._counted, batches), now)
        self._counted = max(self._counted, batches)

    def wait(self) -> None:
        """Note that the learner waits for a batch that is not complete."""
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().time()

    def taken(self, step: int) -> None:
        """Note that the learner takes the batch of this step, and adapt the window."""
        now = asyncio.get_running_loop().time()
        busy = (now if self._waiting is None else self._waiting) - self._taken
        first, self._taken, self._waiting = not self._taken, now, None
        drawn, complete = self._drawn.pop(step, None), self._complete.pop(step, None)
        if not self._auto or first or drawn is None or complete is None:
            return  # nothing was measured: a first step, or a replay
        self._busy += (SMOOTHING if self._busy else 1.0) * (busy - self._busy)
        self._recent.append(complete - drawn)
        if len(self._recent) > self.steps or self._needed(self._recent[-1]) > self.steps:
            self.steps = self._needed(max(self._recent))

    def _needed(self, seconds: float) -> int:
        """Return how many batches must be drawn if one takes so long."""
        return min(math.ceil((1 + SPARE) * seconds / max(self._busy, 1e-9)) + 1, self._most)
