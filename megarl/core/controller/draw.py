"""Which task is drawn next, and which of its prompts. Pure.

`PromptOrder` chooses the prompt, from the seed, the last draw, the number of draws, and
each prompt's latest pass rate.

Each epoch goes once through its pool, in the order of a hash of seed, epoch and prompt
id. No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had
a pass rate of `positive_threshold` or more is skipped in later epochs. If an epoch
would begin with fewer prompts than the task has in a batch, all pass rates are
forgotten.

    pool of an epoch = the easiest share of all T prompts

The share by the draws t so far, all prompts being in after T draws:

    none 1        linear s + (1 - s) t/T        exponential s^(1 - t/T)

(pacing functions of Hacohen and Weinshall, arXiv 1904.03626.) A pool with less than a
batch to draw from is enlarged to a batch.

`Mixture` chooses the task, from the number of draws of each.

Of t draws so far, n were of a task with share w. The task is open as soon as n < (t +
1) w, and due at draw ceil((n + 1) / w). Of the open tasks, the one that is due first is
drawn. Then for every task and every t

    | n - t w | < 1

so any T draws in a row have T w of the task, to within less than 2 (the quota method:
Balinski and Young 1975; Baruah et al. 1996 for the deadlines). Tickets that are removed
or void count too.
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
    progress = min(1.0, drawn / prompts)
    if pace == "linear":
        return START + (1 - START) * progress
    if pace == "exponential":
        return START ** (1 - progress)
    return 1.0


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
            self._ids,
            key=lambda prompt_id: (difficulty[prompt_id], self._hash("difficulty", prompt_id)),
        )
        self.excluded = set[str]()
        self.drawn = 0
        self._start_epoch(0, self._pool())

    def resume(self, last: Draw | Admitted, pass_rates: Mapping[str, float], drawn: int) -> None:
        """Continue after `last`, the last of `drawn` draws. pass_rates: the latest of
        each prompt. If the last prompt is no longer in the data, its epoch starts over.
        """
        for prompt_id, pass_rate in pass_rates.items():
            self.observe(prompt_id, pass_rate)
        self.drawn = drawn
        self._start_epoch(last.epoch, last.pool or len(self._ids), last.prompt_id)

    def draw(self) -> Draw:
        """Return the next draw. Begins an epoch when the present one is used up."""
        reset = False
        while True:
            for prompt_id in self._remaining:
                if prompt_id not in self.excluded:
                    self.drawn += 1
                    return Draw(prompt_id, self.epoch, reset, self.pool)
            if len(self._ids) - len(self.excluded) < self._prompts_per_batch:
                reset = True
                self.excluded.clear()
            self._start_epoch(self.epoch + 1, self._pool())

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Note the pass rate of a finished group of this prompt; it replaces the
        earlier one.
        """
        is_positive = self._threshold is not None and pass_rate >= self._threshold
        if is_positive and prompt_id in self._ids:
            self.excluded.add(prompt_id)
        else:
            self.excluded.discard(prompt_id)

    def _pool(self) -> int:
        """Return the pool of an epoch that begins now: the curriculum's share, enlarged
        if it is less than a batch.
        """
        prompts = len(self._ids)
        curriculum_pool = math.ceil(share(self._pace, self.drawn, prompts) * prompts)
        drawable = 0
        for pool, prompt_id in enumerate(self._easiest_first, 1):
            if prompt_id not in self.excluded:
                drawable += 1
            if pool >= curriculum_pool and drawable >= self._prompts_per_batch:
                return pool
        return prompts

    def _start_epoch(self, epoch: int, pool: int, last_prompt: str | None = None) -> None:
        """Start an epoch, just after the prompt `last_prompt` if its pool has that."""
        self.epoch = epoch
        self.pool = pool
        order = sorted(
            self._easiest_first[:pool], key=lambda prompt_id: self._hash(epoch, prompt_id)
        )
        if last_prompt in order:
            order = order[order.index(last_prompt) + 1 :]
        self._remaining = iter(order)

    def _hash(self, purpose: object, prompt_id: str) -> bytes:
        """Return a prompt's key in a pseudo-random order. purpose: the epoch, or a
        word; each has an order of its own.
        """
        text = f"{self._seed}/{purpose}/{prompt_id}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()


