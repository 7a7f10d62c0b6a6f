"""`megarl trace RUN`: shows the last steps of a run in ui.perfetto.dev or
chrome://tracing, also while it runs.

    RUN/trace/*.jsonl (telemetry/spans.py) ─► the window of these steps ──► lanes, groups ─────► ChromeTrace ─► trace.json.gz
    RUN/metrics.jsonl (lag)      ────────────────────────────────────────────────────────────┘

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
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, batched, pairwise
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
    """Collect spans into units: a span, and the spans that lie within it."""
    units: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        if units and span.end <= units[-1][0].end:
            units[-1].append(span)
        else:
            units.append([span])
    return list(units)


def packed(units: Iterable[SpanTree]) -> list[list[Span]]:
    """Distribute units over as few lanes as possible, such that units on one lane do
    not overlap.
    """
    lanes: list[list[SpanTree]] = []
    for unit in sorted(units, key=lambda u: (u[0].begin, -u[0].end)):
        if lane := next((lane for lane in lanes if lane[-1][0].end <= unit[0].begin), None):
            lane.append(unit)
        else:
            lanes.append([unit])
    return [[span for unit in lane for span in unit] for lane in lanes]


def changes(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """Return (time, count from then on) for each time at which the count of open spans
    changes. spans: (begin, end).
    """
    steps: dict[float, int] = defaultdict(int)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    turns = sorted((at, by) for at, by in steps.items() if by)
    return list(zip((at for at, _ in turns), accumulate(by for _, by in turns), strict=True))


def union(spans: Iterable[Span]) -> list[tuple[float, ...]]:
    """Return, in order, the disjoint intervals that are covered by any span."""
    counts = changes((span.begin, span.end) for span in spans)
    return list(
        batched(
            [
                at
                for (_, before), (at, now) in pairwise([(0.0, 0), *counts])
                if not (before and now)
            ],
            2,
        )
    )


class GroupLife(NamedTuple):
    """A group from its ticket to the batch that trains it. An unfinished part ends at
    `now`.
    """

    ticket: int
    begin: float
    now: float
    generated: float | None  # when all its rollouts had been graded; None: not yet
    taken: float | None  # when its batch was sent; None: not yet
    step: int  # the step of that batch
    removed: bool  # it lost its slot (zero variance under `refill`) and is never taken
    args: dict[str, Value]

    @property
    def end(self) -> float:
        over = self.generated if self.removed else self.taken
        return self.now if over is None else over

    def unit(self) -> SpanTree:
        """Return the whole span, then its parts: generated, waiting."""
        generated = self.end if self.generated is None else self.generated
        unfinished = self.taken is None and not self.removed
        parts = [
            Span(TICKETS, f"ticket {self.ticket}", self.begin, self.end, self.args, cut=unfinished),
            Span(TICKETS, "generated", self.begin, generated, cut=self.generated is None),
        ]
        if generated < self.end:
            waits = "waits" if self.taken is None else f"waits for step {self.step}"
            parts.append(Span(TICKETS, waits, generated, self.end, cut=unfinished))
        return parts


def group_lives(spans: Sequence[Span], events: Iterable[SpanEvent]) -> list[GroupLife]:
    """Return the groups, ordered by ticket. A group interrupted by a crash of the
    controller goes on in its next life.
    """
    parts: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on == TICKETS:
            parts[cast(int, span.args["ticket"])].append(span)
    batches: dict[int, SpanEvent] = {}
    for event in events:
        tickets = event.args.get("tickets")
        for ticket in tickets if isinstance(tickets, list) else ():
            batches.setdefault(ticket, event)
    now = max((span.end for span in spans), default=0.0)
    lives = []
    for ticket, own in sorted(parts.items()):
        last = max(own, key=lambda span: span.end)
        batch = batches.get(ticket)
        begin = min(span.begin for span in own)
        removed = bool(last.args.get("removed"))
        taken, step = (
            (None, -1)
            if batch is None
            else (max(batch.at, last.end), cast(int, batch.args["step"]))
        )
        lives.append(
            GroupLife(
                ticket, begin, now, None if last.cut else last.end, taken, step, removed, last.args
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
        self, on: str, name: str, begin: float, end: float, args: dict[str, Value]
    ) -> None:
        """Add a span on `process/thread`. Spans of one thread must be nested or
        disjoint.
        """
        self.add("X", on, name, begin, dur=self._us(end) - self._us(begin), args=args)

    def counter(self, process: str, name: str, at: float, values: dict[str, float]) -> None:
        """Set a counter from this time on; several values are drawn stacked."""
        self.add("C", process, name, at, args=values)

    def arrow(self, name: str, start: tuple[str, float], end: tuple[str, float]) -> None:
        """Draw an arrow between two spans, each given as (process/thread, time), with a
        time within the span.
        """
        self._flows += 1
        self.add("s", start[0], name, start[1], cat="group", id=self._flows)
        self.add("f", end[0], name, end[1], cat="group", id=self._flows, bp="e")

    def tree(self, shown: JsonObject) -> JsonObject:
        """Return the file's content: metadata, then events by time. shown: the run's
        path, its steps, the time that is 0.
        """
        named = [("process", process, pid, 0) for process, pid in self._processes.items()]
        named += [
            ("thread", thread, self._processes[process], tid)
            for (process, thread), tid in self._threads.items()
        ]
        metadata = [
            {
                "name": f"{kind}_{key}",
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "ts": 0,
                "args": {key: value},
            }
            for kind, name, pid, tid in named
            for key, value in (("name", name), ("sort_index", tid or pid))
        ]
        events = sorted(self._events, key=lambda e: (e["ts"], -e.get("dur", 0)))
        return {"displayTimeUnit": "ms", "otherData": shown, "traceEvents": [*metadata, *events]}

    def add(self, phase: str, on: str, name: str, at: float, **more: object) -> None:
        process, _, thread = on.partition("/")
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = self._threads.setdefault((process, thread), len(self._threads) + 1) if thread else 0
        self._events.append(
            {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": self._us(at)} | more
        )

    def _us(self, seconds: float) -> int:
        return round((seconds - self._base) * 1e6)


LEARNER = "learner/rank 0"
REQUESTS = "/requests"
BUSY = "/busy"
MARGIN_S = 1e-6  # arrows begin and end this far inside their spans


def main(run: Path, steps: int, output: Path | None) -> int:
    rundir = RunDir.opened(run)
    trace = trace_of(rundir, steps)
    path = output or rundir.path / "trace.json.gz"
    written = (
        path.write_bytes if output else partial(write_atomically, path)
    )  # which replaces a link
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    try:
        written(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    except OSError as error:
        raise MegarlError(
            f"{path}: cannot be written: {error.strerror}; name another file with --output"
        ) from None
    shown = trace["otherData"]["steps"]
    what = f"steps {shown[0]} to {shown[-1]}" if shown else "no step is complete yet"
    terminal.say(
        f"{path}: {what}, {len(trace['traceEvents'])} events; open it at https://ui.perfetto.dev or"
        " chrome://tracing"
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
    done = [s for s in spans if s.on == LEARNER and s.name == f"step {s.args.get('step')}"][-steps:]
    since = done[0].begin if done else spans[0].begin
    rows = _places(spans)
    lives = group_lives(spans, events)
    seen = [life for life in lives if life.end > since]
    first = min(
        [
            *(s.begin for row in rows.values() for s in row if s.end > since),
            *(g.begin for g in seen),
        ]
    )
    trace = ChromeTrace(first)
    for place in sorted(rows, key=_order):
        shown = [span for span in rows[place] if span.end > since]
        _draw(trace, place, nested(shown) if place == LEARNER else [[span] for span in shown])
    _draw_groups(trace, seen, rows[LEARNER])
    _count(trace, rows, lives, since)
    metrics = {row["step"]: row for row in latest_rows(rundir.metrics)}
    for span in done:  # at its end, how old its tokens were
        for name in ("lag_mean", "lag_max"):
            lag = metrics.get(cast(int, span.args["step"]), {}).get(name, math.nan)
            if math.isfinite(lag):
                trace.counter("learner", name, span.end, {"steps": lag})
    for event in events:
        if event.at > since:
            trace.add("i", event.on, event.name, event.at, s="t", args=event.args)
    return trace.tree(
        {
            "run": str(rundir.path),
            "steps": [cast(int, s.args["step"]) for s in done],
            "begin": first,
        }
    )


def _places(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return the spans by the place where they are drawn, without those of groups; add
    spans for when each server was busy.
    """
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on != TICKETS:
            rows[span.on].append(span)
    for place in [p for p in rows if p.endswith(REQUESTS)]:
        busy = place.removesuffix(REQUESTS) + BUSY
        rows[busy] = [Span(busy, "busy", begin, end) for begin, end in union(rows[place])]
    return rows


