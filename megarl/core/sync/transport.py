"""Shared by all transports: buckets, many tensors in a flat array of bytes like
SGLang's `flattened_bucket`, and checksums.

(name, tensor) … ──► Bucket(names, dtypes, shapes, flat) …

All buckets but the last have about `limit` bytes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture
from megarl.core.base.messages import ServerAddress
from megarl.core.base.rundir import Endpoints
from megarl.core.client.client import ServerClient
from megarl.core.client.fleet import Fleet
from megarl.core.sync.checksum import checksum, checksum_together, in_whole_rows, written
from megarl.core.sync.served import (
    ExpertPart,
    RankParameter,
    as_held,
    is_padded_inside,
    place,
    place_expert,
)

TOGETHER = 64 << 20
"""Bytes of tensors that are kept to be summed together. They are copied for it, so a
tensor of this size, for which a few operations more do not matter, is summed alone.
"""


@dataclass(frozen=True)
class Sent:
    """The result of sending: errors by server id, checksums by the server's parameter,
    bytes that each server received. unchecked: why the learner does not know the
    checksums; "" if it does. experts: checksums of the experts' parameters on each rank
    of a server, if its ranks have whole experts.
    """

    errors: dict[int, str]
    checksums: dict[str, str]
    bytes: int
    unchecked: str = ""
    experts: dict[RankParameter, str] = field(default_factory=dict)


def merged(results: Iterable[Sent]) -> Sent:
    """Return what several ranks have sent, to different servers or in different parts,
    as one result. Bytes are those of the rank that sent most.
    """
    errors: dict[int, str] = {}
    checksums: dict[str, str] = {}
    experts: dict[RankParameter, str] = {}
    size = 0
    unchecked = ""
    for sent in results:
        errors |= sent.errors
        checksums |= sent.checksums
        experts |= sent.experts
        size = max(size, sent.bytes)
        unchecked = unchecked or sent.unchecked
    return Sent(errors, checksums, size, unchecked, experts)


class Transport(Protocol):
    """Sends weights from a learner rank to servers. staged: into a copy
    (sync/staging.py), to be swapped in.
    """

    staged: bool

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Send the weights to the servers `ids`. Every rank returns the same result.
        COLLECTIVE.
        """


def open_fleet(
    servers: Iterable[ServerAddress], endpoints: Endpoints, limit_s: float, version: int
) -> Fleet:
    """Return a fleet of these servers. limit_s: for a call that moves weights. version:
    the one published, for errors.
    """
    clients = []
    joined_ids = set()
    for address in servers:
        clients.append(ServerClient(address, endpoints.api_key, endpoints.admin_key, limit_s))
        if address.url not in endpoints.servers:
            joined_ids.add(address.id)
    return Fleet(clients, version, joined_ids)


def holds_whole_parameters(fleet: Fleet, ids: Iterable[int], expert_ranks: int) -> bool:
    """Return whether one of these servers has a single rank, or ranks that have whole
    experts (expert_ranks). Only their checksums can be compared with those of what was
    sent; ranks of others hold parts of parameters, and sums of what is sent to them
    alone would be made for nothing.
    """
    return expert_ranks > 1 or any(fleet.servers[i].address.tensor_parallel == 1 for i in ids)


class Bucket(NamedTuple):
    """Tensors one after the other in `flat` [bytes] uint8, larger element sizes first
    so that each is aligned.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    flat: Tensor


def buckets(
    tensors: Iterable[tuple[str, Tensor]], limit: int, single: float = math.inf
) -> Iterator[Bucket]:
    """Yield buckets of at most `limit` bytes, or of a single larger tensor. single: a
    tensor of at least this many bytes gets its own bucket and is not copied, so it may
    be memory of the model.
    """
    content: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if tensor.nbytes >= single:
            yield _bucket([(name, tensor)])
            continue
        if content and size + tensor.nbytes > limit:
            yield _bucket(content)
            content = []
            size = 0
        content.append((name, tensor))
        size += tensor.nbytes
    if content:
        yield _bucket(content)


def _bucket(content: list[tuple[str, Tensor]]) -> Bucket:
    """Return these tensors as a bucket. A single contiguous one is not copied."""
    content = sorted(content, key=lambda item: -item[1].itemsize)
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in content]
    flat = parts[0]
    if len(parts) > 1:
        flat = torch.cat(parts)
    return Bucket(
        names=[name for name, _ in content],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in content],
        shapes=[list(tensor.shape) for _, tensor in content],
        flat=flat,
    )


def with_last(items: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket and whether it is the last. Fetches one ahead, so one is
    gathered while another is under way.
    """
    previous: Bucket | None = None
    for bucket in items:
        if previous is not None:
            yield previous, False
        previous = bucket
    if previous is not None:
        yield previous, True


