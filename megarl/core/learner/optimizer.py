"""AdamW over data-parallel chunks, the learning rate of a step, and dynamic loss
scaling for fp16.

    loss ──x scale──► backward in fp16 ──► FP32 gradients ──/ scale──► finite?
        yes: clip, AdamW; after WINDOW: scale x 2
        no:  no update; after HYSTERESIS: scale / 2

fp16 has five bits of exponent: numbers below 6e-8 become 0, numbers above 65,504
infinite. The scale keeps the gradients of activations between these limits (arXiv
1710.03740, section 3.2). The rule is megatron's.
"""

import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import StateDict
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import get_standard_config_overrides as standard_overrides
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor
from torch.optim import AdamW

from megarl.core.base.errors import MegarlError
from megarl.core.learner import late_gathering
from megarl.core.models import build
from megarl.core.models.products import add_gradients_in_fp32
from megarl.core.recipe import Optimizer, Recipe
from megarl.shims.megatron_cpu import make_moments

INITIAL = 2.0**16
"""The first scale, as in torch and DeepSpeed. Megatron begins with 2^32 and lets the
first steps overflow until the scale fits. In pre-training that costs some text; here
each such step would waste a batch of generated and graded rollouts.
"""
LEAST = 1.0
"""The lowest scale, as in megatron: if gradients overflow at this scale, they are
broken.
"""
WINDOW = 1000
"""Updates without an overflow after which a larger scale is tried, as in megatron. Most
runs are shorter and never try one.
"""
HYSTERESIS = 2
"""Number of overflows that lower the scale, as in megatron: one extreme batch does not
lower it for all later ones. Once it has fallen, each further overflow lowers it, until
a window has passed without one.
"""


class LossScale(DynamicGradScaler):
    """The loss scale of one network. It is the same on all ranks, because all of them
    know the same norms. Megatron has an optimiser for a rank's experts and one for the
    rest, each with its own scaler, but multiplies the loss by the first one's scale
    only. An overflow in one would make their scales differ, so all parts of a network
    share this one.
    """

    def __init__(self) -> None:
        super().__init__(INITIAL, LEAST, 2.0, 0.5, WINDOW, HYSTERESIS)

    def update(self, found_inf: bool) -> None:
        """Do nothing. Each part of the optimiser calls this after it has divided its
        gradients; `judge` waits for all parts.
        """

    def judge(self, overflowed: bool) -> None:
        """Raise or lower the scale after one backward pass over all ranks."""
        super().update(overflowed)

    @property
    def value(self) -> float:
        """The scale."""
        return float(self.scale)

    def plain_state(self) -> dict[str, float]:
        """Return the state as plain numbers, for a checkpoint."""
        return {
            "scale": self.value,
            "growth": self._growth_tracker,
            "hysteresis": self._hysteresis_tracker,
        }

    def restore(self, state: dict[str, float]) -> None:
        """Continue from a `plain_state`."""
        self._scale = torch.full_like(self.scale, state["scale"])
        self._growth_tracker = int(state["growth"])
        self._hysteresis_tracker = int(state["hysteresis"])


