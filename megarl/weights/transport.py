"""What every transport is, and how its ranks agree."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megarl.errors import MegarlError
from megarl.weights.admin import Fleet


class Sent(NamedTuple):
    """What came of sending: errors by server id, checksums of what was sent, bytes a server received."""

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int


class Transport(Protocol):
    """Of one learner rank."""

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring the paused servers `ids` to this rank's weights. Every rank gets the same result. COLLECTIVE."""


def texts(errors: Mapping[int, MegarlError]) -> dict[int, str]:
    return {i: str(error) for i, error in errors.items()}


def shared(value: Any) -> Any:
    """Rank 0's value, on all ranks. COLLECTIVE."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on all ranks. COLLECTIVE."""
    if dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
