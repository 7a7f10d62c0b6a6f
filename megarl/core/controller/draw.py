"""Which task is drawn next, and which of its prompts. Pure.

`PromptOrder` chooses the prompt, from the seed, the last draw, the number of draws, and
each prompt's latest pass rate.

Each epoch goes once through its pool, in the order of a hash of seed, epoch and prompt
id. No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had
a pass rate of `positive_threshold` or more is skipped in later epochs. If an epoch
would begin with fewer prompts than the task has in a batch, all pass rates are
forgotten.

    pool of an epoch = the easiest share of all T prompts      share, by the draws t so far; all are in after T:
                                                               none 1    linear s + (1 - s) t/T    exponential s^(1 - t/T)

(pacing functions of Hacohen and Weinshall, arXiv 1904.03626.) A pool with less than a
batch to draw from is enlarged to a batch.

`Mixture` chooses the task, from the number of draws of each.

Of t draws so far, n were of a task with share w. The task is open as soon as n < (t +
1) w, and due at draw ceil((n + 1) / w). Of the open tasks, the one that is due first is
drawn. Then for every task and every t

    | n - t w | < 1                                        so any T draws in a row have T w of the task, to within less than 2

(the quota method: Balinski and Young 1975; Baruah et al. 1996 for the deadlines.)
Tickets that are removed or void count too.
"""

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, NamedTuple

from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.journal.records import Admitted, State
from megarl.core.recipe import Recipe

START = 0.2
"""Share of all prompts, the easiest, in the first epoch of a curriculum. The pool is
enlarged to a batch if that is less.
"""


class Draw(NamedTuple):
    """One draw. reset: all pass rates were forgotten just before it. pool: number of
    (the easiest) prompts in its epoch.
    """

    prompt_id: str
    epoch: int
    reset: bool = False
    pool: int = 0


Pace = Literal["none", "linear", "exponential"]


def share(pace: Pace, drawn: int, prompts: int) -> float:
    """Return the share of the prompts in the pool of an epoch that begins after `drawn`
    draws.
    """
    done = min(1.0, drawn / prompts)
    return {"none": 1.0, "linear": START + (1 - START) * done, "exponential": START ** (1 - done)}[
        pace
    ]


