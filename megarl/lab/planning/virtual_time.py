"""An asyncio event loop whose clock jumps: what waits for seconds waits for none, in the right order.

    run(coroutine)     asyncio.sleep, call_later, timeouts: by this clock, which starts at 0

When nothing is ready to run, the clock is set to the next timer. So asyncio code (megarl/core/sampling/places.py) runs in a
simulation as it is. Nothing may wait for a socket or a thread: a simulation that waits for nothing that can happen is an error.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Standstill(Exception):
    """All tasks wait, and no timer is set."""


class _Jump(selectors.SelectSelector):
    """Waits for no file, and says that `timeout` seconds have passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Standstill("every task waits for another")
        self.now += max(timeout, 0.0)
        return []


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises Standstill where real time would pass for ever."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
