"""AdamW over data-parallel chunks, the learning rate of a step, and dynamic loss scaling for fp16.

Loss scaling: the loss is multiplied by a number before the backward pass, and gradients are divided by it after.

    loss ──x scale──► backward in fp16 ──► FP32 gradients ──/ scale──► finite? ──yes──► clip, AdamW; after WINDOW: scale x 2
                                                                         └─────no───► no update; HYSTERESIS of them: scale / 2

fp16 has five bits of exponent: what is smaller than 6e-8 becomes 0, what is larger than 65,504 becomes infinite. The scale
moves the gradients of activations into between (arXiv 1710.03740, section 3.2). The rule is megatron's.
"""

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
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch.optim import AdamW

from megarl.core.base.errors import MegarlError
from megarl.core.models import build
from megarl.core.recipe import Optimizer, Recipe

INITIAL = 2.0**16
"""As torch's and DeepSpeed's. Megatron begins with 2^32 and lets the first steps overflow until the scale fits. In pre-training
that costs some text; here each such step is a batch of rollouts that servers have generated and graded."""
LEAST = 1.0
"""Megatron's. Gradients that overflow without any scaling are no matter of the scale."""
WINDOW = 1000
"""Updates without an overflow after which a larger scale is tried. Megatron's: most runs are shorter, so they try none."""
HYSTERESIS = 2
"""Overflows until the scale falls. Megatron's: one extreme batch does not lower it for all later ones. Once it has fallen, each
further overflow lowers it, until a window has passed without one."""


class LossScale(DynamicGradScaler):
    """The scale of one network on this rank; the same on all ranks, for all of them know the same norms.

    Megatron has an optimiser for a rank's experts and one for the rest, each with a scaler of its own, but multiplies the loss
    by the first one's scale only: after an overflow in one of them the other would divide by another number. So all parts of a
    network's optimiser share one of these.
    """

    def __init__(self) -> None:
        super().__init__(INITIAL, LEAST, 2.0, 0.5, WINDOW, HYSTERESIS)

    def share(self, optimizer: MegatronOptimizer) -> None:
        """Become the scaler of each part of a network's optimiser."""
        for part in optimizer.chained_optimizers:
            part.grad_scaler = self

    def update(self, found_inf: bool) -> None:
        """What each part of the optimiser calls when it has divided its gradients. Nothing: `judge` waits for all of them."""

    def judge(self, overflowed: bool) -> None:
        """Take in what became of one backward pass over all ranks."""
        super().update(overflowed)

    @property
    def value(self) -> float:
        return float(self.scale)

    @property
    def exhausted(self) -> bool:
        """Whether it cannot fall any further."""
        return self.value <= LEAST

    def plain_state(self) -> dict[str, float]:
        """For a checkpoint: numbers, no tensors."""
        return {"scale": self.value, "growth": self._growth_tracker, "hysteresis": self._hysteresis_tracker}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `plain_state`."""
        self._scale = torch.full_like(self.scale, state["scale"])
        self._growth_tracker, self._hysteresis_tracker = int(state["growth"]), int(state["hysteresis"])


def learning_rate(step: int, settings: Optimizer, steps: int) -> float:
    """Of step `step` of `steps`, counted from 0: linear warm-up, then the schedule, whose end is after the last step."""
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / settings.warmup_steps)
    if settings.schedule == "constant":
        return settings.lr
    done = min(1.0, (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * left


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