def next_task(drawn: Mapping[str, int], shares: Mapping[str, Fraction]) -> str:
    """Return the task of the next draw; ties go to the first by name."""
    draws = sum(drawn.values())
    open_tasks = [task for task in sorted(shares) if drawn[task] < (draws + 1) * shares[task]]
    return min(open_tasks, key=lambda task: math.ceil((drawn[task] + 1) / shares[task]))


class Mixture:
    """Draws from all tasks. orders: their prompt orders, by name. earlier_draws: of
    each task, made under other shares.
    """

    def __init__(
        self,
        orders: Mapping[str, PromptOrder],
        shares: Mapping[str, Fraction],
        earlier_draws: Mapping[str, int] | None = None,
    ) -> None:
        self.orders = dict(orders)
        self._shares = dict(shares)
        self._earlier_draws = earlier_draws or {}

    def draw(self) -> tuple[str, Draw]:
        """Return the task and the draw from it."""
        drawn = {}
        for task, order in self.orders.items():
            drawn[task] = order.drawn - self._earlier_draws.get(task, 0)
        task = next_task(drawn, self._shares)
        return task, self.orders[task].draw()

    def observe(self, task: str, prompt_id: str, pass_rate: float) -> None:
        """Note the pass rate of a finished group."""
        self.orders[task].observe(prompt_id, pass_rate)


def mixture_of(recipe: Recipe, prompts: Mapping[str, TaskPrompts], state: State) -> Mixture:
    """Return the mixture that continues after the draws in `state`."""
    threshold = recipe.batch.positive_threshold
    pace = recipe.data.curriculum.kind
    orders = {}
    for task, task_prompts in prompts.items():
        # An epoch needs as many prompts as a batch has.
        prompts_per_batch = math.ceil(recipe.batch.prompts * recipe.data.shares[task])
        difficulty = difficulties(recipe, task, task_prompts)
        order = PromptOrder(difficulty, recipe.run.seed, threshold, prompts_per_batch, pace)
        history = state.tasks.get(task)
        if history is not None:
            order.resume(history.last, history.pass_rates, history.drawn)
        orders[task] = order
    return Mixture(orders, recipe.data.shares, state.drawn_before)


def difficulties(recipe: Recipe, task: str, prompts: TaskPrompts) -> dict[str, int]:
    """Return the difficulty of each training prompt by its id. MegarlError if a
    curriculum finds no differences in them.
    """
    difficulty = {p.id: p.difficulty for p in prompts.train}
    if recipe.data.curriculum.kind != "none" and len(set(difficulty.values())) < 2:
        raise MegarlError(
            f"data.curriculum: all prompts of {recipe.data.tasks[task].train} have one difficulty;"
            " give its rows a `difficulty` (a number, smaller is easier), or set"
            " data.curriculum.kind=none"
        )
    return difficulty


def draw_metrics(mixture: Mixture) -> dict[str, float]:
    """Return the progress through the data for all tasks together and, if there are
    several, for each.
    """
    orders = mixture.orders
    epochs = {task: float(order.epoch) for task, order in orders.items()}
    pools = {task: float(order.pool) for task, order in orders.items()}
    excluded = {task: float(len(order.excluded)) for task, order in orders.items()}
    metrics = {
        "epoch": min(epochs.values()),
        "pool_prompts": sum(pools.values()),
        "excluded_prompts": sum(excluded.values()),
    }
    if len(orders) > 1:
        for task in orders:
            metrics[f"epoch/{task}"] = epochs[task]
            metrics[f"pool_prompts/{task}"] = pools[task]
            metrics[f"excluded_prompts/{task}"] = excluded[task]
    return metrics
