"""What every transport is, and buckets: tensors in one flat array of bytes, in the layout of SGLang's `flattened_bucket`, so
that a bucket is one broadcast.

(name, tensor) … ──► Bucket(names, dtypes, shapes, flat) …          all but the last are about `limit` bytes
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.server.client import Fleet


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


class Bucket(NamedTuple):
    """`flat` [bytes] uint8: the tensors one after the other, larger element sizes first so that each lies aligned."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Buckets of at most `limit` bytes, or of one tensor that alone is larger. No tensors, no bucket."""
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
    """Each bucket and whether it is the last one. Fetches one ahead, so the next is gathered while one is under way."""
    iterator = iter(items)
    here = next(iterator, None)
    while here is not None:
        following = next(iterator, None)
        yield here, following is None
        here = following