@dataclass
class _Pieces:
    """Tensors of one of a server's parameters. starts: where each begins in it, in
    bytes.
    """

    tensors: list[Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


class SentChecksums:
    """The checksums that a server must return from `/weights_checker`, from the tensors
    that went through `watch`, in any order: those of a parameter's pieces
    (sync/served.py) add up (sync/checksum.py), and one that was never sent is missing
    in the sum. Nothing is copied to the CPU before `expected`, so a GPU does not wait.

    expert_ranks: 1 for servers of one rank, which hold all parameters. Otherwise a
    server's ranks, if each has whole experts: of those it is known which rank must hold
    what, and only they are summed.

    Tensors are kept until there are TOGETHER bytes of them. Then those of one
    parameter, a layer's experts, are summed at once: alone, each of the 18,432 tensors
    of Qwen3-30B-A3B's experts would take eight small operations.

    failed: why a checksum could not be computed; "" if all could. The tensors are then
    still yielded, since other ranks take part in gathering them, and no checksum is
    known.
    """

    def __init__(self, model: Architecture, expert_ranks: int = 1) -> None:
        self._model = model
        self._expert_ranks = expert_ranks
        self._sums: dict[RankParameter, Tensor] = {}
        self._unknown: set[RankParameter] = set()
        self.failed = ""
        self._kept: dict[RankParameter, _Pieces] = defaultdict(_Pieces)  # not summed yet
        self._kept_bytes = 0

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and add up their checksums. None of them may
        change until `expected` has returned.
        """
        for name, tensor in tensors:
            if not self.failed:
                try:
                    self._take(name, tensor)
                except RuntimeError as error:
                    self.failed = f"{name}: {first_line(error)}"
            yield name, tensor

    def expected(self) -> dict[str, str]:
        """Return the checksums by name of the parameter of a server of one rank, in the
        format of /weights_checker; none if one failed."""
        if self._expert_ranks > 1:
            return {}
        return {parameter.name: value for parameter, value in self._written().items()}

    def expected_experts(self) -> dict[RankParameter, str]:
        """Return the checksums of the experts' parameters, in the same format, if each
        rank has whole experts; none if one failed."""
        return self._written() if self._expert_ranks > 1 else {}

    def _written(self) -> dict[RankParameter, str]:
        """Return the checksums of the parameters that have a known one, in the format
        of /weights_checker; none if one failed.
        """
        if self.failed:
            return {}
        try:
            self._sum_kept()
            parameters = [name for name in self._sums if name not in self._unknown]
            if not parameters:
                return {}
            values = torch.stack([self._sums[name] for name in parameters]).tolist()
        except RuntimeError as error:  # of a kernel that was started before
            self.failed = first_line(error)
            return {}
        return {name: written(value) for name, value in zip(parameters, values, strict=True)}

    def _place(self, name: str, tensor: Tensor) -> ExpertPart | None:
        """Return where the tensor is stored; None if that is not known."""
        if self._expert_ranks > 1:
            return place_expert(name, tensor, self._model, self._expert_ranks)
        part = place(name, tensor, self._model)
        return ExpertPart(RankParameter(0, part.name), part.start)

    def _take(self, name: str, tensor: Tensor) -> None:
        """Add a tensor's checksum to its parameter's, now or with others later. A
        parameter that a server on a CPU pads inside gets no checksum.
        """
        part = self._place(name, tensor)
        if part is None:
            return
        stored = as_held(name, tensor, self._model)
        if stored.device.type == "cpu" and is_padded_inside(name, stored, self._expert_ranks):
            self._unknown.add(part.parameter)
        elif stored.nbytes < TOGETHER and in_whole_rows(stored, part.start):
            self._keep(part.parameter, part.start, stored)
        else:
            self._add(part.parameter, checksum(stored, part.start))

    def _keep(self, parameter: RankParameter, start: int, piece: Tensor) -> None:
        if self._kept_bytes + piece.nbytes > TOGETHER:
            self._sum_kept()
        self._kept[parameter].tensors.append(piece)
        self._kept[parameter].starts.append(start)
        self._kept_bytes += piece.nbytes

    def _sum_kept(self) -> None:
        for parameter, pieces in self._kept.items():
            if len(pieces.tensors) == 1:
                self._add(parameter, checksum(pieces.tensors[0], pieces.starts[0]))
            else:
                self._add(parameter, checksum_together(pieces.tensors, pieces.starts))
        self._kept.clear()
        self._kept_bytes = 0

    def _add(self, parameter: RankParameter, piece: Tensor) -> None:
        if parameter in self._sums:
            piece = self._sums[parameter] + piece
        self._sums[parameter] = piece


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def differing(expected: Mapping[str, str], checksums: Mapping[str, str]) -> list[str]:
    """Return the parameters whose checksums differ. Parameters that only one side has
    (a tied head) are ignored.
    """
    common = expected.keys() & checksums.keys()
    return sorted(name for name in common if checksums[name] != expected[name])


def differing_experts(
    expected: Mapping[RankParameter, str], ranks: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return the experts' parameters, with their ranks, whose checksums differ, or
    which a rank does not have. ranks: the checksums of each rank of a server.
    """
    wrong = []
    for (rank, name), value in sorted(expected.items()):
        if rank >= len(ranks) or ranks[rank].get(name) != value:
            wrong.append(f"{name} of its rank {rank}")
    return wrong
