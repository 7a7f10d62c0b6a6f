"""A trace in Trace Event Format, the JSON that Perfetto and chrome://tracing read: object form, times in whole microseconds.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("Trace Event Format", Google). Of its
events these are used: X complete, i instant, C counter, s and f flow, M metadata.
"""

from typing import Any

from megarl.core.telemetry.spans import Value

TraceEvent = dict[str, Any]


class ChromeTrace:
    """Processes and threads are given by name, times in seconds; `base` is the time that becomes 0."""

    def __init__(self, base: float) -> None:
        self._base = base
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._events: list[TraceEvent] = []
        self._flows = 0

    def complete(self, on: str, name: str, begin: float, end: float, args: dict[str, Value]) -> None:
        """A span on `process/thread`. Those of a thread must be within each other or apart."""
        start = self._us(begin)
        self._add("X", on, name, start, dur=self._us(end) - start, args=args)

    def instant(self, on: str, name: str, at: float, args: dict[str, Value]) -> None:
        self._add("i", on, name, self._us(at), s="t", args=args)

    def counter(self, process: str, name: str, at: float, values: dict[str, float]) -> None:
        """From then on; several values are drawn on top of each other."""
        event = {"ph": "C", "name": name, "pid": self._pid(process), "tid": 0, "ts": self._us(at), "args": values}
        self._events.append(event)

    def arrow(self, name: str, start: tuple[str, float], end: tuple[str, float]) -> None:
        """From the span on (process/thread, time) to another: each time must lie within its span."""
        self._flows += 1
        self._add("s", start[0], name, self._us(start[1]), cat="group", id=self._flows)
        self._add("f", end[0], name, self._us(end[1]), cat="group", id=self._flows, bp="e")

    def tree(self, **other: Any) -> dict[str, Any]:
        """The whole trace, metadata first, then by time; `other`: what it is about."""
        order = sorted(self._events, key=lambda e: (e["ts"], -e.get("dur", 0)))
        return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [*self._metadata(), *order]}

    def _metadata(self) -> list[TraceEvent]:
        found = []
        for process, pid in self._processes.items():
            found += [
                _named("process_name", pid, 0, name=process),
                _named("process_sort_index", pid, 0, sort_index=pid),
            ]
        for (process, thread), tid in self._threads.items():
            pid = self._processes[process]
            found += [
                _named("thread_name", pid, tid, name=thread),
                _named("thread_sort_index", pid, tid, sort_index=tid),
            ]
        return found

    def _add(self, ph: str, on: str, name: str, ts: int, **more: Any) -> None:
        process, _, thread = on.partition("/")
        pid = self._pid(process)
        tid = self._threads.setdefault((process, thread), len(self._threads) + 1)
        self._events.append({"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": ts} | more)

    def _pid(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)

    def _us(self, seconds: float) -> int:
        return round((seconds - self._base) * 1e6)


def _named(what: str, pid: int, tid: int, **args: str | int) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
