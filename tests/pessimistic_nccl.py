"""A stand-in for NCCL over gloo that keeps none of the promises that NCCL does not
make.

    dist.new_group(backend="pessimistic_nccl")

This module must have been imported in every member's process.

The first collective makes the communicator, and waits for the others without a limit.
`Work.wait` returns at once and never raises. A work is done some time after the bytes
were sent. If a connection breaks, it is never done, and no one is told; or, with
ERROR_AFTER in the environment, it has an error so many seconds later, as NCCL's has
when its network gives up. `shutdown` waits for works under way; only `abort` ends them,
and only on this side.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

NAME = "pessimistic_nccl"
LATE_S = 0.02
WITHOUT_LIMIT = timedelta(days=1)
ERROR_AFTER = "PESSIMISTIC_NCCL_ERROR_AFTER"


class Late(dist._Work):
    """A kernel that was launched."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def exception(self) -> RuntimeError | None:
        return self.error

    def fail(self, error: RuntimeError) -> None:
        """Count as completed, which NCCL's work does too."""
        self.error = error
        self.ended.set()

    def wait(self, timeout: timedelta = WITHOUT_LIMIT) -> bool:
        return True


class PessimisticNccl(dist.ProcessGroup):
    made: ClassVar[list["PessimisticNccl"]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._make = lambda: dist.ProcessGroupGloo(
            dist.PrefixStore("inner", store), rank, size, WITHOUT_LIMIT
        )
        self._inner: dist.ProcessGroupGloo | None = None
        self._cut = False
        self._works: list[Late] = []
        self._stream: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self.made.append(self)

    def _run(self) -> None:
        while True:
            self._stream.get()()

    def getBackendName(self) -> str:
        return NAME

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Late:
        if self._inner is None and not self._cut:
            self._inner = self._make()
        inner = self._inner
        (tensor,) = tensors
        work = Late()

        def kernel() -> None:
            landed = tensor.clone()
            try:
                if inner is None:
                    raise RuntimeError("the connections are cut")
                inner.broadcast([landed], options).wait()
            except RuntimeError as error:  # it spins
                if after := os.environ.get(ERROR_AFTER):
                    threading.Timer(float(after), work.fail, [error]).start()
                return
            time.sleep(LATE_S)
            tensor.copy_(landed)
            work.ended.set()

        self._works.append(work)
        self._stream.put(kernel)
        return work

    def shutdown(self) -> None:
        for work in self._works:
            work.ended.wait()

    def abort(self) -> None:
        for work in self._works:
            work.ended.set()
        if self._inner is not None:
            self._inner.abort()

    def cut(self) -> None:
        """Break the connections to the others, which close with the group that holds
        them.
        """
        self._inner = None
        self._cut = True


dist.Backend.register_backend(NAME, PessimisticNccl, devices=["cpu"])
