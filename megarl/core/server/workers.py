"""The processes of a server.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without one they are forked.
"""

import os
import threading
import uuid
from dataclasses import replace

from megarl.core.base.process import die_with_parent, shared_memory_mark


def scheduler(*args: object, **kwargs: object) -> None:
    """Run the process that owns the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megarl.core.base import ranks

    ranks.bind_all()
    own_buffers()
    run_scheduler_process(*args, **kwargs)


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
