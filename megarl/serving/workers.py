"""What the processes of a server run.

With a GPU, SGLang starts them with `spawn`, which imports this module first; without one they are forked.
"""

import threading
from typing import Any

from megarl.process import die_with_parent


def scheduler(*args: Any, **kwargs: Any) -> None:
    """The process that owns the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from megarl import stores

    stores.bind_all()
    run_scheduler_process(*args, **kwargs)


def no_detokenizer(server_args: Any, port_args: Any) -> None:
    """Ids come in and go out, so the scheduler answers the HTTP process itself and nothing ever reaches a detokenizer.

    SGLang wants a living process in its place all the same; this one sleeps.
    """
    die_with_parent()
    threading.Event().wait()