def _order(place: str) -> tuple[int, int, str]:
    """Return a sort key: the learner first, then servers by number, then the
    controller.
    """
    role, _, number = place.partition("/")[0].partition(" ")
    return {"learner": 0, "server": 1}.get(role, 2), int(number or 0), place


def _draw(trace: ChromeTrace, place: str, units: Sequence[SpanTree]) -> dict[int, str]:
    """Draw units on as many lanes as needed; return the lane of each span, by its id()."""
    lanes = packed(units)
    where = {}
    for number, lane in enumerate(lanes, 1):
        on = place if len(lanes) == 1 else f"{place} {number}"
        for span in lane:
            trace.complete(
                on,
                span.name,
                span.begin,
                span.end,
                span.args | ({"unfinished": True} if span.cut else {}),
            )
            where[id(span)] = on
    return where


def _draw_groups(trace: ChromeTrace, seen: Sequence[GroupLife], learner: Sequence[Span]) -> None:
    """Draw groups; if a group was taken, an arrow leads to the training of its step."""
    units = [group.unit() for group in seen]
    where = _draw(trace, TICKETS, units)
    training = [span for span in learner if span.name == "train"]
    for group, unit in zip(seen, units, strict=True):
        step = next(
            (s for s in training if s.args["step"] == group.step and s.end > group.end), None
        )
        if group.taken is not None and step is not None:
            into = min(step.begin + MARGIN_S, step.end)  # it may have begun just now
            trace.arrow(
                f"step {group.step}", (where[id(unit[0])], group.end - MARGIN_S), (LEARNER, into)
            )


