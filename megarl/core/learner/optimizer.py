"""AdamW over data-parallel chunks, and the learning rate of a step."""

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch.optim import AdamW

from megarl.core.base.errors import MegarlError
from megarl.core.learner.loss_scale import LossScale
from megarl.core.models import build
from megarl.core.recipe import Optimizer, Recipe


def learning_rate(step: int, settings: Optimizer, steps: int) -> float:
    """Of step `step` of `steps`, counted from 0: linear warm-up, then the schedule, whose end is after the last step."""
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / settings.warmup_steps)
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.final_lr_ratio + (1 - settings.final_lr_ratio) * left)


BUCKET: int | None = None
"""Parameters whose gradients are reduced together; None: megatron's choice, 40 million or one million a rank."""


def overlaps() -> bool:
    """Whether gradients are reduced while others are computed: where there is more than one rank, and a GPU to do both.

    Weights are not gathered while the next step computes (overlap_param_gather): what is published, saved and asked between
    steps would be in part the weights of the step before.
    """
    return torch.cuda.is_available() and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1


def with_optimizer(
    chunks: list[Any], settings: Optimizer, recipe: Recipe, offload: float = 0.0
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, LossScale | None]:
    """Chunks wrapped for data parallelism with FP32 gradients, AdamW with its state divided among the ranks, and the loss scale
    of an fp16 model, by which the pipeline schedule multiplies each loss.

    offload: share of it that lies in the host's memory and is updated by its cores; with bf16 only.
    """
    if offload and not torch.cuda.is_available():
        raise MegarlError("learner.optimizer_offload: takes AdamW off a GPU, and there is none here; set it to 0")
    config = chunks[0].config
    # Gradients are summed, not averaged: scaling factor 1 in DDP, and no division by a number of tokens at the end.
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda model, _tokens, **groups: finalize_model_grads(model, None, **groups)
    overlap = overlaps()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=BUCKET
    )
    ddp = [DistributedDataParallel(config, ddp_config, c, disable_bucketing=i > 0) for i, c in enumerate(chunks)]
    if overlap:
        config.no_sync_func = [d.no_sync for d in ddp] if len(ddp) > 1 else ddp[0].no_sync
    dtype = build.DTYPES[recipe.model.dtype]
    half = dtype != torch.float32
    adam = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=True,
        # As megatron's own training demands: the offloaded optimiser keeps the FP32 weights itself, and reads `decoupled_grad`.
        use_precision_aware_optimizer=offload > 0,
    )
    groups = get_standard_config_overrides(adam)
    if (
        half
    ):  # a critic's head is FP32: megatron mixes up a parameter group that has both (its order and that of its state)
        groups[ParamKey(predicate=ParamPredicate("fp32", lambda p: p.dtype == torch.float32))] = {"wd_mult": 1.0}
    optimizer = get_megatron_optimizer(adam, ddp, groups)
    if torch.cuda.is_available():
        _in_one_kernel(optimizer)
    if dtype != torch.float16:
        return ddp, optimizer, None
    scale = LossScale()
    scale.share(optimizer)
    config.grad_scale_func = lambda loss: loss * scale.scale  # the last stage's losses, and experts' balancing losses
    return ddp, optimizer, scale


def _in_one_kernel(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW, where no fused one is installed: else it makes a square root of all second moments at once on a GPU, 4
    bytes a parameter. megatron passes it no such choice."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True
