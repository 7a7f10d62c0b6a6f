"""`megarl trace RUN`: shows the last steps of a run in ui.perfetto.dev or
chrome://tracing, also while it runs.

    RUN/trace/*.jsonl (telemetry/spans.py)
        ─► the window of these steps ─► lanes, groups ─► ChromeTrace ─► trace.json.gz
    RUN/metrics.jsonl (lag) ───────────────────────────┘

A process in the trace is a role. The learner's step contains its phases. A server is
busy while any request runs on it, and paused while a publication holds it; requests and
gradings get as many lanes as run concurrently. A group's span goes from its ticket to
the batch that trains it, from which an arrow leads to the step. Counters are derived
from the spans.

The file is in Trace Event Format, object form, with times in whole microseconds; it
uses these events: X complete, i instant, C counter, s and f flow, M metadata.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

Lanes are laid out here, instead of by Perfetto from async events (b, e): it names
tracks after such events, so each ticket would have a track of its own or lose its
number, and it binds s and f to threads only (json_trace_parser_impl.cc).
"""

import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.files import lines_of
from megarl.core.base.rundir import RunDir, latest_rows, write_atomically
from megarl.core.base.types import JsonObject
from megarl.core.telemetry.spans import TICKETS, Life, Open, Span, SpanEvent, TraceRow, Value

SpanTree = Sequence[Span]  # spans that stay on one lane; the first contains the others


def nested(spans: Iterable[Span]) -> list[SpanTree]:
    """Collect spans, nested or disjoint, into units: a span, and the spans that lie
    within it.
    """
    units: list[list[Span]] = []
    for span in sorted(spans, key=_by_start):
        if units and span.end <= units[-1][0].end:
            units[-1].append(span)
        else:
            units.append([span])
    return list(units)


def _by_start(span: Span) -> tuple[float, float]:
    """Return a sort key: by start, the longer first, so that a span comes before those
    that lie within it.
    """
    return span.start, -span.end


def packed(units: Iterable[SpanTree]) -> list[list[Span]]:
    """Distribute units over as few lanes as possible, such that units on one lane do
    not overlap.
    """
    lanes: list[list[SpanTree]] = []
    for unit in sorted(units, key=lambda unit: _by_start(unit[0])):
        start = unit[0].start
        free = [lane for lane in lanes if lane[-1][0].end <= start]
        if free:
            free[0].append(unit)
        else:
            lanes.append([unit])
    return [list(itertools.chain.from_iterable(lane)) for lane in lanes]


