"""What transports share: buckets, many tensors in one flat array of bytes as SGLang's `flattened_bucket`, and their checksums.

(name, tensor) … ──► Bucket(names, dtypes, shapes, flat) …          all but the last are about `limit` bytes
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.server.client import Fleet, ServerClient
from megarl.core.server.served import as_held, is_padded_inside, place


class Sent(NamedTuple):
    """How sending went: errors by server id, checksums of what was sent, bytes that a server received."""

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int


class Transport(Protocol):
    """One learner rank's way to the servers."""

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring the paused servers `ids` to this rank's weights. Every rank gets the same result. COLLECTIVE."""


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


class SentChecksums:
    """What SGLang's `/weights_checker` must answer, from the tensors that went through `watch`.

    On a CPU it hashes each of the server's parameters with SHA-256. Some of those are several Hugging Face tensors one after
    the other (server/served.py): a running hash over the tensors in that order is the hash of the joined one. A tensor that
    comes before its turn (experts come as the ranks have them) waits for it. On a GPU SGLang uses another hash; then
    the servers are only compared with each other, and parity (parity.py) compares what they compute with the learner.
    """

    def __init__(self, model: Architecture) -> None:
        self._model = model
        self._hashes: dict[str, _Running] = {}
        self._unknown: set[str] = set()

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on, hashed if they are in the CPU's memory."""
        for name, tensor in tensors:
            if tensor.device.type == "cpu":
                (served, position), held = place(name), as_held(name, tensor, self._model)
                if is_padded_inside(name, held):
                    self._unknown.add(served)
                else:
                    self._hashes.setdefault(served, _Running()).add(position, held)
            yield name, tensor

    def expected(self) -> dict[str, str]:
        """Return the checksums by the server's parameter, as /weights_checker writes them."""
        return {name: hashed.hexdigest() for name, hashed in self._hashes.items() if name not in self._unknown}


class _Running:
    """SHA-256 of tensors one after the other, which may come in any order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._next = 0
        self._waiting: dict[int, Tensor] = {}

    def add(self, position: int, tensor: Tensor) -> None:
        self._waiting[position] = tensor
        while self._next in self._waiting:
            flat = self._waiting.pop(self._next).detach().contiguous().view(-1)
            self._digest.update(memoryview(flat.view(torch.uint8).numpy()))
            self._next += 1

    def hexdigest(self) -> str:
        assert not self._waiting, "a tensor in between was never sent"
        return self._digest.hexdigest()[:16]


def differing(expected: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Return the parameters whose checksums differ. One that only one side has (a tied head) says nothing."""
    return sorted(name for name, value in expected.items() if served.get(name, value) != value)
