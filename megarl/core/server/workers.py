"""The processes of a server.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without one they are forked.
"""

import logging
import os
import threading
import uuid
from dataclasses import replace
from functools import partial
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
    own_labels()
    own_checksums()
    own_loading()
    # At each bucket it would warn of all parameters that are not in it: 1.7 TB of logs in a long run of Scout.
    logging.getLogger("sglang.srt.models.mllama4").setLevel(logging.ERROR)
    run_scheduler_process(*args, **kwargs)


def own_labels() -> None:
    """Label a token that was being computed when a pause in place began with the version that computes it.

    SGLang's schedule takes a result in while the next one is computed. Over the pause one is left in its queue, and would count
    as computed by the new weights. The pause also waits until the GPU has computed it, before its weights are replaced.
    """
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    pause, change = Scheduler.pause_generation, Scheduler.record_weight_version_change

    def pause_and_wait(self: Any, request: Any) -> None:
        pause(self, request)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def change_after_what_is_queued(self: Any, new_version: str | None) -> None:
        before = get_serving().weight_version
        change(self, new_version)
        if get_serving().weight_version == before:
            return
        for batch, _ in getattr(self, "result_queue", ()):
            for request in batch.reqs:
                if request.finished() or request.inflight_middle_chunks > 0:  # of a prompt: no token comes of it
                    continue
                if request.output_ids:
                    request.weight_version_events.pop()
                tokens = len(request.output_ids) + 1
                request.weight_version_events.append(WeightVersionEvent(old_version=before, num_output_tokens=tokens))

    Scheduler.pause_generation = pause_and_wait
    Scheduler.record_weight_version_change = change_after_what_is_queued


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


def own_checksums() -> None:
    """Answer /weights_checker with megarl's checksum of each parameter, which a learner can add up from what it sends.

    SGLang's is SHA-256 on a CPU, and on a GPU a hash of the joined tensor only.
    """
    from sglang.srt.utils import weight_checker

    from megarl.core.base.checksum import checksum, written

    weight_checker._hash_tensor = lambda tensor: written(int(checksum(tensor)))


def own_loading() -> None:
    """Load deltas (base/delta.py), too.

    SGLang's own hook, custom_weight_loader, is only for update_weights_from_tensor, which takes from the same machine.
    """
    from sglang.srt.model_loader import loader

    from megarl.core.base.delta import load

    make = loader._initialize_model

    def made(*args: Any, **kwargs: Any) -> Any:
        model = make(*args, **kwargs)
        kind, loader_of = type(model), type(model).load_weights
        kind.load_weights = lambda self, tensors: load(self, partial(loader_of, self), tensors)
        return model

    loader._initialize_model = made


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