def changes(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """Return (time, count from then on) for each time at which the count of open spans
    changes. spans: (start, end).
    """
    differences: dict[float, int] = defaultdict(int)
    for start, end in spans:
        differences[start] += 1
        differences[end] -= 1
    counts = []
    count = 0
    for time in sorted(differences):
        if differences[time]:
            count += differences[time]
            counts.append((time, count))
    return counts


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return, in order, the disjoint intervals that are covered by any span."""
    intervals = []
    start: float | None = None  # of the present interval; None between intervals
    for time, count in changes((span.start, span.end) for span in spans):
        if start is None:
            start = time
        elif count == 0:
            intervals.append((start, time))
            start = None
    return intervals


class GroupLife(NamedTuple):
    """A group from its ticket to the batch that trains it. An unfinished part ends at
    `last_time`.
    """

    ticket: int
    start: float
    last_time: float
    generated_at: float | None  # when all its rollouts had been graded; None: not yet
    taken_at: float | None  # when its batch was sent; None: not yet
    step: int  # the step of that batch
    removed: bool  # it lost its slot (zero variance under `refill`) and is never taken
    args: dict[str, Value]

    @property
    def end(self) -> float:
        """When the group's span ends: at the batch that trains it or, if it is removed,
        when it was generated.
        """
        end = self.generated_at if self.removed else self.taken_at
        return self.last_time if end is None else end

    def unit(self) -> SpanTree:
        """Return the whole span, then its parts: generated, waiting."""
        name = f"ticket {self.ticket}"
        is_generated = self.generated_at is not None
        generated_at = self.end if self.generated_at is None else self.generated_at
        is_unfinished = self.taken_at is None and not self.removed
        parts = [
            Span(TICKETS, name, self.start, self.end, self.args, cut=is_unfinished),
            Span(TICKETS, "generated", self.start, generated_at, cut=not is_generated),
        ]
        if generated_at < self.end:
            waits = "waits" if self.taken_at is None else f"waits for step {self.step}"
            parts.append(Span(TICKETS, waits, generated_at, self.end, cut=is_unfinished))
        return parts


def group_lives(spans: Sequence[Span], events: Iterable[SpanEvent]) -> list[GroupLife]:
    """Return the groups, ordered by ticket. A group interrupted by a crash of the
    controller goes on in its next life.
    """
    by_ticket: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on == TICKETS:
            by_ticket[cast(int, span.args["ticket"])].append(span)
    batches: dict[int, SpanEvent] = {}  # by ticket; the first one counts
    for event in events:
        tickets = event.args.get("tickets")
        for ticket in tickets if isinstance(tickets, list) else ():
            batches.setdefault(ticket, event)
    last_time = max((span.end for span in spans), default=0.0)
    lives = []
    for ticket, parts in sorted(by_ticket.items()):
        last = max(parts, key=lambda span: span.end)
        taken_at = None
        step = -1
        batch = batches.get(ticket)
        if batch is not None:
            taken_at = max(batch.at, last.end)  # never before it was generated
            step = cast(int, batch.args["step"])
        lives.append(
            GroupLife(
                ticket=ticket,
                start=min(span.start for span in parts),
                last_time=last_time,
                generated_at=None if last.cut else last.end,
                taken_at=taken_at,
                step=step,
                removed=bool(last.args.get("removed")),
                args=last.args,
            )
        )
    return lives


class ChromeTrace:
    """A trace under construction. Processes and threads are given by name, times in
    seconds; `base` becomes time 0.
    """

    def __init__(self, base: float) -> None:
        self._base = base
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}
        self._events: list[JsonObject] = []
        self._flows = 0

    def complete(
        self, on: str, name: str, start: float, end: float, args: dict[str, Value]
    ) -> None:
        """Add a span on `process/thread`. Spans of one thread must be nested or
        disjoint.
        """
        duration = self._us(end) - self._us(start)
        self.add("X", on, name, start, dur=duration, args=args)

    def counter(self, process: str, name: str, at: float, values: dict[str, float]) -> None:
        """Set a counter from this time on; several values are drawn stacked."""
        self.add("C", process, name, at, args=values)

    def arrow(self, name: str, start: tuple[str, float], end: tuple[str, float]) -> None:
        """Draw an arrow between two spans, each given as (process/thread, time), with a
        time within the span.
        """
        self._flows += 1
        start_on, start_at = start
        end_on, end_at = end
        self.add("s", start_on, name, start_at, cat="group", id=self._flows)
        self.add("f", end_on, name, end_at, cat="group", id=self._flows, bp="e")

    def tree(self, about: JsonObject) -> JsonObject:
        """Return the file's content: metadata, then events by time. about: the run's
        path, its steps, the time that is 0.
        """
        metadata: list[JsonObject] = []
        for process, pid in self._processes.items():
            metadata += _metadata("process", process, pid, 0)
        for (process, thread), tid in self._threads.items():
            metadata += _metadata("thread", thread, self._processes[process], tid)
        events = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*metadata, *events]}

    def add(self, phase: str, on: str, name: str, at: float, **fields: object) -> None:
        """Add an event of this phase on `process` or `process/thread`."""
        process, _, thread = on.partition("/")
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = 0
        if thread:
            tid = self._threads.setdefault((process, thread), len(self._threads) + 1)
        event = {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": self._us(at)}
        self._events.append(event | fields)

    def _us(self, seconds: float) -> int:
        """Return a time in the trace's unit, microseconds since `base`."""
        return round((seconds - self._base) * 1e6)


def _metadata(kind: str, name: str, pid: int, tid: int) -> list[JsonObject]:
    """Return the events that name a process or thread, and set its place. kind: process
    or thread; tid: 0 for a process.
    """
    place = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    return [
        {"name": f"{kind}_name", **place, "args": {"name": name}},
        {"name": f"{kind}_sort_index", **place, "args": {"sort_index": tid or pid}},
    ]


LEARNER = "learner/rank 0"
REQUESTS = "/requests"
BUSY = "/busy"
MARGIN_S = 1e-6  # arrows begin and end this far inside their spans


def main(run: Path, steps: int, output: Path | None) -> int:
    """Write the trace of the last `steps` steps, and print where it is; return 0.
    output: the file; None: trace.json.gz in the run directory.
    """
    rundir = RunDir.opened(run)
    trace = trace_of(rundir, steps)
    path = output or rundir.path / "trace.json.gz"
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, 6)
    try:
        if output:
            output.write_bytes(data)  # may be a link or a device, which stays one
        else:
            write_atomically(path, data)
    except OSError as error:
        raise MegarlError(
            f"{path}: cannot be written: {error.strerror}; name another file with --output"
        ) from None
    step_numbers = trace["otherData"]["steps"]
    content = (
        f"steps {step_numbers[0]} to {step_numbers[-1]}"
        if step_numbers
        else "no step is complete yet"
    )
    terminal.say(
        f"{path}: {content}, {len(trace['traceEvents'])} events; open it at"
        " https://ui.perfetto.dev or chrome://tracing"
    )
    return 0


