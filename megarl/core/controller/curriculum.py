"""Which prompt of a task is drawn next. Pure: a function of the seed, the last draw, how many there were, and the latest
pass rate of each prompt.

Each epoch goes once through its pool in its own shuffled order (a hash of seed, epoch and prompt id: the order of the
file does not matter). No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had a pass rate of
`positive_threshold` or more is excluded, passed over in later epochs. If an epoch would begin with fewer prompts than the
task has in a batch, none is drawn while that is so (`stop`), or all pass rates are forgotten (`reset`).

    pool of an epoch = the easiest share of all prompts        share, by the draws t so far, of T until all are in:
                                                               none 1    linear s + (1 - s) t/T    exponential s^(1 - t/T)

(pacing functions of Hacohen and Weinshall, arXiv 1904.03626.) A pool of less than a batch to draw from grows until it has one.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


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