class PromptOrder:
    """Draws prompts of one task. difficulty: of each prompt, by its id. drawn: number
    of draws so far. excluded: prompts that are skipped now. pool: number of prompts in
    the present epoch, the easiest. The journal's state has `drawn` and `excluded`, too,
    but a draw may begin epochs before its record exists.
    """

    def __init__(
        self,
        difficulty: Mapping[str, int],
        seed: int,
        positive_threshold: float | None,
        prompts_per_batch: int,
        pace: Pace = "none",
    ) -> None:
        self._ids = frozenset(difficulty)
        self._seed = seed
        self._threshold = positive_threshold
        self._prompts_per_batch = prompts_per_batch
        self._pace = pace
        self._easiest_first = sorted(
            self._ids, key=lambda p: (difficulty[p], self._hash("difficulty", p))
        )
        self.excluded = set[str]()
        self.drawn = 0
        self._begin(0, self._pool())

    def resume(self, last: Draw | Admitted, pass_rates: Mapping[str, float], drawn: int) -> None:
        """Continue after `last`, the last of `drawn` draws. If its prompt is no longer
        in the data, its epoch starts over.
        """
        for prompt_id, pass_rate in pass_rates.items():
            self.observe(prompt_id, pass_rate)
        self.drawn = drawn
        self._begin(last.epoch, last.pool or len(self._ids), last.prompt_id)

    def draw(self) -> Draw:
        reset = False
        while True:
            for prompt_id in self._rest:
                if prompt_id not in self.excluded:
                    self.drawn += 1
                    return Draw(prompt_id, self.epoch, reset, self.pool)
            if len(self._ids) - len(self.excluded) < self._prompts_per_batch:
                reset = True
                self.excluded.clear()
            self._begin(self.epoch + 1, self._pool())

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Note the pass rate of a finished group of this prompt; it replaces the
        earlier one.
        """
        if self._threshold is not None and pass_rate >= self._threshold and prompt_id in self._ids:
            self.excluded.add(prompt_id)
        else:
            self.excluded.discard(prompt_id)

    def _pool(self) -> int:
        """Return the pool of an epoch that begins now: the curriculum's share, enlarged
        if it is less than a batch.
        """
        wanted = math.ceil(share(self._pace, self.drawn, len(self._ids)) * len(self._ids))
        left = 0
        for n, prompt_id in enumerate(self._easiest_first, 1):
            left += prompt_id not in self.excluded
            if n >= wanted and left >= self._prompts_per_batch:
                return n
        return len(self._ids)

    def _begin(self, epoch: int, pool: int, after: str | None = None) -> None:
        """Begin an epoch, just after the prompt `after` if it is in the pool."""
        self.epoch = epoch
        self.pool = pool
        order = sorted(self._easiest_first[:pool], key=lambda p: self._hash(epoch, p))
        self._rest = iter(order[order.index(after) + 1 :] if after in order else order)

    def _hash(self, what: object, prompt_id: str) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{what}/{prompt_id}".encode(), digest_size=8).digest()


def next_task(drawn: Mapping[str, int], shares: Mapping[str, Fraction]) -> str:
    """Return the task of the next draw; ties go to the first by name."""
    t = sum(drawn.values())
    open_now = [task for task in sorted(shares) if drawn[task] < (t + 1) * shares[task]]
    return min(open_now, key=lambda task: math.ceil((drawn[task] + 1) / shares[task]))


class Mixture:
    """Draws from all tasks. curricula: their prompt orders, by name. before: draws of
    each task made under other shares.
    """

    def __init__(
        self,
        curricula: Mapping[str, PromptOrder],
        shares: Mapping[str, Fraction],
        before: Mapping[str, int] | None = None,
    ) -> None:
        self.curricula, self._shares, self._before = dict(curricula), dict(shares), before or {}

    def draw(self) -> tuple[str, Draw]:
        drawn = {task: c.drawn - self._before.get(task, 0) for task, c in self.curricula.items()}
        task = next_task(drawn, self._shares)
        return task, self.curricula[task].draw()

    def observe(self, task: str, prompt_id: str, pass_rate: float) -> None:
        self.curricula[task].observe(prompt_id, pass_rate)


def mixture_of(recipe: Recipe, prompts: Mapping[str, TaskPrompts], state: State) -> Mixture:
    """Return the mixture that continues after the draws in `state`."""
    threshold = recipe.batch.positive_threshold
    pace = recipe.data.curriculum.kind
    curricula = {}
    for task, of_task in prompts.items():
        in_batch = math.ceil(
            recipe.batch.prompts * recipe.data.shares[task]
        )  # an epoch needs as many prompts
        order = PromptOrder(
            difficulties(recipe, task, of_task), recipe.run.seed, threshold, in_batch, pace
        )
        if (history := state.tasks.get(task)) is not None:
            order.resume(history.last, history.pass_rates, history.drawn)
        curricula[task] = order
    return Mixture(curricula, recipe.data.shares, state.drawn_before)


def difficulties(recipe: Recipe, task: str, prompts: TaskPrompts) -> dict[str, int]:
    """Return the difficulty of each training prompt by its id. MegarlError if a
    curriculum finds no differences in them.
    """
    difficulty = {p.id: p.difficulty for p in prompts.train}
    if recipe.data.curriculum.kind != "none" and len(set(difficulty.values())) < 2:
        why = f"all prompts of {recipe.data.tasks[task].train} have one difficulty"
        advice = (
            "give its rows a `difficulty` (a number, smaller is easier), or set"
            " data.curriculum.kind=none"
        )
        raise MegarlError(f"data.curriculum: {why}; {advice}")
    return difficulty


def draw_metrics(mixture: Mixture) -> dict[str, float]:
    """Return the progress through the data for all tasks together and, if there are
    several, for each.
    """
    metrics: dict[str, float] = {}
    for name, together, value in (
        ("epoch", min, lambda c: c.epoch),
        ("pool_prompts", sum, lambda c: c.pool),
        ("excluded_prompts", sum, lambda c: len(c.excluded)),
    ):
        each = {f"{name}/{task}": float(value(c)) for task, c in mixture.curricula.items()}
        metrics |= {name: together(each.values())} | (each if len(each) > 1 else {})
    return metrics
