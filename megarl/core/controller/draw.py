"""Which task the next prompt is of, and which prompt of that task. Pure.

`Curriculum`, the prompt: a function of the seed, the last draw, how many there were, and the latest pass rate of each prompt.

Each epoch goes once through its pool in its own shuffled order (a hash of seed, epoch and prompt id: the order of the
file does not matter). No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had a pass rate of
`positive_threshold` or more is excluded, passed over in later epochs. If an epoch would begin with fewer prompts than the
task has in a batch, none is drawn while that is so (`stop`), or all pass rates are forgotten (`reset`).

    pool of an epoch = the easiest share of all prompts        share, by the draws t so far, of T until all are in:
                                                               none 1    linear s + (1 - s) t/T    exponential s^(1 - t/T)

(pacing functions of Hacohen and Weinshall, arXiv 1904.03626.) A pool of less than a batch to draw from grows until it has one.

`Mixture`, the task: a function of how many were drawn of each.

With shares w (of 1), n draws of a task so far and t of all, its next draw is open as soon as n < (t + 1) w and due at
draw ceil((n + 1) / w): of the tasks that are open the one that is due first is drawn. Then for every task and every t

    | n - t w | < 1                                        in any window of T draws as many as T w, but for less than 2

(the quota method: Balinski and Young 1975; Baruah et al. 1996 for the deadlines.) Counted are prompts drawn, so tickets
that are removed or void count too. A task without prompts left is passed over: the others share its draws by their weights.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.journal.records import State
from megarl.core.recipe import Recipe


class Draw(NamedTuple):
    """reset: all pass rates were forgotten just before it. pool: how many of the easiest prompts its epoch goes through."""

    prompt_id: str
    epoch: int
    reset: bool = False
    pool: int = 0


@dataclass(frozen=True)
class Pace:
    """How the pool grows: from `start`, a share of all prompts, to all of them after `draws` draws."""

    kind: Literal["none", "linear", "exponential"] = "none"
    start: float = 1.0
    draws: int = 1

    def share(self, drawn: int) -> float:
        """Of the prompts that an epoch may have which begins after so many draws."""
        done = min(1.0, drawn / self.draws)
        match self.kind:
            case "linear":
                return self.start + (1 - self.start) * done
            case "exponential":
                return self.start ** (1 - done)
        return 1.0


class Curriculum:
    """The draw. `drawn`: how many so far. `exhausted`: the last draw found too few prompts left. `excluded`: prompts, as
    things stand.

    `pool`: how many of the easiest prompts the present epoch goes through. difficulty: by prompt, 0 where it is missing.
    """

    def __init__(
        self,
        prompt_ids: Iterable[str],
        seed: int,
        positive_threshold: float | None,
        prompts_per_batch: int,
        on_exhausted: Literal["stop", "reset"],
        difficulty: Mapping[str, int] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._ids = frozenset(prompt_ids)
        self._seed = seed
        self._threshold = positive_threshold
        self._prompts_per_batch = prompts_per_batch
        self._on_exhausted = on_exhausted
        known = difficulty or {}
        self._easiest_first = sorted(self._ids, key=lambda p: (known.get(p, 0), self._hash("difficulty", p)))
        self._pace = pace or Pace()
        self.drawn = 0
        self.excluded: set[str] = set()
        self.exhausted = False
        self._begin(0, self._pool())

    def resume(self, last: Draw, pass_rates: Mapping[str, float], drawn: int) -> None:
        """Go on behind this draw, the last of `drawn`. If its prompt has left the set since, the epoch begins again."""
        for prompt_id, pass_rate in pass_rates.items():
            self.observe(prompt_id, pass_rate)
        self.drawn = drawn
        self._begin(last.epoch, last.pool or len(self._ids))
        if last.prompt_id in self._order:
            self._next = self._order.index(last.prompt_id) + 1

    def draw(self) -> Draw | None:
        """The next prompt; None, and no change, while too few are left."""
        reset = False
        while True:
            for n in range(self._next, len(self._order)):
                if self._order[n] not in self.excluded:
                    self._next = n + 1
                    self.drawn += 1
                    self.exhausted = False
                    return Draw(self._order[n], self.epoch, reset, self.pool)
            if len(self._ids) - len(self.excluded) < self._prompts_per_batch:
                if self._on_exhausted == "stop":
                    self.exhausted = True
                    return None
                reset = True
                self.excluded.clear()
            self._begin(self.epoch + 1, self._pool())

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """A group of this prompt is finished; its pass rate replaces the earlier one."""
        if self._threshold is not None and pass_rate >= self._threshold and prompt_id in self._ids:
            self.excluded.add(prompt_id)
        else:
            self.excluded.discard(prompt_id)

    def _pool(self) -> int:
        """Of an epoch that begins now: the pace's share, or more if that leaves less than a batch to draw from."""
        wanted, left = math.ceil(self._pace.share(self.drawn) * len(self._ids)), 0
        for n, prompt_id in enumerate(self._easiest_first, 1):
            left += prompt_id not in self.excluded
            if n >= wanted and left >= self._prompts_per_batch:
                return n
        return len(self._ids)

    def _begin(self, epoch: int, pool: int) -> None:
        self.epoch, self.pool = epoch, pool
        self._order = sorted(self._easiest_first[:pool], key=lambda p: self._hash(epoch, p))
        self._next = 0

    def _hash(self, what: object, prompt_id: str) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{what}/{prompt_id}".encode(), digest_size=8).digest()