def trace_of(rundir: RunDir, steps: int) -> JsonObject:
    """Build the trace from the start of the last `steps` complete steps. MegarlError if
    nothing is recorded yet.
    """
    spans, events = read(rundir.trace)
    if not spans:
        raise MegarlError(
            f"{rundir.trace}: nothing is recorded there yet; try again once the run samples"
        )
    complete = [span for span in spans if _is_step(span)][-steps:]
    first_span = complete[0] if complete else spans[0]
    since = first_span.start
    rows = _rows_by_place(spans)
    lives = group_lives(spans, events)
    drawn_lives = [life for life in lives if life.end > since]
    drawn: dict[str, list[Span]] = {}
    starts = [life.start for life in drawn_lives]
    for place, row in rows.items():
        drawn[place] = [span for span in row if span.end > since]
        starts += [span.start for span in drawn[place]]
    first = min(starts)
    trace = ChromeTrace(first)
    for place in sorted(rows, key=_order):
        if place == LEARNER:
            units = nested(drawn[place])
        else:
            units = [[span] for span in drawn[place]]
        _draw(trace, place, units)
    _draw_groups(trace, drawn_lives, rows[LEARNER])
    _count(trace, rows, lives, since)
    _draw_lags(trace, rundir, complete)
    for event in events:
        if event.at > since:
            trace.add("i", event.on, event.name, event.at, s="t", args=event.args)
    numbers = [cast(int, span.args["step"]) for span in complete]
    return trace.tree({"run": str(rundir.path), "steps": numbers, "begin": first})


def _is_step(span: Span) -> bool:
    return span.on == LEARNER and span.name == f"step {span.args.get('step')}"


def _draw_lags(trace: ChromeTrace, rundir: RunDir, steps: Iterable[Span]) -> None:
    """Draw at the end of each step how old its tokens were."""
    metrics = {row["step"]: row for row in latest_rows(rundir.metrics)}
    for span in steps:
        row = metrics.get(cast(int, span.args["step"]), {})
        for name in ("lag_mean", "lag_max"):
            lag = row.get(name, math.nan)
            if math.isfinite(lag):
                trace.counter("learner", name, span.end, {"steps": lag})