def _count(
    trace: ChromeTrace, rows: Mapping[str, Sequence[Span]], lives: Sequence[GroupLife], since: float
) -> None:
    """Draw counters from `since` on: requests on each server, tickets being generated,
    and tickets that wait for their step.
    """
    generating = changes((g.begin, g.now if g.generated is None else g.generated) for g in lives)
    waiting = changes((g.generated, g.end) for g in lives if g.generated is not None)
    counters = [
        (
            place.removesuffix(REQUESTS),
            "running requests",
            "requests",
            changes((s.begin, s.end) for s in rows[place]),
        )
        for place in sorted(rows)
        if place.endswith(REQUESTS)
    ]
    counters.append(("groups", "tickets being generated", "tickets", generating))
    counters.append(("groups", "tickets waiting for their step", "tickets", waiting))
    for process, name, what, counts in counters:
        before = [count for at, count in counts if at <= since]
        for at, count in [
            (since, before[-1] if before else 0),
            *(c for c in counts if c[0] > since),
        ]:
            trace.counter(process, name, at, {what: count})


_decode = msgspec.json.Decoder(TraceRow).decode


def read(folder: Path) -> tuple[list[Span], list[SpanEvent]]:
    """Return the spans and events of all roles, ordered by their begin. Spans still
    open end at the last known time.
    """
    rows: dict[str, list[TraceRow]] = defaultdict(list)
    for path in sorted(
        folder.glob("*.jsonl")
    ):  # ROLE.1.jsonl, the earlier part, comes before ROLE.jsonl
        rows[path.name.removesuffix(".jsonl").removesuffix(".1")] += _rows(path)
    roles = [_role(of_role) for of_role in rows.values()]
    now = max((last for *_, last in roles), default=0.0)
    spans = [span for ended, begun, _, _ in roles for span in (*ended, *_cut(begun.values(), now))]
    events = [event for _, _, events, _ in roles for event in events]
    return sorted(spans, key=lambda s: (s.begin, -s.end)), sorted(events, key=lambda e: e.at)


Begun = dict[tuple[str, str, float], Open]


def _role(rows: Iterable[TraceRow]) -> tuple[list[Span], Begun, list[SpanEvent], float]:
    """Return for one role the spans that have ended, those still open, the events, and
    the last known time.
    """
    ended: list[Span] = []
    begun: Begun = {}
    events: list[SpanEvent] = []
    life = None
    last = 0.0
    for row in rows:
        match row:
            case Life():
                if row != life:
                    ended += _cut(begun.values(), last)
                    begun.clear()
                life = row
            case Open():
                begun[row.on, row.name, row.begin] = row
                last = max(last, row.begin)
            case Span():
                begun.pop((row.on, row.name, row.begin), None)
                ended.append(row)
                last = max(last, row.end)
            case SpanEvent():
                events.append(row)
                last = max(last, row.at)
    return ended, begun, events, last


def _cut(begun: Iterable[Open], at: float) -> list[Span]:
    return [Span(o.on, o.name, o.begin, max(at, o.begin), o.args, cut=True) for o in begun]


def _rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a file, if it still exists. Incomplete lines (a crash, a write
    in progress) are skipped.
    """
    with suppress(FileNotFoundError):
        for line in lines_of(path):
            with suppress(msgspec.DecodeError):
                yield _decode(line)
