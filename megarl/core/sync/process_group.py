"""Transport: pipeline stages and data-parallel copies broadcast weights to all servers
at once, while these generate.

    stage 0   copy 0   source rank ──group──► server ranks
              copy 1   source rank ──group──► server ranks
    stage 1   copy 0   source rank ──group──► server ranks
              copy 1   source rank ──group──► server ranks

Rank 0 of a group is the source; the servers' ranks follow in the order of the servers.
Each server rank has a thread for each group, and launches their broadcasts in one order
(sync/broadcast.py). Each of two copies sends half of its stage's layers, by its own
link.

One source can fill the network link of one GPU, so there are at most as many as a
server has GPUs, and at most four, unless there are more stages.

Groups are kept from one publication to the next and formed again, under a new name,
when a server fails, comes back, or joins. When a server dies, the others fail at
different buckets, so all get everything again from bucket 0. A source completes the
export even if it cannot send, because its tensor-parallel peers take part in it.

The same holds if a source cannot make what it should send (no memory for a bucket, a
delta that fails). Everything is then sent again in full; if that fails, too, the
publication fails for all servers. Only an error in gathering the tensors ends the
learner, since the other ranks are left waiting in a collective call.
"""

import itertools
import logging
import socket
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from megarl.core.base import device
from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import bound_store, from_rank_0, gathered
from megarl.core.client.client import LET_DOWN, ServerClient, ServerSaid
from megarl.core.client.fleet import Calls, Fleet, collect
from megarl.core.client.membership import sending_copies
from megarl.core.client.relay import RelayLost
from megarl.core.models import hf
from megarl.core.sync.broadcast import BroadcastGroup, form_limit_s
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served import RankParameter
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.staging import BucketHead
from megarl.core.sync.transport import (
    Bucket,
    Sent,
    SentChecksums,
    buckets,
    first_line,
    holds_whole_parameters,
)

log = logging.getLogger(__name__)

VIEWS = 16
"""A tensor larger than a bucket divided by this is sent from its own memory, not copied
into a bucket with others.
"""