def next_task(drawn: Mapping[str, int], shares: Mapping[str, Fraction]) -> str:
    """The task of the next draw, of those that `shares` names; ties go to the first by name. The shares' sum counts as 1."""
    whole, t = sum(shares.values()), sum(drawn[task] for task in shares)
    open_now = [task for task in sorted(shares) if drawn[task] * whole < (t + 1) * shares[task]]
    return min(open_now, key=lambda task: math.ceil((drawn[task] + 1) * whole / shares[task]))


class Mixture:
    """The draw over all tasks. `curricula`: of each task, by name."""

    def __init__(self, curricula: Mapping[str, Curriculum], shares: Mapping[str, Fraction]) -> None:
        self.curricula, self._shares = dict(curricula), dict(shares)

    def draw(self) -> tuple[str, Draw] | None:
        """The next prompt and its task; None while no task has enough left."""
        left = dict(self._shares)
        while left:
            task = next_task({task: c.drawn for task, c in self.curricula.items()}, left)
            drawn = self.curricula[task].draw()
            if drawn is not None:
                return task, drawn
            del left[task]
        return None

    def observe(self, task: str, prompt_id: str, pass_rate: float) -> None:
        """A group of this prompt is finished; its pass rate replaces the earlier one."""
        self.curricula[task].observe(prompt_id, pass_rate)

    @property
    def exhausted(self) -> bool:
        """Whether no task has prompts left."""
        return all(curriculum.exhausted for curriculum in self.curricula.values())


def mixture_of(recipe: Recipe, prompts: Mapping[str, TaskPrompts], state: State) -> Mixture:
    """It goes on behind the draws in `state`."""
    curricula = {task: _curriculum(recipe, task, of_task) for task, of_task in prompts.items()}
    for task, curriculum in curricula.items():
        if (history := state.tasks.get(task)) is not None:
            last = history.last
            drawn = Draw(last.prompt_id, last.epoch, last.reset, last.pool)
            curriculum.resume(drawn, history.pass_rates, history.drawn)
    return Mixture(curricula, recipe.data.shares)


def _curriculum(recipe: Recipe, task: str, prompts: TaskPrompts) -> Curriculum:
    """At the beginning. A task's share of a batch is what it needs for an epoch, and its share of the draws is its pace."""
    chosen, share = recipe.data.curriculum, recipe.data.shares[task]
    difficulty = {p.id: p.difficulty for p in prompts.train}
    if chosen.kind != "none" and len(set(difficulty.values())) < 2:
        raise MegarlError(
            f"data.curriculum: all prompts of {recipe.data.tasks[task].train} have one difficulty; give its rows a "
            "`difficulty` (a number, smaller is easier), or set data.curriculum.kind=none"
        )
    in_batch = recipe.batch.prompts * share
    return Curriculum(
        difficulty, recipe.run.seed, recipe.batch.positive_threshold, math.ceil(in_batch), recipe.data.on_exhausted,
        difficulty, Pace(chosen.kind, chosen.start, math.ceil(chosen.steps * in_batch)),
    )  # fmt: skip


def draw_metrics(mixture: Mixture) -> dict[str, float]:
    """Of all tasks together, and of each when there are several: how far the passes over the data are."""
    each = {
        task: {"epoch": float(c.epoch), "pool_prompts": float(c.pool), "excluded_prompts": float(len(c.excluded))}
        for task, c in mixture.curricula.items()
    }
    found = {
        "epoch": min(m["epoch"] for m in each.values()),
        "pool_prompts": sum(m["pool_prompts"] for m in each.values()),
        "excluded_prompts": sum(m["excluded_prompts"] for m in each.values()),
    }
    if len(each) > 1:
        found |= {f"{name}/{task}": value for task, metrics in each.items() for name, value in metrics.items()}
    return found
