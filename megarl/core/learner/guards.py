"""A full GPU, in the words of the recipe."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.core.base.errors import MegarlError


class OutOfMemory(MegarlError):
    """This rank ran out of memory. Others may wait for it in a collective, so a world of several cannot go on."""


def microbatches_of(tokens: int) -> tuple[str, str]:
    """Return the arguments of `out_of_memory_named` for work on micro-batches of up to `tokens` tokens."""
    advice = "lower it, set learner.recompute=full or learner.optimizer_offload"
    return "learner.microbatch_tokens", f"with {tokens} tokens a micro-batch; {advice}"


@contextmanager
def out_of_memory_named(key: str, doing: str) -> Iterator[None]:
    """Turn torch's error within into one that names the recipe's key. doing: what was done, and what to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        (first, *_) = str(error).splitlines()
        raise OutOfMemory(
            f"{key}: rank {dist.get_rank()} ran out of memory {doing}, or divide the model further ({first})"
        ) from None
