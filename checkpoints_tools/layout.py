"""Finds which rank of a layout holds which part of which Megatron tensor, without data,
processes or GPUs.

    for each rank of the layout: fake process groups  ->  megatron's model on the meta
        device  ->  its own sharded_state_dict
                                                                               |
                                 StoredPart(rank, parameter, how it is divided and
                                 named)  <-

So names, offsets and replicas in a converted checkpoint are megatron's own, at any
layout, from one process.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.models import build, checkpoint, hf, parallel
from megarl.core.models.region import Shape
from megarl.core.recipe import Model
from megarl.shims.megatron_cpu import after_megatron_import

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Parallelism:
    """Sizes of tensor, pipeline and expert parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """The smallest number of ranks with this layout; they have every shard exactly
        once.
        """
        return self.pipeline * math.lcm(self.tensor, self.expert * self.expert_tensor)

    @property
    def expert_tensor(self) -> int:
        """Tensor parallelism of experts: with expert parallelism they are whole, else
        megatron divides them like the rest.
        """
        return self.tensor if self.expert == 1 else 1

    def section(self, path: Path, dtype: Dtype) -> Model:
        """Return a recipe's `model` section with this layout."""
        return Model(
            path=str(path),
            dtype=dtype,
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            expert_parallel=self.expert,
            expert_tensor_parallel=self.expert_tensor,
        )


WHOLE = Parallelism()


@dataclass(frozen=True)
class StoredPart(Shape):
    """The part of one Megatron parameter that one rank stores.

    shape, dtype: of the rank's parameter. name: with layers numbered over the whole
    model. place: (rank, size) in the group that divides the parameter. entry:
    megatron's description of how it is stored, without data.
    """

    rank: int
    name: str
    place: tuple[int, int]
    entry: ShardedTensor | ShardedTensorFactory

    def shards(self, value: Tensor | None = None) -> list[ShardedTensor]:
        """Return the pieces in which a checkpoint stores it, with the data of `value`
        if that is given.
        """
        if value is None:
            value = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return list(nested_values([_built(replace(self.entry, data=value))]))

    def value(self, read: Callable[[ShardedTensor], Tensor]) -> Tensor:
        """Return the parameter, assembled from its pieces. read: returns the values of
        a piece.
        """
        pieces = dict_list_map_outplace(read, _built(self.entry))
        if isinstance(self.entry, ShardedTensorFactory):
            return self.entry.merge_fn(pieces)
        return pieces  # the only one


def parts(hf_dir: Path, layout: Parallelism, dtype: Dtype) -> list[StoredPart]:
    """Return every stored part once, stage by stage. The parts of ranks that share a
    tensor follow one another.
    """
    by_name: dict[str, list[StoredPart]] = {}
    for rank in range(layout.ranks):
        with _pretended(rank, layout):
            for part in _parts_of_rank(hf_dir, layout, dtype, rank):
                by_name.setdefault(part.name, []).append(part)
    return [part for of_tensor in by_name.values() for part in of_tensor]


def _built(entry: ShardedTensor | ShardedTensorFactory) -> ShardedStateDict | ShardedTensor:
    """Return an entry's pieces, which a factory makes if there are several."""
    return entry.build() if isinstance(entry, ShardedTensorFactory) else entry


def _parts_of_rank(
    hf_dir: Path, layout: Parallelism, dtype: Dtype, rank: int
) -> Iterator[StoredPart]:
    """Yield the parts that this rank stores, as which the process is `_pretended`. Of
    equal copies only the main one is stored.
    """
    (chunk,) = build.build(layout.section(hf_dir, dtype), hf_dir, transformer_engine=False)
    state = checkpoint.model_state([chunk])["model"]
    names = zip(hf.named_tensors([chunk]), hf.stored_tensors(chunk), strict=True)
    for (name, parameter), (key, _) in names:
        part = StoredPart(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            rank=rank,
            name=name,
            place=hf.shard_of(name),
            entry=state[key],
        )
        if all(is_main_replica(shard.replica_id) for shard in part.shards()):
            yield part


@contextmanager
def _pretended(rank: int, layout: Parallelism) -> Iterator[None]:
    """Make the process rank `rank` of a fake world during the block; megatron's tensors
    then have shapes but no memory.
    """
    after_megatron_import()
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # where megatron creates its layers
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,  # they would try to connect to the other ranks
        )
        model_parallel_cuda_manual_seed(0)
        with torch.device("meta"):
            yield
    except AssertionError as error:  # megatron refuses a layout with assertions
        raise MegarlError(f"the layout {layout} does not fit the model: {error}") from None
    finally:
        torch.cuda.current_device = current_device
        parallel.stop()
