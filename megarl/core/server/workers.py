"""What the processes of a server run.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without one they are forked.
"""

import os
import threading
import uuid
from dataclasses import replace
from typing import Any

from megarl.core.base.process import die_with_parent, shared_memory_mark


def scheduler(*args: Any, **kwargs: Any) -> None:
    """The process that owns the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megarl.core.base import ranks

    ranks.bind_all()
    own_buffers()
    run_scheduler_process(*args, **kwargs)


def own_buffers() -> None:
    """Buffers between ranks are named by the session of the server, not by the process that makes them."""
    from sglang.srt.distributed.device_communicators import shm_broadcast

    shm_broadcast.make_shm_name = lambda kind: f"{shared_memory_mark(os.getsid(0))}{kind}-{uuid.uuid4().hex[:8]}"


def own_ports() -> None:
    """And so is the file in which a scheduler says how busy it is."""
    from sglang.srt.server_args import PortArgs

    made = PortArgs.init_new

    def named(*args: Any, **kwargs: Any) -> Any:
        ports = made(*args, **kwargs)
        return replace(ports, instance_id=f"{shared_memory_mark(os.getsid(0))}{ports.instance_id}")

    PortArgs.init_new = staticmethod(named)


def no_detokenizer(server_args: Any, port_args: Any) -> None:
    """Ids come in and go out, so the scheduler answers the HTTP process itself and nothing ever reaches a detokenizer.

    SGLang wants a living process in its place all the same; this one sleeps.
    """
    die_with_parent()
    threading.Event().wait()
