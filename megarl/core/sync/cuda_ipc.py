"""Transport: the learner's buckets stay where they are, and the servers on the same GPU
read them there.

    GPU 0   rank 0  bucket ──handle (CUDA IPC)──► server 0
    GPU 1   rank 1  bucket ──handle────────────► server 1

Only the handle, a few hundred bytes, goes over HTTP. The rank on a server's first GPU
sends to it.

All ranks take part in gathering weights; those with a server divide them into buckets.
A server has read a bucket when it replies; until then the bucket is kept, and the next
one is not handed over. Without a GPU the buckets are in the machine's shared memory
(/dev/shm), and everything else is the same.

SGLang unpickles a handle (with its own allow-list), so a server accepts handles only
from its own machine (engine/proxy.py).
"""

import base64
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from megarl.core.base import device
from megarl.core.base.ranks import gathered
from megarl.core.client.client import ServerClient
from megarl.core.client.fleet import Fleet
from megarl.core.sync.sent_deltas import LastSent
from megarl.core.sync.served_weights import ServedWeights
from megarl.core.sync.transport import (
    Bucket,
    Sent,
    SentChecksums,
    buckets,
    holds_whole_parameters,
    merged,
    with_last,
)

DEVICE = 6
"""Index of the device among rebuild_cuda_tensor's arguments. A device number means
nothing to a process that sees other GPUs, so SGLang expects a UUID there
(sglang.srt.utils.patch_torch).
"""


class CudaIpcTransport:
    """Sends weights from a learner rank to the servers on its GPU. `send` is collective
    over all ranks.
    """

    staged = False

    def __init__(self, weights: ServedWeights, last: LastSent, bucket_bytes: int) -> None:
        self._weights = weights
        self._last = last
        self._bucket_bytes = bucket_bytes
        # The other strategy, file descriptors, would need a connection between the two
        # processes.
        torch.multiprocessing.set_sharing_strategy("file_system")

    def send(self, fleet: Fleet, ids: Sequence[int], version: int) -> Sent:
        """Send the weights to the paused servers `ids`. Every rank returns the same
        result. COLLECTIVE.
        """
        mine = [i for i in ids if i * fleet.servers[i].address.tensor_parallel == dist.get_rank()]
        return merged(gathered(self._send(fleet, mine)))

    def _send(self, fleet: Fleet, mine: Sequence[int]) -> Sent:
        """Send the weights to the servers `mine`, those of this rank; return the result
        for these only. A rank without any takes part in gathering the weights.
        COLLECTIVE.
        """
        if not mine:
            deque(self._weights.gathered(), maxlen=0)
            return Sent({}, {}, 0)
        _, errors = fleet.call_each(mine, _check_and_begin)
        expert_ranks = self._weights.expert_ranks
        checksums = SentChecksums(self._weights.family.architecture, expert_ranks)
        tensors = self._weights.tensors()
        if holds_whole_parameters(fleet, mine, expert_ranks):
            tensors = checksums.watch(tensors)
        size = 0
        for bucket, is_last in with_last(buckets(self._last.changed(tensors), self._bucket_bytes)):
            size += bucket.flat.nbytes
            alive = [i for i in mine if i not in errors]
            errors |= self._hand_over(fleet, alive, bucket, fleet.version if is_last else None)
        alive = [i for i in mine if i not in errors]
        _, end_errors = fleet.call_each(alive, lambda server: server.end_update())
        errors |= end_errors
        expected = checksums.expected()
        expected_experts = checksums.expected_experts()
        return Sent(errors, expected, size, checksums.failed, expected_experts)

    def _hand_over(
        self, fleet: Fleet, ids: Sequence[int], bucket: Bucket, complete: int | None
    ) -> dict[int, str]:
        """Have these servers read the bucket; return errors by server id. complete: as
        in ServerClient.take.
        """
        if bucket.flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        handles: dict[int, list[str]] = {}
        for server_id in ids:
            # Each handle counts as one reader of the memory, so every rank of a server
            # gets its own.
            ranks = fleet.servers[server_id].address.tensor_parallel
            handles[server_id] = [handle(bucket) for _ in range(ranks)]
        _, errors = fleet.call_each(ids, lambda s: s.take(handles[s.address.id], complete))
        if bucket.flat.is_cuda:
            torch.cuda.ipc_collect()
        return errors


def handle(bucket: Bucket) -> str:
    """Return the bucket in SGLang's format: `{"flattened_tensor", "metadata"}`, the
    tensor as a handle, pickled, in base64. SGLang only reads attributes of the
    metadata; using its classes would import all of it into the learner.
    """
    metadata = []
    start = 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        end = start + size
        metadata.append(
            SimpleNamespace(
                name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=size
            )
        )
        start = end
    body = {"flattened_tensor": _Handle(bucket.flat), "metadata": metadata}
    return base64.b64encode(ForkingPickler.dumps(body)).decode()


class _Handle:
    """A tensor that is pickled as torch pickles it for another process, except with its
    device's UUID.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])
        return rebuild, arguments


async def _check_and_begin(server: ServerClient) -> None:
    """Begin an update. MegarlError if the server cannot read this rank's memory: the
    first handle would crash SGLang.
    """
    mine = device.of_rank()
    theirs = await server.device_identity()
    missing = ""
    if mine.machine != theirs.machine:
        missing = "machine"
    elif not set(mine.gpus) <= set(theirs.gpus):
        missing = f"GPU ({', '.join(mine.gpus)})"
    if missing:
        raise server.error(
            "hand over",
            f"it is not on the learner's {missing}; set resources.colocate=true, or"
            " weights.transport=process_group",
        )
    await server.begin_update()