def backend() -> str:
    """Return torch's name of the backend of the groups."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@dataclass
class _Attempt:
    """The result of one attempt, for one rank, or for all of them.

    checksums, experts, bytes, unchecked: what was sent, as in Sent. failed: errors of
    servers that failed by themselves. interrupted: errors of servers that failed only
    because the group did. broken: why the group can no longer be used. unmade: why a
    source could not make what it should send.
    """

    checksums: dict[str, str] = field(default_factory=dict)
    experts: dict[RankParameter, str] = field(default_factory=dict)
    bytes: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    interrupted: dict[int, str] = field(default_factory=dict)
    broken: str = ""
    unchecked: str = ""
    unmade: str = ""

    def add(self, errors: dict[int, MegarlError]) -> None:
        """Note errors of servers. One is enough to break the group."""
        for i, error in errors.items():
            if _is_let_down(error):
                self.interrupted[i] = str(error)
            else:
                self.failed[i] = str(error)
            self.broken = self.broken or str(error)

    def merge(self, attempt: "_Attempt") -> None:
        """Add the result of another rank."""
        self.checksums |= attempt.checksums
        self.experts |= attempt.experts
        self.bytes += attempt.bytes
        self.failed |= attempt.failed
        self.interrupted |= attempt.interrupted
        self.broken = self.broken or attempt.broken
        self.unchecked = self.unchecked or attempt.unchecked
        self.unmade = self.unmade or attempt.unmade


def _is_let_down(error: MegarlError) -> bool:
    """Return whether a server failed only because its group or its relay did."""
    if isinstance(error, ServerSaid):
        return any(text in str(error) for text in LET_DOWN.values())
    return isinstance(error, RelayLost)


class _Gathering:
    """Iterates over tensors that other ranks take part in gathering. failed: gathering
    itself has failed, and not what was done with its tensors.
    """

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self._tensors)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise

    def finish(self) -> None:
        """Take part in gathering what is left."""
        deque(self._tensors, maxlen=0)


class ProcessGroupTransport:
    """Sends weights from a learner rank to the servers over process groups. `send` is
    collective over all ranks.
    """

    staged = True

    def __init__(
        self, weights: ServedWeights, last: LastSent, bucket_bytes: int, limit_s: float, links: int
    ) -> None:
        """bucket_bytes: under way to a server at once. limit_s: for each bucket
        (weights.timeout_s). links: a server's GPUs.
        """
        self._weights = weights
        self._last = last
        self._limit_s = limit_s
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._copy = copies.rank()
        self._copies = sending_copies(copies.size(), pipeline.size(), links)
        self._group_number = pipeline.rank() * self._copies + self._copy
        self._groups = pipeline.size() * self._copies
        self._bucket_bytes = bucket_bytes // self._groups
        sends = self._copy < self._copies
        self._exports = sends or hf.experts_divided()
        self._source = sends and parallel_state.get_tensor_model_parallel_rank() == 0
        # The names of its groups begin so.
        self._learner: str = from_rank_0(f"weights-{uuid.uuid4().hex[:12]}")
        self._group: BroadcastGroup | None = None
        self._attempts = 0  # to send, by all ranks together
        self._members: tuple[int, ...] = ()
        self._versions: dict[int, int] = {}  # the version that each member of the group got last
        # Groups that servers were not told to leave, by server: they were not published
        # to when the group was left.
        self._untold: dict[int, str] = {}

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Send the weights to the servers `ids`. Every rank returns the same result.
        COLLECTIVE.
        """
        alive = tuple(ids)
        self._leave_stale_groups(fleet, alive)
        errors: dict[int, str] = {}
        # Each attempt loses a server or is the last; one more attempt, in case a group
        # breaks by itself.
        for _ in range(len(ids) + 1):
            alive = tuple(i for i in alive if i not in errors)
            errors |= self._stage(fleet, alive, version)
            alive = tuple(i for i in alive if i not in errors)
            if not alive:
                break
            attempt = self._send_all(fleet, alive)
            errors |= attempt.failed
            if not attempt.broken:
                self._versions = dict.fromkeys(alive, version)
                return Sent(
                    errors, attempt.checksums, attempt.bytes, attempt.unchecked, attempt.experts
                )
            if attempt.unmade and self._last.sends_all:
                reason = f"the learner could not make what it sends: {attempt.unmade}"
                errors |= dict.fromkeys(alive, f"publishing version {version}: {reason}")
                self._leave(fleet)
                return Sent(errors, {}, 0)
            server_errors = attempt.failed or attempt.interrupted
            reason = "; ".join(server_errors.values()) or attempt.broken
            log.warning("sending version %d again: %s", version, reason)
            self._leave(fleet)
            self._last.sends_all = True  # it is unknown which deltas a server has added
        errors |= dict.fromkeys(
            alive, f"publishing version {version}: its process groups broke in every attempt"
        )
        return Sent(errors, {}, 0)

    def _leave_stale_groups(self, fleet: Fleet, ids: tuple[int, ...]) -> None:
        """Leave groups that these servers were not told to leave, and the present one
        if a server was restarted at the same address: it is not in the group, which its
        version reveals.
        """
        untold = {i: self._untold.pop(i) for i in ids if i in self._untold}
        fleet.call_each(untold, lambda server: server.leave_group(untold[server.address.id]))
        if self._source and self._group is not None and self._members == ids:
            versions, failed = fleet.call_each(ids, lambda server: server.served_version())
            if failed or versions != self._versions:
                self._leave(fleet)

    def _stage(self, fleet: Fleet, ids: tuple[int, ...], version: int) -> dict[int, str]:
        """Have these servers begin to stage `version`; return errors by server id.
        COLLECTIVE.
        """
        errors: dict[int, str] = {}
        if dist.get_rank() == 0:
            _, errors = fleet.call_each(ids, lambda server: server.stage(version, self._last.base))
        return from_rank_0(errors)

    def _send_all(self, fleet: Fleet, ids: tuple[int, ...]) -> _Attempt:
        """Try once to send all weights to the servers `ids`, which have begun to stage
        them; return the result of all ranks together. COLLECTIVE.
        """
        self._attempts += 1
        mine = _Attempt()
        all_formed = True
        # In turn, or servers would wait for each other in different groups.
        for number in range(self._groups):
            if number == self._group_number and self._source:
                self._join(mine, fleet, ids)
            all_formed = all_formed and not any(gathered(mine.broken))
        if all_formed and self._exports:
            self._send_part(mine, fleet, ids)
        total = _Attempt()
        for attempt in gathered(mine):
            total.merge(attempt)
        return total

    def _send_part(self, attempt: _Attempt, fleet: Fleet, ids: tuple[int, ...]) -> None:
        """Send this copy's part of its stage from the source; other ranks take part in
        gathering the tensors.
        """
        if not self._source:
            deque(self._weights.gathered(self._copy, self._copies), maxlen=0)
            return
        group = self._group
        assert group is not None
        calls = fleet.start(ids, lambda server: server.receive(group.name))
        try:
            compared = holds_whole_parameters(fleet, ids, self._weights.expert_ranks)
            gathering = _Gathering(self._weights.gathered(self._copy, self._copies))
            self._broadcast(attempt, group, gathering, calls, compared)
        except BaseException as gathering_error:
            group.close(str(gathering_error) or type(gathering_error).__name__)
            self._group = None
            raise
        try:
            calls.end.result(self._limit_s)
        except TimeoutError:
            calls.end.cancel()
            for i in set(ids) - calls.results.keys() - calls.errors.keys():
                error = fleet.servers[i].error(
                    "receive", f"no answer within {self._limit_s:g} s (weights.timeout_s)"
                )
                attempt.add({i: MegarlError(f"publishing version {fleet.version} to {error}")})
        attempt.add(calls.errors)
        if not attempt.broken:
            group.forget()

    def _turn(self) -> int:
        """Take the next turn among the broadcasts of all sources in this attempt."""
        return _get_default_store().add(f"{self._learner}/{self._attempts}", 1)

    def _broadcast(
        self,
        attempt: _Attempt,
        group: BroadcastGroup,
        gathering: _Gathering,
        calls: Calls[None],
        compared: bool,
    ) -> None:
        """Broadcast what is gathered. Note the checksums, if they are `compared` with
        those of a server. The first error in making buckets or in broadcasting them
        breaks the group; an error in gathering is raised.
        """
        checksums = SentChecksums(self._weights.family.architecture, self._weights.expert_ranks)
        tensors = self._weights.as_served(gathering)
        if compared:
            tensors = checksums.watch(tensors)
        changes = self._last.changed(tensors)
        stream = buckets(changes, self._bucket_bytes, self._bucket_bytes / VIEWS)
        try:
            self._broadcast_buckets(attempt, group, stream, calls)
        except (RuntimeError, MemoryError) as error:
            if gathering.failed:
                raise
            attempt.unmade = first_line(error)
            if not attempt.broken:
                attempt.broken = attempt.unmade
                group.close(attempt.broken)
        gathering.finish()
        attempt.checksums = checksums.expected()
        attempt.experts = checksums.expected_experts()
        attempt.unchecked = checksums.failed

    def _broadcast_buckets(
        self,
        attempt: _Attempt,
        group: BroadcastGroup,
        stream: Iterator[Bucket],
        calls: Calls[None],
    ) -> None:
        """Broadcast buckets, at most bucket_bytes bytes at once, while the next ones
        are gathered. The first error in broadcasting breaks the group.
        """
        under_way = deque[tuple[dist.Work, Tensor]]()

        def first_error() -> str:
            errors = list(calls.errors.values())
            return str(errors[0]) if errors else ""

        def make_room(limit: int) -> None:
            while under_way and sum(tensor.nbytes for _, tensor in under_way) > limit:
                group.wait(under_way.popleft()[0], first_error)

        for bucket in itertools.chain(stream, [None]):
            if attempt.broken:
                continue
            try:
                if bucket is None:
                    make_room(0)
                    under_way += group.send(self._turn)
                else:
                    make_room(self._bucket_bytes - bucket.flat.nbytes)
                    head = BucketHead(bucket.names, bucket.dtypes, bucket.shapes)
                    under_way += group.send(self._turn, msgspec.json.encode(head), bucket.flat)
                    attempt.bytes += bucket.flat.nbytes
            except RuntimeError as error:
                attempt.broken = first_line(error)
                group.close(attempt.broken)

    def _join(self, attempt: _Attempt, fleet: Fleet, ids: tuple[int, ...]) -> None:
        """Form a group of this rank and the servers, unless there is one. What fails is
        noted in `attempt`, which is then broken; `send` leaves what has been formed.
        """
        if self._group is not None and self._members == ids:
            return
        self._leave(fleet)
        if backend() == "nccl":
            mine = device.of_rank()
            checks = fleet.start(ids, lambda server: refuse_shared_gpu(server, mine))
            _, errors = collect(checks)
            attempt.add(errors)
        if not attempt.broken:
            self._form(attempt, fleet, ids)

    def _form(self, attempt: _Attempt, fleet: Fleet, ids: tuple[int, ...]) -> None:
        """Form a group of this rank and the servers, as in `_join`."""
        name = f"{self._learner}-{uuid.uuid4().hex[:12]}"
        first_rank, world = _ranks_in_group(fleet, ids)
        address = _own_address(fleet.servers[ids[0]])
        limit = timedelta(seconds=form_limit_s(world, self._limit_s))
        store = bound_store(
            address, 0, world, is_master=True, timeout=limit, wait_for_workers=False
        )

        async def join(server: ServerClient) -> None:
            rank = first_rank[server.address.id]
            await server.join_group(name, address, store.port, rank, world, backend())

        # Members wait for each other. So the servers are called before this rank joins,
        # and their answers awaited after it.
        calls = fleet.start(ids, join)
        try:
            self._group = BroadcastGroup(
                name, 0, world, backend(), (address, store.port), self._limit_s, store
            )
            self._members = ids
        except RuntimeError as error:
            attempt.broken = first_line(error)
        _, errors = collect(calls)
        attempt.add(errors)

    def _leave(self, fleet: Fleet) -> None:
        """Close this rank's group, if it has one, and have its servers leave it.
        Servers that are not in the fleet are told when they next are.
        """
        if self._group is None:
            return
        group = self._group
        self._group = None
        group.close()
        absent = [i for i in self._members if i not in fleet.servers]
        present = [i for i in self._members if i in fleet.servers]
        self._untold |= dict.fromkeys(absent, group.name)
        fleet.call_each(present, lambda server: server.leave_group(group.name))


def _ranks_in_group(fleet: Fleet, ids: tuple[int, ...]) -> tuple[dict[int, int], int]:
    """Return the first rank of each server in the group, by server id, and the number
    of all ranks. The learner has rank 0; the servers follow in the order of `ids`.
    """
    first_rank: dict[int, int] = {}
    world = 1
    for i in ids:
        first_rank[i] = world
        world += fleet.servers[i].address.tensor_parallel
    return first_rank, world


def _own_address(server: ServerClient) -> str:
    """Return our address on the route to the server. Servers listen only on the run's
    network, so it is reachable for all of them.
    """
    host = urlsplit(server.address.url).hostname or ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel only chooses the route
        address: str = probe.getsockname()[0]
    return address


async def refuse_shared_gpu(server: ServerClient, mine: DeviceIdentity) -> None:
    """Raise MegarlError for a server on the GPU `mine`: NCCL refuses two processes of a
    group on one device.
    """
    common = set(mine.gpus) & set((await server.device_identity()).gpus)
    if common:
        raise server.error(
            "form a process group",
            f"server and learner are both on GPU {min(common)}, and NCCL cannot connect two"
            " processes there; set resources.colocate=true and weights.transport=cuda_ipc, or give"
            " them different GPUs",
        )