def learning_rate(step: int, settings: Optimizer, steps: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then the schedule,
    which ends after the last of `steps`.
    """
    if step < settings.warmup_steps:
        return settings.lr * ((step + 1) / settings.warmup_steps)
    if settings.schedule == "constant":
        return settings.lr
    scheduled_steps = max(steps - settings.warmup_steps, 1)
    progress = min(1.0, (step - settings.warmup_steps) / scheduled_steps)
    if settings.schedule == "linear":
        return settings.lr * (1 - progress)
    return settings.lr * ((1 + math.cos(math.pi * progress)) / 2)


BETAS = (0.9, 0.95)
"""AdamW's decay rates of the running averages: MiniMax-M1's (arXiv 2506.13585); ScaleRL
does not state its own.
"""
EPS = 1e-15
"""ScaleRL's and MiniMax-M1's. Gradients in RL can be as small as 1e-18, and with a
larger EPS, AdamW would act like SGD.
"""
WEIGHT_DECAY = 0.01
"""ScaleRL's. At its rate of 5e-7, 7,400 steps shrink a weight by 0.004 %."""
BUCKET: int | None = None
"""Number of parameters whose gradients are reduced together; None: megatron's choice,
40 million or one million per rank.
"""


def overlaps() -> bool:
    """Return whether gradients are reduced while others are computed: yes on GPUs with
    more than one data-parallel rank.
    """
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return torch.cuda.is_available() and ranks > 1


def with_optimizer(
    chunks: list[GPTModel],
    settings: Optimizer,
    recipe: Recipe,
    offload: float = 0.0,
    gathers_late: bool = False,
) -> tuple[list[DistributedDataParallel], MegatronOptimizer, LossScale | None]:
    """Wrap the chunks for data parallelism with FP32 gradients. Make AdamW, with its
    state divided among the ranks, and the loss scale of an fp16 model.

    offload: share of AdamW's state in the host's memory, updated by its cores; bf16
    only. gathers_late: where gradients are reduced while others are computed, updated
    weights too are gathered meanwhile, in the next forward pass (late_gathering.py),
    not at the end of the update.
    """
    if offload and not torch.cuda.is_available():
        raise MegarlError(
            "learner.optimizer_offload: moves AdamW off a GPU, but this machine has none; set it"
            " to 0"
        )
    dtype = build.DTYPES[recipe.model.dtype]
    ddp = _wrapped(chunks, gathers_late)
    adam = _adam_config(settings, dtype, offload, gathers_late and overlaps())
    optimizer = get_megatron_optimizer(adam, ddp, _parameter_overrides(adam, dtype))
    _place_without_padding(ddp)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            _adapt(part)
    _fuse(optimizer)
    if in_host_memory():
        # Made now, moments lie beside the weights. At the first step malloc would put
        # them into gaps between activations, which would then need new memory: a
        # gigabyte for 135M parameters.
        for part in optimizer.chained_optimizers:
            make_moments(part)
    if dtype != torch.float16:
        return ddp, optimizer, None
    scale = LossScale()
    for part in optimizer.chained_optimizers:
        part.grad_scaler = scale
    # For the last stage's losses, and experts' balancing losses.
    chunks[0].config.grad_scale_func = lambda loss: loss * scale.scale
    return ddp, optimizer, scale


def _wrapped(chunks: list[GPTModel], gathers_late: bool) -> list[DistributedDataParallel]:
    """Wrap the chunks for data parallelism. Gradients are summed, not averaged: scaling
    factor 1 in DDP, and no division by a number of tokens at the end.
    """
    config = chunks[0].config
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda model, _tokens, **groups: finalize_model_grads(
        model, None, **groups
    )
    overlap = overlaps()
    gathers_late = overlap and gathers_late
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=gathers_late,
        bucket_size=BUCKET,
    )
    for chunk in chunks:
        add_gradients_in_fp32(chunk)
    ddp = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    if gathers_late:
        late_gathering.gather_before_head(ddp)
    if overlap:
        config.no_sync_func = ddp[0].no_sync
        if len(ddp) > 1:
            config.no_sync_func = [chunk.no_sync for chunk in ddp]
    return ddp


def _adam_config(
    settings: Optimizer, dtype: torch.dtype, offload: float, gathers_late: bool
) -> OptimizerConfig:
    """Return megatron's configuration of AdamW. offload, gathers_late: as in
    `with_optimizer`.
    """
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=gathers_late,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        overlap_cpu_optimizer_d2h_h2d=True,
        # As in megatron's own training: the offloaded optimiser keeps the FP32 weights
        # itself and reads `decoupled_grad`.
        use_precision_aware_optimizer=offload > 0,
    )


def _parameter_overrides(adam: OptimizerConfig, dtype: torch.dtype) -> dict[ParamKey, Any]:
    """Return megatron's settings of parameter groups: FP32 parameters of a model of
    another type, such as a critic's head and a delta network's A_log, have groups of
    their own. In a group of both types, megatron would mix up the order of parameters
    and of states.
    """
    overrides = standard_overrides(adam)
    if dtype != torch.float32:
        is_fp32 = ParamPredicate("fp32", lambda parameter: parameter.dtype == torch.float32)
        # Only megatron's scheduler, which is not used here, reads this. `wd_mult` would
        # not do: vectors have it already.
        overrides[ParamKey(predicate=is_fp32)] = {"start_wd": adam.weight_decay}
    return overrides


def _adapt(part: DistributedOptimizer) -> None:
    """Change how a part of the optimiser updates and is stored, where megatron's way
    takes more memory or time.
    """
    is_hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
    if part.data_parallel_group.size() == 1:
        part.get_parameter_state_dp_zero = partial(_state_of_one_rank, part)
    if is_hybrid:
        update_offloaded_in_one_pass(part.optimizer)
    else:
        # Transformer Engine's AdamW would load moments into new tensors, 8 bytes a
        # parameter, while it has the old ones: it converts moments of another type
        # than the weights. Ours are FP32, and torch keeps their tensors.
        part.optimizer.load_state_dict = partial(
            torch.optim.Optimizer.load_state_dict, part.optimizer
        )


