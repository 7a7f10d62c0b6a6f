"""Transport: each pipeline stage broadcasts its weights to all servers at once, bucket by bucket.

    stage 0   source rank ──group──► server ranks       rank 0 of a group is the stage's source; the servers' ranks follow
    stage 1   source rank ──group──► server ranks       in the order of the servers
                                                        stage after stage: a server does one thing at a time

No rank holds the whole model. Groups are kept from one publication to the next and formed anew, under a new name, when a
server fails, comes back, or joins. When one dies, the others fail at different buckets: they get everything again from bucket
0, still paused. The source goes on through the export even when it cannot send, because its tensor-parallel peers take part.
"""

import logging
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
)
from torch.nn import Module

from megarl.core.base import device
from megarl.core.base.device import DeviceIdentity
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import bound_store, from_rank_0, gathered
from megarl.core.models import hf
from megarl.core.models.family import Family
from megarl.core.server.client import Fleet, ServerClient, ServerSaid, collect
from megarl.core.weights.checksum import SentChecksums
from megarl.core.weights.transport import Bucket, Sent, buckets, texts, with_last

log = logging.getLogger(__name__)

FORM_LIMIT_S = 60.0
"""For forming a group; weights.timeout_s if that is shorter."""


class _Group(NamedTuple):
    name: str
    members: tuple[int, ...]
    group: ProcessGroup
    store: dist.TCPStore  # the servers have met through it; lives as long as the group


