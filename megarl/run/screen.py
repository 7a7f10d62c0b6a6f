"""Where frames go: a live picture in a terminal, else plain lines."""

import os

from rich.console import Console
from rich.live import Live

from megarl.run.view import Frame, line, render, warnings

LINE_S, JOB_LINE_S = 10.0, 60.0
"""Between lines where the output is no terminal, and in the output of a Slurm job, which grows for weeks."""


class Screen:
    """A live picture, or a line now and then and each warning once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._every = JOB_LINE_S if "SLURM_JOB_ID" in os.environ else LINE_S
        self._last, self._stopping = -self._every, ""
        self._warned: set[str] = set()

    def __enter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, frame: Frame) -> None:
        if self._live:
            self._live.update(render(frame), refresh=True)
        elif frame.elapsed_s - self._last >= self._every or bool(frame.stopping) != bool(self._stopping):
            self._last, self._stopping = frame.elapsed_s, frame.stopping
            print(line(frame), flush=True)
            for warning in warnings(frame):
                kind = warning.lstrip("0123456789.%")
                if kind not in self._warned:
                    self._warned.add(kind)
                    print(f"! {warning}", flush=True)

    def say(self, text: str) -> None:
        """One lasting line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
