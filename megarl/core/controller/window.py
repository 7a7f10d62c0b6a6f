"""How far ahead of the learner prompts are drawn. `pipeline.window: auto`: only as far as the learner would otherwise wait.

    L    seconds from the moment when all prompts of a batch are drawn until it is complete; the longest of the last N batches
    T    seconds from the moment when the learner takes a batch until the next version is published, a running mean

    W = ceil(L / T) + 1    batches are drawn and not trained. The learner trains the first, and the last has (W - 1) T seconds

The law of the pipeline (`base/admission.py`) allows k + 1; so many are drawn at the start, and never more.

Hysteresis: the window opens when a batch takes more than 0.95 (W - 1) T, also one that is not complete yet, and closes when
twice L needs less. N doubles with each change, so that noise cannot keep it swinging. It closes at once, but opens by an eighth
of a batch a step: servers that are nearly busy would finish late what the learner needs next. It begins early enough to be
wholly open when an evaluation takes servers away. What happens while it opens is not measured.

The window changes with publications only, whose records in the journal have it: a restarted controller goes on with it. Times
decide when a prompt is drawn, never which one. A replay draws nothing.
"""

import asyncio
import math
from collections import deque

from megarl.core.recipe import Recipe

OPENS, CLOSES = 1 / 0.95, 2.0
"""L counts so many times when the window may open, and when it may close."""
RAMP = 1 / 8
"""Batches by which the window opens at a publication."""
SMOOTHING = 0.1
"""Weight of a new step in T."""
LONGEST_MEMORY = 8
"""N begins at k + 1, and ends at so many times that."""


class Window:
    """The window of a run. tickets: how many may be drawn and not trained, as the last record has it; 0 if there is none.

    Times are those of the running event loop.
    """

    def __init__(self, recipe: Recipe, tickets: int) -> None:
        self._prompts, self._most = recipe.batch.prompts, recipe.pipeline.window_steps
        self._auto = recipe.pipeline.window == "auto" and recipe.pipeline.kind == "pipeline-rl"
        self.tickets = tickets if tickets and self._auto else self._most * self._prompts
        self._steps = math.ceil(self.tickets / self._prompts)  # W
        self._steady = True  # not opening, and no evaluation ahead
        self._drawn: dict[int, float] = {}  # when the last prompt of a measured batch was drawn, by step
        self._taken: tuple[int, float] | None = None  # the step that the learner trains, and since when
        self._busy = 0.0  # T; 0 before the first step
        self._recent: deque[float] = deque(maxlen=self._most)  # L of each of the last N batches

    @property
    def batches(self) -> float:
        """How many batches may be drawn and not trained."""
        return self.tickets / self._prompts

    @property
    def lead(self) -> int:
        """Publications in which the window opens from nothing: an evaluation that is farther away changes nothing."""
        return math.ceil(self._most / RAMP)

    def drawn(self, batches: int) -> None:
        """Note that all prompts of this many batches, from the first on, are drawn."""
        if self._steady and self._busy:
            self._drawn[batches - 1] = asyncio.get_running_loop().time()

    def complete(self, batches: int) -> None:
        """Note that this many batches, from the first on, are complete."""
        now = asyncio.get_running_loop().time()
        for step in [step for step in self._drawn if step < batches]:
            self._recent.append(now - self._drawn.pop(step))

    def taken(self, step: int) -> None:
        """Note that the learner takes the batch of this step, not in a replay."""
        self._taken = step, asyncio.get_running_loop().time()

    def published(self, version: int, evaluation: int) -> None:
        """Adapt the window. evaluation: versions until the next one, 0 while one runs."""
        now = asyncio.get_running_loop().time()
        if self._taken is not None and self._taken[0] + 1 == version and self._steady:
            self._busy += (SMOOTHING if self._busy else 1.0) * (now - self._taken[1] - self._busy)
        self._taken = None
        if not self._auto:
            return
        before, memory = self._steps, self._recent.maxlen or 0
        if longest := max([*self._recent, *(now - drawn for drawn in self._drawn.values())], default=0.0):
            closed = self._needed(CLOSES * longest) if len(self._recent) == memory else self._most
            self._steps = max(min(self._steps, closed), self._needed(OPENS * longest))
        if self._steps != before:
            self._recent = deque(self._recent, min(2 * memory, LONGEST_MEMORY * self._most))
        least = math.ceil((self._most - RAMP * evaluation) * self._prompts)
        wanted = max(self._steps * self._prompts, least)
        self.tickets = min(wanted, self.tickets + math.ceil(RAMP * self._prompts))
        self._steady = self.tickets == self._steps * self._prompts and evaluation > 0

    def _needed(self, seconds: float) -> int:
        """Return W for an L of so many seconds."""
        return min(math.ceil(seconds / self._busy) + 1, self._most)
