"""What transports share: buckets, many tensors in one flat array of bytes as SGLang's `flattened_bucket`, and their checksums.

(name, tensor) … ──► Bucket(names, dtypes, shapes, flat) …          all but the last are about `limit` bytes
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture
from megarl.core.base.checksum import checksum, written
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.server.client import ServerClient
from megarl.core.server.fleet import Fleet
from megarl.core.server.served import as_held, is_padded_inside, place


class Sent(NamedTuple):
    """How sending went: errors by server id, checksums of what was sent, bytes that a server received."""

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int


class Transport(Protocol):
    """One learner rank's way to the servers. staged: these receive while they generate (server/staging.py), then swap."""

    staged: bool

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring this rank's weights to the servers `ids`, paused unless staged. Every rank gets the same result. COLLECTIVE."""


def open_fleet(servers: Iterable[ServerAddress], endpoints: Endpoints, limit_s: float, version: int) -> Fleet:
    """Return clients of these servers. limit_s: for a call that moves weights. version: what is published, for errors."""
    clients = [ServerClient(a, endpoints.api_key, endpoints.admin_key, limit_s) for a in servers]
    return Fleet(clients, version, {c.address.id for c in clients if c.address.url not in endpoints.servers})


class Bucket(NamedTuple):
    """Tensors one after the other in `flat` [bytes] uint8, larger element sizes first so that each is aligned."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor


def buckets(tensors: Iterable[tuple[str, Tensor]], limit: int, alone: float = math.inf) -> Iterator[Bucket]:
    """Yield buckets of at most `limit` bytes, or of one tensor that alone is larger.

    alone: from so many bytes on, a tensor is a bucket by itself and is not copied: it may be memory of the model.
    """
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if tensor.nbytes >= alone:
            yield _bucket([(name, tensor)])
            continue
        if held and size + tensor.nbytes > limit:
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(held: list[tuple[str, Tensor]]) -> Bucket:
    held = sorted(held, key=lambda item: -item[1].itemsize)
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in held]
    return Bucket(
        names=[name for name, _ in held],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
        shapes=[list(tensor.shape) for _, tensor in held],
        flat=flat[0] if len(flat) == 1 else torch.cat(flat),
    )


def with_last(items: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket and whether it is the last. Fetches one ahead, so the next is gathered while one is under way."""
    for here, following in itertools.pairwise(itertools.chain(items, [None])):
        assert here is not None
        yield here, following is None


class SentChecksums:
    """What a server of one rank must answer to `/weights_checker`, from the tensors that went through `watch`.

    Some of its parameters are several Hugging Face tensors one after the other (server/served.py), which come in any order, as
    experts do: the checksums of pieces add up (base/checksum.py). What was never sent is missing in the sum. Nothing is copied
    to the CPU before `expected`, so a GPU goes on.
    """

    def __init__(self, model: Architecture) -> None:
        self._model = model
        self._sums: dict[str, Tensor] = {}
        self._unknown: set[str] = set()

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on, and add them up."""
        for name, tensor in tensors:
            (served, start), held = place(name, tensor, self._model), as_held(name, tensor, self._model)
            if held.device.type == "cpu" and is_padded_inside(name, held):
                self._unknown.add(served)
            else:
                piece = checksum(held, start)
                self._sums[served] = self._sums[served] + piece if served in self._sums else piece
            yield name, tensor

    def expected(self) -> dict[str, str]:
        """Return the checksums by the server's parameter, as /weights_checker writes them."""
        known = [name for name in self._sums if name not in self._unknown]
        sums = torch.stack([self._sums[name] for name in known]).tolist() if known else []
        return {name: written(value) for name, value in zip(known, sums, strict=True)}


def differing(expected: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Return the parameters whose checksums differ. One that only one side has (a tied head) says nothing."""
    return sorted(name for name, value in expected.items() if served.get(name, value) != value)
