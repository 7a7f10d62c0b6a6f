"""Small values that all ranks of the learner are to agree on. Every function is collective."""

from typing import Any

import torch
import torch.distributed as dist


def from_rank_0(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on all ranks."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
