"""What every transport is, and buckets: many tensors in one flat array of bytes, in the layout of SGLang's `flattened_bucket`.

(name, tensor) … ──► Bucket(names, dtypes, shapes, flat) …          all but the last are about `limit` bytes
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.server.client import Fleet, ServerClient


class Sent(NamedTuple):
    """How sending went: errors by server id, checksums of what was sent, bytes that a server received."""

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int


class Transport(Protocol):
    """One learner rank's way to the servers."""

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring the paused servers `ids` to this rank's weights. Every rank gets the same result. COLLECTIVE."""


def texts(errors: Mapping[int, MegarlError]) -> dict[int, str]:
    return {i: str(error) for i, error in errors.items()}


def open_fleet(servers: Iterable[ServerAddress], endpoints: Endpoints, limit_s: float, version: int) -> Fleet:
    """Return clients of these servers. limit_s: for a call that moves weights. version: what is published, for errors."""
    return Fleet([ServerClient(a, endpoints.api_key, endpoints.admin_key, limit_s) for a in servers], version)


class Bucket(NamedTuple):
    """Tensors one after the other in `flat` [bytes] uint8, larger element sizes first so that each is aligned."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Yield buckets of at most `limit` bytes, or of one tensor that alone is larger."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(held: list[tuple[str, Tensor]]) -> Bucket:
    held = sorted(held, key=lambda item: -item[1].itemsize)
    return Bucket(
        names=[name for name, _ in held],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
        shapes=[list(tensor.shape) for _, tensor in held],
        flat=torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in held]),
    )


def with_last(items: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket and whether it is the last. Fetches one ahead, so the next is gathered while one is under way."""
    for here, following in itertools.pairwise(itertools.chain(items, [None])):
        assert here is not None
        yield here, following is None
