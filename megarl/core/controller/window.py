"""How far ahead of the learner prompts are drawn. With `pipeline.window: auto`, no
farther than keeps the learner from waiting.

    L    seconds from the draw of a batch's last prompt until the batch is complete;
         the largest of the last N batches
    T    seconds from the moment when the learner takes a batch until the next version
         is published; a running mean

    W = ceil(L / T) + 1 batches are drawn but not trained

The learner trains the first of them, and the last has (W - 1) T seconds.

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
        self._largest = recipe.pipeline.window_steps  # k + 1
        self._auto = recipe.pipeline.window == "auto" and recipe.pipeline.kind == "pipeline-rl"
        self.tickets = self._largest * self._prompts
        if tickets and self._auto:
            self.tickets = tickets
        self._width = math.ceil(self.tickets / self._prompts)  # W
        self._steady = True  # not widening, and no evaluation is running
        # When the last prompt of each measured batch was drawn, by the batch's step.
        self._draw_times: dict[int, float] = {}
        # The step that the learner trains, and when it took the batch.
        self._training: tuple[int, float] | None = None
        self._step_seconds = 0.0  # T; 0 before the first step
        # L of each of the last N batches.
        self._batch_seconds: deque[float] = deque(maxlen=self._largest)

    @property
    def batches(self) -> float:
        """Number of batches that may be drawn but not trained."""
        return self.tickets / self._prompts

    @property
    def lead(self) -> int:
        """Number of publications in which the window widens from 0 to k + 1. An
        evaluation farther away has no effect yet.
        """
        return math.ceil(self._largest / RAMP)

    def note_drawn(self, batches: int) -> None:
        """Note that all prompts of the first `batches` batches are drawn."""
        if self._steady and self._step_seconds:
            self._draw_times[batches - 1] = _loop_time()

    def note_complete(self, batches: int) -> None:
        """Note that the first `batches` batches are complete."""
        complete_steps = [step for step in self._draw_times if step < batches]
        for step in complete_steps:
            self._batch_seconds.append(_loop_time() - self._draw_times.pop(step))

    def note_taken(self, step: int) -> None:
        """Note that the learner takes this step's batch. Not called in a replay."""
        self._training = (step, _loop_time())

    def note_published(self, version: int, evaluation: int) -> None:
        """Adapt the window at a publication. evaluation: number of versions until the
        next evaluation, 0 while one runs.
        """
        self._measure_step(version)
        if not self._auto:
            return
        self._adapt_width()
        # Have the full width, k + 1 batches, when an evaluation takes servers away.
        width_for_evaluation = self._largest - RAMP * evaluation
        by_width = self._width * self._prompts
        for_evaluation = math.ceil(width_for_evaluation * self._prompts)
        widened = self.tickets + math.ceil(RAMP * self._prompts)
        self.tickets = min(max(by_width, for_evaluation), widened)
        self._steady = self.tickets == by_width and evaluation > 0

    def _measure_step(self, version: int) -> None:
        """Update T with the step that ends with this version."""
        training = self._training
        self._training = None
        if training is None or not self._steady:
            return
        step, start = training
        if step + 1 != version:
            return
        seconds = _loop_time() - start
        weight = SMOOTHING if self._step_seconds else 1.0  # the first step is T
        self._step_seconds += weight * (seconds - self._step_seconds)

    def _adapt_width(self) -> None:
        """Change W if the longest batch needs a wider window, or a narrower one is
        clearly enough.
        """
        incomplete = [_loop_time() - drawn_at for drawn_at in self._draw_times.values()]
        longest = max([*self._batch_seconds, *incomplete], default=0.0)
        if not longest:
            return
        memory = self._batch_seconds.maxlen or 0
        width_before = self._width
        enough = self._largest  # not known before N batches are measured
        if len(self._batch_seconds) == memory:
            enough = self._width_for(CLOSES * longest)
        least = self._width_for(OPENS * longest)
        self._width = max(least, min(self._width, enough))
        if self._width != width_before:
            longer_memory = min(2 * memory, LONGEST_MEMORY * self._largest)
            self._batch_seconds = deque(self._batch_seconds, longer_memory)

    def _width_for(self, seconds: float) -> int:
        """Return W for an L of `seconds`."""
        return min(math.ceil(seconds / self._step_seconds) + 1, self._largest)


def _loop_time() -> float:
    """Return the event loop's time: the simulator's loop has a clock of its own."""
    return asyncio.get_running_loop().time()
