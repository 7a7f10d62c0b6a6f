"""Weights that are gathered after an update while the next forward pass already
computes.

AdamW updates a part of each bucket of weights on each data-parallel rank. Usually the
update ends when all ranks have gathered all parts. Where no publication follows, they
are gathered later:

    update ──► next forward pass
                 layer 1 waits for its bucket, and begins to gather the next
                 layer 2 waits for its bucket, …
                 the head, whose weight is read by our own code, needs them all

Until then a rank's weights are partly those before the update. Whoever reads them other
than by a forward pass (publication, checkpoints, export) first calls `gather`, on all
ranks.

The forward pass is megatron's (overlap_param_gather in its DistributedDataParallel): a
hook before each module waits for the bucket of the module's own parameters.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.nn import Module


def gather_before_head(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make each chunk wait for all of its weights when its layers have run.

    Megatron waits for a module's weights just before that module is called. But some
    weights are read without such a call, so that nothing would wait for them: the
    head's, which may be the embedding's (network.py), and those of an expert that got
    no token.
    """
    for chunk in chunks:
        chunk.module.decoder.register_forward_hook(partial(_gather_rest, chunk))


def _gather_rest(
    chunk: DistributedDataParallel, _decoder: Module, _inputs: object, _output: object
) -> None:
    """Gather what the layers have not waited for: a hook of torch, after them."""
    gather([chunk])


@torch.no_grad()
def gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Complete all of this rank's weights; at once if they are. COLLECTIVE over
    data-parallel ranks.
    """
    for buckets in incomplete(chunks):
        buckets.start_param_sync(force_sync=True)


def incomplete(chunks: Sequence[DistributedDataParallel]) -> Iterator[_ParamAndGradBucketGroup]:
    """Yield the buckets of which this rank may not have all current weights."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            under_way = buckets.param_gather_handle is not None
            if under_way or not buckets.param_gather_dispatched:
                yield buckets


def updated(chunks: Sequence[DistributedDataParallel]) -> None:
    """Note that each rank has changed its part of the weights."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.reset_param_sync_dispatch_state()
