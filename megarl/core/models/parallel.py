"""Process groups of the learner: torch.distributed, then megatron's TP, CP, EP, DP and
PP groups, then random seeds.

Rank, world size and rendezvous come from torchrun's environment; without it this
process is the only rank. The backend is NCCL with a GPU, gloo without. Another layout
may be started later in the same world; then all groups are made again.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.core.base import device, ranks
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Model
from megarl.shims.megatron_cpu import after_megatron_import


def start(model: Model, seed: int, timeout_s: float) -> None:
    """Join the other ranks in the groups of `model`'s layout. COLLECTIVE. timeout_s:
    for this and all later collectives.
    """
    after_megatron_import()
    # even if the environment allows TF32, as in some containers
    torch.set_float32_matmul_precision("highest")
    _check_world_size(model)
    if not dist.is_initialized():
        _join(timeout_s)
    if parallel_state.model_parallel_is_initialized():
        dist.barrier()
        _leave_groups()
    parallel_state.initialize_model_parallel(
        model.tensor_parallel,
        model.pipeline_parallel,
        virtual_stages(model),
        context_parallel_size=model.context_parallel,
        expert_model_parallel_size=model.expert_parallel,
        expert_tensor_parallel_size=model.expert_tensor_parallel,
        distributed_timeout_minutes=timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def _check_world_size(model: Model) -> None:
    """Raise MegarlError if the ranks do not divide into copies of the model."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    expert_size = model.expert_parallel * model.expert_tensor_parallel * model.pipeline_parallel
    sizes = {"TP x PP x CP": model.model_parallel_size, "expert: EP x ETP x PP": expert_size}
    for product, size in sizes.items():
        if world_size % size:
            raise MegarlError(
                f"model: {world_size} ranks do not divide into copies of the model of {size} ranks"
                f" ({product}); start a multiple (resources.learner_ranks), or change the layout"
                " under `model`"
            )


def virtual_stages(model: Model) -> int | None:
    """Return the number of chunks per rank in megatron's form: None for one."""
    if model.virtual_pipeline_parallel == 1:
        return None
    return model.virtual_pipeline_parallel


def stop() -> None:
    """Leave all groups, those of torch.distributed included."""
    _leave_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Destroy the previous layout's groups. megatron only forgets them: over gloo each
    would keep three busy threads.
    """
    for group in parallel_state._global_process_group_list or []:
        if group is not None:  # None stands for the world
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def _join(timeout_s: float) -> None:
    """Choose this rank's GPU, if there are any, and join the group of all ranks. The
    environment describes it; without RANK, it has a single rank. MegarlError if the
    ranks do not meet within timeout_s.
    """
    backend = "gloo"
    rendezvous: dict[str, Any] = {}
    if "RANK" not in os.environ:
        rendezvous = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device.bind_to_gpu()
        backend = "cpu:gloo,cuda:nccl"
    ranks.bind_all()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **rendezvous)
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        ranks_text = f"the {os.environ['WORLD_SIZE']} ranks"
        raise MegarlError(
            f"rank {os.environ['RANK']}: {ranks_text} did not meet at {address} within"
            f" {timeout_s:g} s; look at the other ranks' logs: {error}"
        ) from None