def _rows_by_place(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans by the place where they are drawn, without those of groups; add
    spans for when each server was busy.
    """
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on != TICKETS:
            rows[span.on].append(span)
    places_of_requests = [place for place in rows if place.endswith(REQUESTS)]
    for place in places_of_requests:
        busy = place.removesuffix(REQUESTS) + BUSY
        intervals = union(rows[place])
        rows[busy] = [Span(busy, "busy", start, end) for start, end in intervals]
    return rows


def _order(place: str) -> tuple[int, int, str]:
    """Return a sort key: the learner first, then servers by number, then the
    controller.
    """
    role, _, number = place.partition("/")[0].partition(" ")
    return {"learner": 0, "server": 1}.get(role, 2), int(number or 0), place


def _draw(trace: ChromeTrace, place: str, units: Sequence[SpanTree]) -> dict[int, str]:
    """Draw units on as many lanes as needed; return the lane of each span by its
    id().
    """
    lanes = packed(units)
    lane_of = {}
    for number, lane in enumerate(lanes, 1):
        name = place if len(lanes) == 1 else f"{place} {number}"
        for span in lane:
            args = span.args
            if span.cut:
                args = args | {"unfinished": True}
            trace.complete(name, span.name, span.start, span.end, args)
            lane_of[id(span)] = name
    return lane_of


def _draw_groups(trace: ChromeTrace, groups: Sequence[GroupLife], learner: Sequence[Span]) -> None:
    """Draw groups; if a group was taken, an arrow leads to the training of its step:
    the first that ends after it was taken, as a step may be trained again after a
    crash. learner: its spans.
    """
    units = [group.unit() for group in groups]
    lane_of = _draw(trace, TICKETS, units)
    training = [span for span in learner if span.name == "train"]
    for group, unit in zip(groups, units, strict=True):
        if group.taken_at is None:
            continue
        for span in training:
            if span.args["step"] == group.step and span.end > group.end:
                end_at = min(span.start + MARGIN_S, span.end)  # it may have begun just now
                start = (lane_of[id(unit[0])], group.end - MARGIN_S)
                trace.arrow(f"step {group.step}", start, (LEARNER, end_at))
                break


def _count(
    trace: ChromeTrace, rows: Mapping[str, Sequence[Span]], lives: Sequence[GroupLife], since: float
) -> None:
    """Draw counters from `since` on: requests on each server, tickets being generated,
    and tickets that wait for their step.
    """
    for place in sorted(rows):
        if place.endswith(REQUESTS):
            requests = changes((span.start, span.end) for span in rows[place])
            process = place.removesuffix(REQUESTS)
            _draw_counter(trace, process, "running requests", "requests", requests, since)
    generating = []
    waiting = []
    for life in lives:
        if life.generated_at is None:
            generating.append((life.start, life.last_time))
        else:
            generating.append((life.start, life.generated_at))
            waiting.append((life.generated_at, life.end))
    name = "tickets being generated"
    _draw_counter(trace, "groups", name, "tickets", changes(generating), since)
    name = "tickets waiting for their step"
    _draw_counter(trace, "groups", name, "tickets", changes(waiting), since)


def _draw_counter(
    trace: ChromeTrace,
    process: str,
    name: str,
    unit: str,
    counts: Sequence[tuple[float, int]],
    since: float,
) -> None:
    """Draw a counter's value at `since`, and each later change. counts: (time, count
    from then on), in order.
    """
    earlier = [count for time, count in counts if time <= since]
    trace.counter(process, name, since, {unit: earlier[-1] if earlier else 0})
    for time, count in counts:
        if time > since:
            trace.counter(process, name, time, {unit: count})


_decode = msgspec.json.Decoder(TraceRow).decode


def read(folder: Path) -> tuple[list[Span], list[SpanEvent]]:
    """Return the spans and events of all roles, ordered by their begin. Spans still
    open end at the last known time.
    """
    rows: dict[str, list[TraceRow]] = defaultdict(list)
    # ROLE.1.jsonl, the earlier part, comes before ROLE.jsonl.
    for path in sorted(folder.glob("*.jsonl")):
        rows[path.name.removesuffix(".jsonl").removesuffix(".1")] += _rows(path)
    roles = [_role(of_role) for of_role in rows.values()]
    last_time = max((role.last_time for role in roles), default=0.0)
    spans: list[Span] = []
    events: list[SpanEvent] = []
    for role in roles:
        spans += role.spans
        spans += _cut(role.open.values(), last_time)
        events += role.events
    return sorted(spans, key=_by_start), sorted(events, key=lambda event: event.at)


@dataclass
class _TracedRole:
    """What is known of one role: spans that have ended, those still open, events."""

    spans: list[Span] = field(default_factory=list)
    open: dict[tuple[str, str, float], Open] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    last_time: float = 0.0


def _role(rows: Iterable[TraceRow]) -> _TracedRole:
    """Collect a role's spans and events. A new life cuts spans that the one before it
    left open.
    """
    role = _TracedRole()
    life = None
    for row in rows:
        match row:
            case Life():  # the first row of each part; parts of one life have the same
                if row != life:
                    role.spans += _cut(role.open.values(), role.last_time)
                    role.open.clear()
                life = row
            case Open():
                role.open[row.on, row.name, row.start] = row
                role.last_time = max(role.last_time, row.start)
            case Span():
                role.open.pop((row.on, row.name, row.start), None)
                role.spans.append(row)
                role.last_time = max(role.last_time, row.end)
            case SpanEvent():
                role.events.append(row)
                role.last_time = max(role.last_time, row.at)
    return role


def _cut(spans: Iterable[Open], at: float) -> list[Span]:
    """Return spans that did not end as cut off at this time."""
    return [
        Span(span.on, span.name, span.start, max(at, span.start), span.args, cut=True)
        for span in spans
    ]


def _rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a file, if it still exists. Incomplete lines (a crash, a write
    in progress) are skipped.
    """
    with suppress(FileNotFoundError):
        for line in lines_of(path):
            with suppress(msgspec.DecodeError):
                yield _decode(line)
