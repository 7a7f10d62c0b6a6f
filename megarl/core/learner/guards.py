"""What can go wrong in a step, named: a GPU whose memory has run out, in the words of the recipe; and the rollouts whose loss
is not finite, asked for only when the step came to nothing.

loss of each micro-batch ─► seen(micro, losses)      a flag a trained token, left on the device: no step waits for it
loss or gradient is NaN ──► offenders()              the flags of all ranks, as rows of RUN/bad-rollouts.jsonl
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.errors import MegarlError
from megarl.core.learner.microbatch import MicroBatch


class OutOfMemory(MegarlError):
    """Of this rank. Others may wait for it in a collective, so a world of several cannot go on."""


def out_of_memory_named(tokens: int) -> AbstractContextManager[None]:
    """Around work on micro-batches of up to `tokens` tokens: torch's error becomes one that names what to change."""
    return _named(
        "learner.microbatch_tokens",
        f"with {tokens} tokens a micro-batch; lower it, set learner.recompute=full or learner.optimizer_offload",
    )


def out_of_memory_in_checkpoint_named() -> AbstractContextManager[None]:
    """Likewise around the making of a checkpoint, which has no micro-batches."""
    return _named("learner.optimizer_offload", "gathering the optimiser for a checkpoint; set it")


@contextmanager
def _named(key: str, doing: str) -> Iterator[None]:
    """doing: what, and what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        (first, *_) = str(error).splitlines()
        raise OutOfMemory(
            f"{key}: rank {dist.get_rank()} ran out of memory {doing}, or divide the model further ({first})"
        ) from None


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
