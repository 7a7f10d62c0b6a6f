"""`learner.microbatch_tokens: auto`: the largest micro-batch that fits on every rank's
GPU, found by a few trials.

    parts of the longest sequence ─► a line through the last two peaks
                                       ▲       └─► the largest size that should fit,
                                       │           at most doubled
                                       │             ├─► none is left:
            forward and backward ◄─────┼─────────────┘   RUN/microbatch.json
                    └──────────────────┘

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
        """Run the trial; return the most memory that torch reserved in it, as a share
        of what it may take (inf: it ran out).
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            trial()
        except OutOfMemory:
            return math.inf
        # Known only after it: in the first trial NCCL makes its communicators, whose
        # buffers are not torch's.
        free, _ = torch.cuda.mem_get_info()
        room = SHARE * (free + torch.cuda.memory_reserved())
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
            tokens = _try_sizes(trainer, longest, batch_tokens, gpu_memory())
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
        earlier = json.loads(record.read_text())
        if earlier.get("of") != conditions:
            return None
        tokens = earlier.get("microbatch_tokens")
    except (OSError, ValueError, AttributeError):  # missing or unreadable; truncated; not an object
        return None
    return tokens if type(tokens) is int else None


def largest(sizes: Sequence[int], share_of: Callable[[int], float]) -> int | None:
    """Return the largest of the ascending sizes that fits, of whose memory `share_of`
    is at most 1; None if the first takes more. A size is not tried if a line through
    the last two results predicts that it does not fit: a step's peak, as a maximum of
    straight lines, is convex.
    """
    fit: list[tuple[int, float]] = []
    low = -1
    high = len(sizes)  # sizes up to index `low` fit, those from `high` on do not
    while high - low > 1:
        if high < len(sizes):  # one did not fit: halve what is between
            middle = (low + high) // 2
        elif len(fit) < 2:  # a line needs two results
            middle = low + 1
        else:
            (size_before, used_before), (size, used) = fit[-2:]
            slope = (used - used_before) / (size - size_before)
            allowed = []
            for i in range(low + 1, high):
                predicted = used + slope * (sizes[i] - size)
                if predicted <= 1:
                    allowed.append(i)
            if not allowed:
                break
            # at most doubled: the farther, the more a line is below a convex curve
            up_to_double = [i for i in allowed if sizes[i] <= 2 * size]
            middle = max(up_to_double, default=allowed[0])
        used = share_of(sizes[middle])
        if used <= 1:
            low = middle
            fit.append((sizes[middle], used))
        else:
            high = middle
    return sizes[low] if low >= 0 else None


def _try_sizes(trainer: Trainer, longest: int, batch_tokens: int, memory: Memory) -> int:
    """Return the largest size that fits. MegarlError if the longest sequence does
    not.
    """
    # With few micro-batches, a pipeline's idle time costs more than large micro-batches
    # save.
    sizes = sizes_to_try(longest, batch_tokens // _microbatches(trainer, per_stage=4))
    # held until the trials are over
    moments = [network.moments_to_come() for network in trainer.trained]
    size = largest(sizes, lambda tokens: _share_of_memory(trainer, tokens, longest, memory))
    del moments
    if size is None or size < longest:
        raise MegarlError(
            f"learner.microbatch_tokens: a step with the longest sequence, of {longest} tokens,"
            " does not fit on a GPU; set learner.recompute=full or learner.optimizer_offload, or"
            " divide the model further"
        )
    return size


def _share_of_memory(trainer: Trainer, tokens: int, longest: int, memory: Memory) -> float:
    """Try micro-batches of `tokens` tokens; return the largest share of the memory that
    they take on any rank. COLLECTIVE.
    """
    networks = trainer.trained
    for network in networks:
        network.microbatch_tokens = tokens
    sequences = _filling(trainer, tokens, longest)

    def trial() -> None:
        for network in networks:
            network.forward_backward(sequences)

    try:
        used = memory(trial)
    finally:
        for network in networks:
            network.clear()
    if used == math.inf and dist.get_world_size() > 1:
        raise MegarlError(
            f"learner.microbatch_tokens: rank {dist.get_rank()} ran out of memory trying"
            f" {tokens} tokens while the others wait for it; give a number instead of auto"
        )
    largest_share = torch.tensor(used, device=trainer.policy.device)
    dist.all_reduce(largest_share, dist.ReduceOp.MAX)
    share = float(largest_share)
    log.info(
        "micro-batches of %d tokens take %.0f %% of the memory that they may use",
        tokens,
        100 * share,
    )
    return share


def _microbatches(trainer: Trainer, per_stage: int) -> int:
    """Return the micro-batches of a step that has one per rank, or `per_stage` for each
    stage of a pipeline.
    """
    layout = trainer.policy.layout
    stages = layout.model.pipeline_parallel
    if stages == 1:
        return layout.data_parallel
    return layout.data_parallel * per_stage * stages


def _filling(trainer: Trainer, tokens: int, longest: int) -> list[TrainSequence]:
    """Make sequences that fill micro-batches of `tokens` tokens: one per rank, or in a
    pipeline as many as it holds at once.
    """
    lengths = [longest] * (tokens // longest)
    remainder = tokens % longest
    if remainder:
        lengths.append(remainder)
    lengths *= _microbatches(trainer, per_stage=2)
    random = np.random.default_rng(0)  # equal tokens would all choose the same experts
    vocabulary = trainer.policy.family.architecture.vocabulary
    return [
        unrewarded(i, random.integers(0, vocabulary, n).astype(np.int32))
        for i, n in enumerate(lengths)
    ]


def _conditions(trainer: Trainer, longest: int) -> dict[str, object]:
    """Return what the size depends on."""
    recipe = trainer.recipe
    settings = {"recompute", "optimizer_offload"}
    conditions: dict[str, object] = {
        "model": recipe.model.model_dump(mode="json"),
        "learner": recipe.learner.model_dump(mode="json", include=settings),
        "ranks": dist.get_world_size(),
        "longest": longest,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if recipe.has_critic:
        conditions["critic"] = recipe.critic.dtype
    return conditions
