"""A GPU whose memory has run out, in the words of the recipe."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.errors import MegarlError


class OutOfMemory(MegarlError):
    """Of this rank. Others may wait for it in a collective, so a world of several cannot go on."""


@contextmanager
def out_of_memory_named(tokens: int) -> Iterator[None]:
    """Around work on micro-batches of up to `tokens` tokens: torch's error becomes one that names what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        (first, *_) = str(error).splitlines()
        raise OutOfMemory(
            f"learner.microbatch_tokens: rank {dist.get_rank()} ran out of memory with {tokens} tokens a micro-batch; lower "
            f"it, set learner.recompute=full or learner.optimizer_offload, or divide the model further ({first})"
        ) from None
