"""How far ahead of the learner prompts are drawn. With `pipeline.window: auto`, no
farther than keeps the learner from waiting.

    L    seconds from the draw of a batch's last prompt until the batch is complete; the largest of the last N batches
    T    seconds from the moment when the learner takes a batch until the next version is published; a running mean

    W = ceil(L / T) + 1    batches are drawn but not trained: the learner trains the first, and the last has (W - 1) T seconds

The law of the pipeline (`base/admission.py`) allows k + 1 batches; the window starts
with k + 1 and is never larger.

Hysteresis: the window widens when a batch, even an incomplete one, takes more than 0.95
(W - 1) T, and narrows when even 2 L would fit into a smaller one. N doubles with each
change, so that noise cannot make it oscillate. It narrows at once, but widens by only
an eighth of a batch per step, since servers that are suddenly fuller would delay what
the learner needs next. It starts early enough to have its full width when an evaluation
takes servers away. Nothing is measured while it widens. It changes only at
publications, whose journal records contain it. Measured times decide when a prompt is
drawn, never which one.
"""

import asyncio
import math
from collections import deque

from megarl.core.recipe import Recipe

OPENS = 1 / 0.95
CLOSES = 2.0
"""Factors on L in the decisions to widen and to narrow the window."""
RAMP = 1 / 8
"""Batches by which the window widens at a publication."""
SMOOTHING = 0.1
"""Weight of a new step in the running mean T."""
LONGEST_MEMORY = 8
"""N grows from k + 1 to this multiple of it."""


class Window:
    """A run's window, by the event loop's time. tickets: how many may be drawn but not
    trained; at first as recorded, or 0.
    """

    def __init__(self, recipe: Recipe, tickets: int) -> None:
        self._prompts = recipe.batch.prompts
        self._most = recipe.pipeline.window_steps
        self._auto = recipe.pipeline.window == "auto" and recipe.pipeline.kind == "pipeline-rl"
        self.tickets = tickets if tickets and self._auto else self._most * self._prompts
        self._steps = math.ceil(self.tickets / self._prompts)  # W
        self._steady = True  # not widening, and no evaluation is running
        self._drawn: dict[
            int, float
        ] = {}  # by step of a measured batch: when its last prompt was drawn
        self._taken: tuple[int, float] | None = (
            None  # the step that the learner trains, and when it began
        )
        self._busy = 0.0  # T; 0 before the first step
        self._recent: deque[float] = deque(maxlen=self._most)  # L of each of the last N batches

    @property
    def batches(self) -> float:
        """Number of batches that may be drawn but not trained."""
        return self.tickets / self._prompts

    @property
    def lead(self) -> int:
        """Number of publications in which the window widens from 0 to k + 1. An
        evaluation farther away has no effect yet.
        """
        return math.ceil(self._most / RAMP)

    def drawn(self, batches: int) -> None:
        """Note that all prompts of the first `batches` batches are drawn."""
        if self._steady and self._busy:
            self._drawn[batches - 1] = asyncio.get_running_loop().time()

    def complete(self, batches: int) -> None:
        """Note that the first `batches` batches are complete."""
        now = asyncio.get_running_loop().time()
        for step in [step for step in self._drawn if step < batches]:
            self._recent.append(now - self._drawn.pop(step))

    def taken(self, step: int) -> None:
        """Note that the learner takes this step's batch. Not called in a replay."""
        self._taken = step, asyncio.get_running_loop().time()

    def published(self, version: int, evaluation: int) -> None:
        """Adapt the window at a publication. evaluation: number of versions until the
        next evaluation, 0 while one runs.
        """
        now = asyncio.get_running_loop().time()
        if self._taken is not None and self._taken[0] + 1 == version and self._steady:
            self._busy += (SMOOTHING if self._busy else 1.0) * (now - self._taken[1] - self._busy)
        self._taken = None
        if not self._auto:
            return
        before = self._steps
        memory = self._recent.maxlen or 0
        if longest := max(
            [*self._recent, *(now - drawn for drawn in self._drawn.values())], default=0.0
        ):
            closed = self._needed(CLOSES * longest) if len(self._recent) == memory else self._most
            self._steps = max(min(self._steps, closed), self._needed(OPENS * longest))
        if self._steps != before:
            self._recent = deque(self._recent, min(2 * memory, LONGEST_MEMORY * self._most))
        least = math.ceil((self._most - RAMP * evaluation) * self._prompts)
        wanted = max(self._steps * self._prompts, least)
        self.tickets = min(wanted, self.tickets + math.ceil(RAMP * self._prompts))
        self._steady = self.tickets == self._steps * self._prompts and evaluation > 0

    def _needed(self, seconds: float) -> int:
        """Return W for an L of `seconds`."""
        return min(math.ceil(seconds / self._busy) + 1, self._most)