class ProcessGroupTransport:
    """Of one learner rank. `send` is collective over all of them."""

    def __init__(
        self,
        chunks: Sequence[Module],
        family: Family,
        bucket_bytes: int,
        limit_s: float,
        flush: bool,
        rotary_head_dim: int | None = None,
    ) -> None:
        """limit_s: of any one bucket (weights.timeout_s). flush: drop cached prefixes, which needs retracted requests.
        rotary_head_dim: see served.as_held."""
        self._chunks, self._family = chunks, family
        self._bucket_bytes, self._limit_s, self._flush = bucket_bytes, limit_s, flush
        self._rotary_head_dim = rotary_head_dim
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        # With experts, ranks of other data-parallel copies hold a part of the weights.
        self._exports = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
            or parallel_state.get_expert_model_parallel_world_size() > 1
        )
        self._source = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        self._group: _Group | None = None
        self._versions: dict[int, int] = {}  # what each member of the group was given last

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Bring the paused servers `ids` to this rank's weights. Every rank gets the same result. COLLECTIVE."""
        errors: dict[int, str] = {}
        alive = tuple(ids)
        if self._source:
            self._drop_if_stale(fleet, alive)
        if dist.get_rank() == 0:
            errors |= texts(fleet.each(alive, lambda server: server.begin())[1])
        errors = from_rank_0(errors)
        for _ in range(
            len(ids) + 1
        ):  # each turn loses a server or is the last; one more for a group that broke by itself
            alive = tuple(i for i in alive if i not in errors)
            if not alive:
                break
            checksums, size, failed, interrupted = self._send_all(fleet, alive, version)
            errors |= failed
            if not failed and not interrupted:
                if dist.get_rank() == 0:
                    errors |= texts(fleet.each(alive, lambda server: server.end())[1])
                self._versions = dict.fromkeys(alive, version)
                return Sent(from_rank_0(errors), checksums, size)
            log.warning("sending version %d again: %s", version, "; ".join((failed or interrupted).values()))
            self._leave(fleet)
        errors |= dict.fromkeys(alive, f"publishing version {version}: its process groups broke again and again")
        return Sent(errors, {}, 0)

    def _send_all(
        self, fleet: Fleet, ids: tuple[int, ...], version: int
    ) -> tuple[dict[str, str], int, dict[int, str], dict[int, str]]:
        """All stages once. Checksums, bytes, servers that failed, servers that were only interrupted by another's failure."""
        checksums: dict[str, str] = {}
        size = 0
        failed: dict[int, str] = {}
        interrupted: dict[int, str] = {}
        for stage in range(self._stages):
            turn = _Turn()
            if stage == self._stage and self._exports:
                self._send_stage(turn, fleet, ids, last_stage=stage == self._stages - 1)
            for other in gathered(turn):
                checksums |= other.checksums
                size += other.bytes
                failed |= other.failed
                interrupted |= other.interrupted
            if failed or interrupted:
                break
        return checksums, size, failed, {i: text for i, text in interrupted.items() if i not in failed}

    def _send_stage(self, turn: "_Turn", fleet: Fleet, ids: tuple[int, ...], last_stage: bool) -> None:
        """This stage's buckets from its source; the stage's other ranks take part in gathering the tensors."""
        exported = hf.export(self._chunks, self._family)
        if not self._source:
            for _ in exported:
                pass
            return
        self._join(turn, fleet, ids)
        sums = SentChecksums(self._rotary_head_dim)
        under_way: tuple[dist.Work, Any, Bucket] | None = None
        for bucket, last in with_last(buckets(sums.watch(exported), self._bucket_bytes)):
            if under_way is not None:
                self._finish(turn, *under_way)
                under_way = None
            if not turn.broken and self._group is not None:
                under_way = self._launch(fleet, ids, bucket, last and last_stage)
        if under_way is not None:
            self._finish(turn, *under_way)
        turn.checksums = sums.expected()

    def _launch(self, fleet: Fleet, ids: tuple[int, ...], bucket: Bucket, last: bool) -> tuple[dist.Work, Any, Bucket]:
        assert self._group is not None
        name, complete = self._group.name, fleet.version if last else None
        calls = fleet.start(
            ids, lambda s: s.receive(bucket.names, bucket.dtypes, bucket.shapes, name, complete, self._flush)
        )
        return dist.broadcast(bucket.flat, group_src=0, group=self._group.group, async_op=True), calls, bucket

    def _finish(self, turn: "_Turn", work: dist.Work, calls: Any, bucket: Bucket) -> None:
        try:
            work.wait()
            turn.bytes += bucket.flat.nbytes
        except RuntimeError as error:
            turn.broken = str(error).splitlines()[0]
        turn.add(collect(calls)[1])

    def _join(self, turn: "_Turn", fleet: Fleet, ids: tuple[int, ...]) -> None:
        """A group of this rank and the servers: the one there is, if it is theirs, or a new one."""
        if self._group is not None and self._group.members == ids:
            return
        if self._group is not None:
            self._leave(fleet)
        name = f"weights-{uuid.uuid4().hex[:12]}"
        limit = timedelta(seconds=min(FORM_LIMIT_S, self._limit_s))
        widths = [fleet.servers[i].address.tensor_parallel for i in ids]
        world = 1 + sum(widths)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            mine = device.of_rank()
            turn.add(fleet.each(ids, lambda server: refuse_one_gpu(server, mine))[1])
            if turn.broken:
                return
        # Servers listen on the run's network alone, so the address by which one reaches us is on it, and all reach us by it.
        address = _address_for(fleet.servers[ids[0]].address.url)
        store = bound_store(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        first = {i: 1 + sum(widths[:n]) for n, i in enumerate(ids)}
        calls = fleet.start(
            ids,
            lambda s: s.join_group(name, address, store.port, first[s.address.id], world, backend),
        )
        try:
            group = form_group(name, 0, world, backend, store, limit)
        except RuntimeError as error:
            turn.broken = str(error).splitlines()[0]
            turn.add(collect(calls)[1])
            return
        group.set_timeout(timedelta(seconds=self._limit_s))
        self._group = _Group(name, ids, group, store)
        turn.add(collect(calls)[1])

    def _drop_if_stale(self, fleet: Fleet, ids: tuple[int, ...]) -> None:
        """A server that was started again at the same address is not in the group: its version tells."""
        if self._group is None or self._group.members != ids:
            return
        versions, errors = fleet.each(ids, lambda server: server.served_version())
        if errors or versions != self._versions:
            self._leave(fleet)

    def _leave(self, fleet: Fleet) -> None:
        if self._group is None:
            return
        name, members, group, _ = self._group
        self._group = None
        dist.destroy_process_group(group)
        fleet.each([i for i in members if i in fleet.servers], lambda server: server.leave_group(name))


class _Turn:
    """How one stage's turn went, on one rank."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}
        self.bytes = 0
        self.broken = ""  # the group is of no use any more
        self.failed: dict[int, str] = {}
        self.interrupted: dict[int, str] = {}

    def add(self, errors: dict[int, MegarlError]) -> None:
        """A server that answers that it could not receive was let down by the group; any other error is its own."""
        for i, error in errors.items():
            let_down = isinstance(error, ServerSaid) and (
                "Failed to receive weights" in str(error) or "Failed to initialize custom process group" in str(error)
            )
            (self.interrupted if let_down else self.failed)[i] = str(error)
            self.broken = self.broken or str(error)


async def refuse_one_gpu(server: ServerClient, mine: DeviceIdentity) -> None:
    """MegarlError for a server that is on the GPU `mine`: NCCL refuses two processes of a group on one device."""
    common = set(mine.gpus) & set((await server.whereabouts()).gpus)
    if common:
        raise server.error(
            "form a process group",
            f"server and learner are both on GPU {min(common)}, and NCCL connects no two processes on one; set "
            "resources.colocate=true and weights.transport=cuda_ipc, or give them different GPUs",
        )


def form_group(name: str, rank: int, world: int, backend: str, store: dist.TCPStore, limit: timedelta) -> ProcessGroup:
    """A process group outside the learner's world, as `sglang.srt.utils.init_custom_process_group` makes the servers' ranks of
    it (which is not imported: it brings all of SGLang into the learner)."""
    group, _ = _new_process_group_helper(
        world, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit
    )
    _world.pg_group_ranks[group] = {r: r for r in range(world)}
    return group


def _address_for(url: str) -> str:
    """This machine's address as the server at `url` reaches it."""
    host = urlsplit(url).hostname or ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: the kernel chooses the route
        address: str = s.getsockname()[0]
        return address
