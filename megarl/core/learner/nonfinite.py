"""Which rollouts of a step gave a loss that is not finite. Asked only when the step came to nothing.

loss of each micro-batch ─► seen(micro, losses)      a flag a trained token, left on the device: no step waits for it
loss or gradient is NaN ──► offenders()              the flags of all ranks, as rows of RUN/bad-rollouts.jsonl
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.microbatch import MicroBatch


class NonFinite:
    """Of one step. `members`: which of the sequences each micro-batch of this rank holds, in their order."""

    def __init__(self, sequences: Sequence[TrainSequence], members: Sequence[Sequence[int]]) -> None:
        self._sequences = sequences
        self._members = iter(members)
        self._flags: list[tuple[Sequence[int], np.ndarray, Tensor]] = []

    def seen(self, micro: MicroBatch, losses: Tensor) -> None:
        """losses [n]: of the trained tokens of the next micro-batch."""
        self._flags.append((next(self._members), micro.of, ~torch.isfinite(losses.detach())))

    def offenders(self) -> list[dict[str, Any]]:
        """Ticket and sample of the rollouts with such a token (`cause: loss`); if none has, it was the sum of the step or its
        gradient, and each of the step's rollouts may be the reason (`cause: step`). Collective: the same on all ranks."""
        mine: set[int] = set()
        for members, of, flags in self._flags:
            if len(of):
                ends = np.cumsum([len(self._sequences[i]) for i in members])
                mine |= {members[m] for m in np.searchsorted(ends, of[flags.cpu().numpy()], side="right")}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        found = sorted(set().union(*ranks))
        cause = "loss" if found else "step"
        return [
            {"ticket": self._sequences[i].ticket, "sample": self._sequences[i].sample, "cause": cause}
            for i in found or range(len(self._sequences))
        ]
