"""Which prompt is drawn next. Pure: a function of the seed, the last prompt drawn and the latest pass rate of each.

Each epoch goes once through all prompts in its own shuffled order (a hash of seed, epoch and prompt id: the order of the
file does not matter). No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had a pass rate of
`positive_threshold` or more is excluded, passed over in later epochs. If an epoch would begin with fewer prompts than a
batch, no more are drawn (`stop`) or all pass rates are forgotten (`reset`).
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple


class Draw(NamedTuple):
    """reset: all pass rates were forgotten just before it."""

    prompt_id: str
    epoch: int
    reset: bool = False


class Curriculum:
    """The draw. `exhausted`: too few prompts are left and no more are drawn. `excluded`: prompts, as things stand."""

    def __init__(
        self,
        prompt_ids: Iterable[str],
        seed: int,
        positive_threshold: float | None,
        prompts_per_batch: int,
        on_exhausted: Literal["stop", "reset"],
    ) -> None:
        self._ids = frozenset(prompt_ids)
        self._seed = seed
        self._threshold = positive_threshold
        self._prompts_per_batch = prompts_per_batch
        self._on_exhausted = on_exhausted
        self.excluded: set[str] = set()
        self.exhausted = False
        self._begin(0)

    def resume(self, last: Draw, pass_rates: Mapping[str, float]) -> None:
        """Go on behind this draw. If its prompt has left the set since, the epoch begins again."""
        for prompt_id, pass_rate in pass_rates.items():
            self.observe(prompt_id, pass_rate)
        self._begin(last.epoch)
        if last.prompt_id in self._ids:
            self._next = self._order.index(last.prompt_id) + 1

    def draw(self) -> Draw | None:
        """The next prompt; None once too few are left."""
        reset = False
        while not self.exhausted:
            for n in range(self._next, len(self._order)):
                if self._order[n] not in self.excluded:
                    self._next = n + 1
                    return Draw(self._order[n], self.epoch, reset)
            if len(self._ids) - len(self.excluded) < self._prompts_per_batch:
                reset = self._on_exhausted == "reset"
                self.exhausted = not reset
                self.excluded.clear()
            self._begin(self.epoch + 1)
        return None

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """A group of this prompt is finished; its pass rate replaces the earlier one."""
        if self._threshold is not None and pass_rate >= self._threshold and prompt_id in self._ids:
            self.excluded.add(prompt_id)
        else:
            self.excluded.discard(prompt_id)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._order = sorted(self._ids, key=self._rank)
        self._next = 0

    def _rank(self, prompt_id: str) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{self.epoch}/{prompt_id}".encode(), digest_size=8).digest()
