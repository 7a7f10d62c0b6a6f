"""A stand-in for NCCL over gloo that keeps none of the promises that NCCL does not make.

    dist.new_group(backend="pessimistic_nccl")       after this module is imported, in every member's process

The first collective makes the communicator, and waits for the others without a limit. `Work.wait` returns at once and never
raises. A work is done some time after the bytes were sent, or never if a peer is gone, which no one is told. `shutdown` waits
for works under way; only `abort` ends them, and only on this side.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

NAME = "pessimistic_nccl"
LATE_S = 0.02
WITHOUT_LIMIT = timedelta(days=1)


class Late(dist._Work):
    """A kernel that was launched."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def exception(self) -> None:
        """Nothing: a peer that is gone is no error yet."""

    def wait(self, timeout: timedelta = WITHOUT_LIMIT) -> bool:
        return True


class PessimisticNccl(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._make = lambda: dist.ProcessGroupGloo(dist.PrefixStore("inner", store), rank, size, WITHOUT_LIMIT)
        self._inner: dist.ProcessGroupGloo | None = None
        self._works: list[Late] = []
        self._stream: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._stream.get()()

    def getBackendName(self) -> str:
        return NAME

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Late:
        if self._inner is None:
            self._inner = self._make()
        inner, (tensor,), work = self._inner, tensors, Late()

        def kernel() -> None:
            landed = tensor.clone()
            try:
                inner.broadcast([landed], options).wait()
            except RuntimeError:
                return  # it spins
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


dist.Backend.register_backend(NAME, PessimisticNccl, devices=["cpu"])