def _fuse(optimizer: MegatronOptimizer) -> None:
    """Use torch's fused AdamW on a GPU, which is there without another installed one.
    By default, which megatron keeps, torch's takes the square root of all second
    moments at once: 4 bytes per parameter.
    """
    if not torch.cuda.is_available():
        return
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def update_offloaded_in_one_pass(hybrid: HybridDeviceOptimizer) -> None:
    """Have the host's cores update the offloaded share by torch's fused AdamW, and pin
    its FP32 weights.

    megatron's hybrid optimiser has an AdamW for each offloaded parameter. torch's
    default for a CPU goes through the parameter, its gradient and its moments about ten
    times, the fused one once. The weights that megatron copies to the GPU after it are
    unpinned copies of pinned ones; pinned, they are copied without a detour, while the
    next parameter is updated. The memory of the pinned copies, which nothing uses any
    more, goes back to the system.
    """
    groups = []
    for part in hybrid.cpu_optimizers:
        groups += part.param_groups
    for group in groups:
        group["fused"] = True
    if not torch.cuda.is_available() or not groups:
        return
    for group in groups:
        for weight in group["params"]:
            weight.data = weight.data.pin_memory()
    torch._C._host_emptyCache()


def _place_without_padding(chunks: list[DistributedDataParallel]) -> None:
    """Correct where megatron's checkpoints look for parameters in gathered state, which
    lacks the padding between buckets.

    Megatron looks at the offsets with padding. If a bucket does not end at a multiple
    of 128 numbers and of the data-parallel ranks, all state after it would be stored
    shifted: with several buckets, or a tied head, which has a bucket of its own.
    Nothing else uses these offsets once the optimiser is made.
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            padding = []
            unpadded = 0
            for bucket in buffer.buckets:
                padding.append(bucket.offset - unpadded)
                unpadded += bucket.numel_unpadded
            buffer.param_index_map = {
                parameter: (start - padding[bucket], end - padding[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }


def in_host_memory() -> bool:
    """Return whether weights and AdamW's state are where files are written from."""
    return not torch.cuda.is_available()


def written_in_place(optimizer: MegatronOptimizer) -> bool:
    """Return whether this rank's checkpoints are written from AdamW's own tensors,
    without a copy: on a CPU, if it has all of the state. Nothing may be updated until
    such a checkpoint is written.
    """
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    return in_host_memory() and any(part.data_parallel_group.size() == 1 for part in parts)


type TensorPlace = tuple[int, int]
"""First number, and the one after the last, of a parameter in the gathered state."""


class _Lent:
    """AdamW's own tensors of one kind, each under its place in the gathered state, from
    which megatron would cut it.
    """

    def __init__(self, tensors: dict[TensorPlace, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, place: slice) -> Tensor:
        return self._tensors[place.start, place.stop]


def _state_of_one_rank(
    optimizer: DistributedOptimizer, *, empty_data: bool, **_: object
) -> StateDict:
    """Act as get_parameter_state_dp_zero, which gathers AdamW's state for a checkpoint,
    where one rank has all of the state. empty_data: return zeros, which a checkpoint is
    to be read into.

    Host memory in bytes per parameter: 12 for the copy made here, or 0 if the state is
    in host memory already, from where it is written. Megatron's own function, made for
    many ranks, takes 32, or 24 and another 8 on the GPU.
    """
    state: StateDict = {"buckets_coalesced": True}
    is_written_in_place = in_host_memory() and not empty_data
    for index, buffer in enumerate(optimizer.buffers):
        (dtype,) = optimizer.gbuf_ranges[index]  # its only key
        states = {} if empty_data else _states_by_place(optimizer, buffer)
        buffer_state: StateDict = {"numel_unpadded": buffer.numel_unpadded}
        for name in ("param", *optimizer.optimizer_state_keys):
            tensors = {}
            for place, state_by_name in states.items():
                tensors[place] = state_by_name[name].detach().view(-1)
            if is_written_in_place:
                buffer_state[name] = _Lent(tensors)
            else:
                buffer_state[name] = _gathered(buffer.numel_unpadded, tensors)
        state[index] = {dtype: buffer_state}
    return state


def _states_by_place(
    optimizer: DistributedOptimizer, buffer: Any
) -> dict[TensorPlace, dict[str, Tensor]]:
    """Return the FP32 weight and the moments of each parameter of megatron's buffer."""
    states = {}
    for parameter, (start, end, _) in buffer.param_index_map.items():
        states[start, end] = optimizer._get_main_param_and_optimizer_states(parameter)
    return states


def _gathered(numbers: int, tensors: dict[TensorPlace, Tensor]) -> Tensor:
    """Return one tensor [numbers] in the host's memory, with a copy of each of these at
    its place.
    """
    gathered = torch.zeros(numbers)
    for (start, end), tensor in tensors.items():
        gathered[start:end].copy_(tensor)
    return gathered
