"""`learner.microbatch_tokens: auto`: the largest micro-batch that fits on every rank's
GPU, found by a few trials.

    parts of the longest sequence ─► a line through the last two peaks ─► the largest size that should fit, at most doubled
                                            ▲                                    │
                                            └────── forward and backward ◄───────┘   none is left ─► RUN/microbatch.json

A trial trains nothing. During trials, memory is reserved for the moments that AdamW has
not allocated yet. The size changes only the rounding of sums, but a run keeps it: the
file is used as long as layout and GPU are the same.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.algorithm.batch import TrainSequence, unrewarded
from megarl.core.algorithm.packing import sizes_to_try
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import from_rank_0
from megarl.core.base.rundir import write_atomically
from megarl.core.learner.network import OutOfMemory
from megarl.core.learner.trainer import Trainer

log = logging.getLogger(__name__)

SHARE = 0.9
"""Share of a GPU's free memory that a trial may take; the rest is for experts that get
more tokens, and for publications.
"""

type Memory = Callable[[Callable[[], None]], float]
"""Runs a trial and returns its peak, as a share of the memory it may take. Above 1 is
too much; inf: the memory ran out.
"""


def gpu_memory() -> Memory:
    """Return a `Memory` for this rank's GPU. A trial may use the memory that others
    leave free after it.
    """
    if not torch.cuda.is_available():
        advice = "give a number"
        raise MegarlError(
            "learner.microbatch_tokens: auto tries sizes on a GPU, but this machine has none;"
            f" {advice}"
        )

    def used(trial: Callable[[], None]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            trial()
        except OutOfMemory:
            return math.inf
        # Known only now: in the first trial NCCL makes its communicators, whose buffers
        # are not torch's.
        room = SHARE * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
        return torch.cuda.max_memory_reserved() / room

    return used


def settle(
    trainer: Trainer,
    longest: int,
    batch_tokens: int,
    record: Path | None,
    within: AbstractContextManager[None] | None = None,
) -> None:
    """Set the micro-batch size of the trainer's networks, if the recipe says `auto`.
    COLLECTIVE over all ranks. longest: tokens of the longest sequence; batch_tokens:
    the most in a step; record: a file that keeps the size; within: wraps the trials.
    """
    if trainer.recipe.learner.microbatch_tokens != "auto":
        return
    conditions = _conditions(trainer, longest)
    record = record if dist.get_rank() == 0 else None
    tokens = from_rank_0(_recorded(record, conditions) if record else None)
    if tokens is None:
        with within or nullcontext():
            tokens = _found(trainer, longest, batch_tokens, gpu_memory())
        if record:
            chosen = {"microbatch_tokens": tokens, "of": conditions}
            write_atomically(record, json.dumps(chosen, indent=2).encode() + b"\n")
    for network in trainer.networks:
        network.microbatch_tokens = tokens
    log.info("micro-batches have up to %d tokens", tokens)


def _recorded(record: Path, conditions: dict[str, object]) -> int | None:
    """Return the size found earlier under the same conditions; None if there is none or
    the file is not valid.
    """
    try:
        known = json.loads(record.read_text())
        tokens = known.get("microbatch_tokens") if known.get("of") == conditions else None
    except (OSError, ValueError, AttributeError):  # missing or unreadable; truncated; not an object
        return None
    return tokens if type(tokens) is int else None


def largest(sizes: Sequence[int], tried: Callable[[int], float]) -> int | None:
    """Return the largest of the ascending sizes that fits; None if the first takes more
    than 1. A size is not tried if a line through the last two results predicts that it
    does not fit: a step's peak, as a maximum of straight lines, is convex.
    """
    fit: list[tuple[int, float]] = []
    low = -1
    high = len(sizes)  # sizes up to index `low` fit, those from `high` on do not
    while high - low > 1:
        if high < len(sizes):
            middle = (low + high) // 2
        elif len(fit) < 2:
            middle = low + 1
        else:
            (size_before, used_before), (size, used) = fit[-2:]
            slope = (used - used_before) / (size - size_before)
            allowed = [i for i in range(low + 1, high) if used + slope * (sizes[i] - size) <= 1]
            if not allowed:
                break
            middle = max((i for i in allowed if sizes[i] <= 2 * size), default=allowed[0])
        used = tried(sizes[middle])
        if used <= 1:
            low = middle
            fit.append((sizes[middle], used))
        else:
            high = middle
    return sizes[low] if low >= 0 else None


def _found(trainer: Trainer, longest: int, batch_tokens: int, memory: Memory) -> int:
    networks = trainer.trained
    layout = trainer.policy.layout
    # With few micro-batches, a pipeline's idle time costs more than large micro-batches
    # save.
    share = layout.data_parallel * (
        4 * layout.model.pipeline_parallel if layout.model.pipeline_parallel > 1 else 1
    )
    sizes = sizes_to_try(longest, batch_tokens // share)
    moments = [network.moments_to_come() for network in networks]

    def tried(tokens: int) -> float:
        for network in networks:
            network.microbatch_tokens = tokens
        sequences = _full(trainer, tokens, longest)

        def trial() -> None:
            for network in networks:
                network.forward_backward(sequences)

        try:
            used = memory(trial)
        finally:
            for network in networks:
                network.clear()
        if used == math.inf and dist.get_world_size() > 1:
            why = (
                f"rank {dist.get_rank()} ran out of memory trying {tokens} tokens while the others"
                " wait for it"
            )
            advice = "give a number instead of auto"
            raise MegarlError(f"learner.microbatch_tokens: {why}; {advice}")
        most = torch.tensor(used, device=trainer.policy.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        log.info(
            "micro-batches of %d tokens take %.0f %% of the memory that they may use",
            tokens,
            100 * float(most),
        )
        return float(most)

    found = largest(sizes, tried)
    del moments
    if found is None or found < longest:
        why = f"a step with the longest sequence, of {longest} tokens, does not fit on a GPU"
        advice = (
            "set learner.recompute=full or learner.optimizer_offload, or divide the model further"
        )
        raise MegarlError(f"learner.microbatch_tokens: {why}; {advice}")
    return found


def _full(trainer: Trainer, tokens: int, longest: int) -> list[TrainSequence]:
    """Make sequences that fill micro-batches of `tokens` tokens: one per rank, or in a
    pipeline as many as it holds at once.
    """
    layout = trainer.policy.layout
    count = layout.data_parallel * (
        2 * layout.model.pipeline_parallel if layout.model.pipeline_parallel > 1 else 1
    )
    pieces = [longest] * (tokens // longest) + [tokens % longest] * bool(tokens % longest)
    random = np.random.default_rng(0)  # equal tokens would all choose the same experts
    vocabulary = trainer.policy.family.architecture.vocabulary
    return [
        unrewarded(i, random.integers(0, vocabulary, n).astype(np.int32))
        for i, n in enumerate(pieces * count)
    ]


def _conditions(trainer: Trainer, longest: int) -> dict[str, object]:
    recipe = trainer.recipe
    return {
        "model": recipe.model.model_dump(mode="json"),
        "learner": recipe.learner.model_dump(
            mode="json", include={"recompute", "optimizer_offload"}
        ),
        "ranks": dist.get_world_size(),
        "longest": longest,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    } | ({"critic": recipe.critic.dtype} if recipe.has_critic else {})
