"""Which prompt is drawn next. Pure: its state is a fold of the journal's admissions and finished groups, in their order.

Each epoch goes once through all prompts in its own shuffled order (a hash of seed, epoch and prompt id, so the file's order
does not matter). No-positive-resampling (ScaleRL, arXiv 2510.13786): a prompt whose latest group had a pass rate of
`positive_threshold` or more is passed over in later epochs. An epoch that would begin with fewer prompts than a batch
ends the run (`stop`) or forgets all pass rates (`reset`).
"""

import hashlib
from collections.abc import Iterable
from typing import Literal


class Curriculum:
    """The draw: position in the epoch's order, and which prompts are excluded.

    epoch: of the last draw, -1 before the first. exhausted: too few prompts are left and no more are drawn.
    excluded: prompts that a later epoch passes over, as things stand.
    """

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
        self._order: list[str] = []
        self._positions: dict[str, int] = {}
        self._next = 0
        self.epoch = -1
        self.exhausted = False
        self.excluded: set[str] = set()

    def draw(self) -> tuple[str, int] | None:
        """The next prompt's id and its epoch; None once too few are left."""
        while not self.exhausted:
            while self._next < len(self._order):
                prompt_id = self._order[self._next]
                self._next += 1
                if prompt_id not in self.excluded:
                    return prompt_id, self.epoch
            self._begin_next_epoch()
        return None

    def drawn(self, prompt_id: str, epoch: int) -> None:
        """Replay a draw the journal holds; the next `draw` goes on behind it. The prompt may have left the set since."""
        while self.epoch < epoch:
            self._begin_next_epoch()
            if self.exhausted:  # the recipe says stop, and did not when this was drawn
                return
        if prompt_id in self._positions:
            self._next = self._positions[prompt_id] + 1

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """A group of this prompt is finished; its pass rate replaces the earlier one."""
        if self._threshold is not None and pass_rate >= self._threshold and prompt_id in self._ids:
            self.excluded.add(prompt_id)
        else:
            self.excluded.discard(prompt_id)

    def _begin_next_epoch(self) -> None:
        if len(self._ids) - len(self.excluded) < self._prompts_per_batch:
            if self._on_exhausted == "stop":
                self.exhausted = True
                return
            self.excluded.clear()
        self.epoch += 1
        self._order = sorted(self._ids, key=self._rank)
        self._positions = {prompt_id: n for n, prompt_id in enumerate(self._order)}
        self._next = 0

    def _rank(self, prompt_id: str) -> bytes:
        return hashlib.blake2b(f"{self._seed}/{self.epoch}/{prompt_id}".encode(), digest_size=8).digest()
