"""Signals that ask a command to save and end: counted instead of ending us.

Slurm sends the same signal to all processes of a job at times, and the batch script passes on what it gets: a repetition within
`ONE_WISH_S` is the same wish. Not so Ctrl-C, which a person presses.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what the batch scripts ask Slurm for ahead of a job's end (`#SBATCH --signal`)."""
ONE_WISH_S = 5.0


class Wish:
    """How often we were asked to end, and by what first."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0
        self._last = -ONE_WISH_S

    def heard(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT or now - self._last > ONE_WISH_S:
            self.count += 1
            self.signal = self.signal or number
        self._last = now


@contextmanager
def wishes() -> Iterator[Wish]:
    """Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal are counted; not a closed terminal under `nohup`."""
    wish = Wish()
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, wish.heard) for number in numbers}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
