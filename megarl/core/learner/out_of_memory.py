"""A GPU whose memory has run out, in the words of the recipe."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.errors import MegarlError


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
