"""The processes of a server.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without one they are forked.
"""

import os
import threading
import uuid
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from megarl.core.base.process import die_with_parent, shared_memory_mark

EARLIER = 0.75
"""A server gives a bucket up at this share of the learner's limit, so that its answer, which says so, arrives in time."""


def scheduler(weights_limit_s: float, *args: object, **kwargs: object) -> None:
    """Run the process that owns the model. weights_limit_s: of the learner's wait for one bucket (weights.timeout_s)."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megarl.core.base import ranks

    ranks.bind_all()
    own_buffers()
    own_groups(weights_limit_s * EARLIER)
    run_scheduler_process(*args, **kwargs)


def own_groups(limit_s: float) -> None:
    """Receive weights through megarl's group, whose waits end, in place of SGLang's."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from megarl.core.base.broadcast import BroadcastGroup

    def join(backend: str, init_method: str, world_size: int, rank: int, group_name: str) -> BroadcastGroup:
        at = urlsplit(init_method)
        return BroadcastGroup(group_name, rank, world_size, backend, (str(at.hostname), int(at.port or 0)), limit_s)

    def receive(
        self: Any, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> list[tuple[str, Any]]:
        bucket = FlattenedTensorBucket.empty(names, dtypes, shapes, self.device)
        group = self._model_update_group[group_name]
        try:
            group.wait(group.broadcast(bucket.get_flattened_tensor()))
        except RuntimeError as error:
            group.close(str(error))
            raise
        return bucket.reconstruct_tensors()

    def leave(self: Any, group_name: str) -> tuple[bool, str]:
        if group := self._model_update_group.pop(group_name, None):
            group.close()
        return True, ""

    weight_updater.init_custom_process_group = join
    updater = weight_updater.WeightUpdater
    updater._receive_bucketed_weights_from_distributed = receive
    updater.destroy_weights_update_group = leave


def own_buffers() -> None:
    """Name buffers between ranks by the server's session, not by the process that makes them."""
    from sglang.srt.distributed.device_communicators import shm_broadcast

    shm_broadcast.make_shm_name = lambda kind: f"{shared_memory_mark(os.getsid(0))}{kind}-{uuid.uuid4().hex[:8]}"


def own_ports() -> None:
    """Name the file in which a scheduler reports its load in the same way."""
    from sglang.srt.server_args import PortArgs

    made = PortArgs.init_new

    def named(*args: object, **kwargs: object) -> PortArgs:
        ports = made(*args, **kwargs)
        return replace(ports, instance_id=f"{shared_memory_mark(os.getsid(0))}{ports.instance_id}")

    PortArgs.init_new = staticmethod(named)


def no_detokenizer(server_args: object, port_args: object) -> None:
    """Sleep in place of the detokenizer, which SGLang wants alive although nothing reaches it: only token ids pass."""
    die_with_parent()
    threading.Event().wait()
