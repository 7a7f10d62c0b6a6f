"""How a role spends its time, written while it runs: RUN/trace/ROLE.jsonl, read by
megarl/tools/report/trace.py.

    spans.open, span, timed, event ─► queue ─► flush: one write
    ROLE.1.jsonl  the previous part, once ROLE.jsonl exceeds LARGEST_BYTES: at most two
    parts are kept

Nothing is done per token, and nothing waits for the disk.

Times are Unix seconds at the process's start, advanced by its monotonic clock, so that
roles on several machines are aligned as well as their clocks are, and setting a clock
later does no harm. A span's row in the picture (`on`) is `process/thread`.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from megarl.core.base.rundir import opened_jsonl

log = logging.getLogger(__name__)

LARGEST_BYTES = 32 << 20
"""Size of a part in bytes, enough for the spans of some 150 steps with 1000 requests
each.
"""

Value = str | int | float | bool | list[int]
TICKETS = "groups/tickets"
"""Row of the picture for the spans of tickets."""


class Life(msgspec.Struct, frozen=True, tag="life"):
    """A process begins to write, or continues in a new part. `began` distinguishes it
    from others of its role.
    """

    role: str
    host: str
    process: int
    began: float


class Open(msgspec.Struct, frozen=True, tag="open", omit_defaults=True):
    """A span has begun; it ends with a `Span` of the same place, name and start, or
    with its process.
    """

    on: str
    name: str
    start: float = msgspec.field(name="begin")
    args: dict[str, Value] = {}


class Span(msgspec.Struct, frozen=True, tag="span", omit_defaults=True):
    """A span from `start` to `end`. `cut`: it had not ended when its process did, or
    when it was read.
    """

    on: str
    name: str
    start: float = msgspec.field(name="begin")
    end: float
    args: dict[str, Value] = {}
    cut: bool = False


class SpanEvent(msgspec.Struct, frozen=True, tag="event", omit_defaults=True):
    """Something that happened at one moment."""

    on: str
    name: str
    at: float
    args: dict[str, Value] = {}


TraceRow = Life | Open | Span | SpanEvent

_encode = msgspec.json.Encoder().encode


class Spans:
    """Records the spans of one process, from all its threads; before `write_to`, none.
    Times are those of time.monotonic().
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._offset = time.time() - time.monotonic()
        self._rows: deque[TraceRow] = deque()
        self._lock = threading.Lock()
        self._failed = False

    def write_to(self, path: Path) -> None:
        """Record spans from now on, to be written to this file."""
        self._life = Life(path.stem, socket.gethostname(), os.getpid(), time.time())
        self._path = path
        self._add(self._life)

    def open(self, on: str, name: str, start: float, **args: Value) -> None:
        """Record that a span has begun; `span` reports its end."""
        self._add(Open(on, name, self._offset + start, args))

    def span(self, on: str, name: str, start: float, end: float, **args: Value) -> None:
        """Record a span that has ended."""
        self._add(Span(on, name, self._offset + start, self._offset + end, args))

    @contextmanager
    def timed(self, on: str, name: str, **args: Value) -> Iterator[None]:
        """Record the time within this context as a span, unless it raises."""
        start = time.monotonic()
        yield
        self.span(on, name, start, time.monotonic(), **args)

    def event(self, on: str, name: str, **args: Value) -> None:
        """Record something that happens now."""
        self._add(SpanEvent(on, name, self._offset + time.monotonic(), args))

    def flush(self) -> None:
        """Write the queued rows. If that fails, spans are lost, but the run goes on."""
        path = self._path
        if path is None:
            return
        with self._lock:
            data = bytearray()
            while self._rows:
                data += _encode(self._rows.popleft()) + b"\n"
            try:
                self._append(path, data)
            except OSError as error:
                if not self._failed:
                    log.warning("%s: cannot be written, spans are lost: %s", path, error.strerror)
                self._failed = True

    def _append(self, path: Path, data: bytearray) -> None:
        """Write to the current part; begin a new one if it is full."""
        path.parent.mkdir(exist_ok=True)
        with opened_jsonl(path) as file:
            file.write(data)
            is_full = file.tell() > LARGEST_BYTES
        if is_full:
            path.replace(path.with_suffix(".1.jsonl"))
            self._rows.appendleft(self._life)  # each part begins with the process

    def _add(self, row: TraceRow) -> None:
        """Queue a row, once there is a file for it."""
        if self._path is not None:
            self._rows.append(row)


spans = Spans()
