"""`megarl trace RUN`: the last steps of a run as one picture for ui.perfetto.dev or chrome://tracing, also while it runs.

    RUN/trace/*.jsonl (spans.py) ──► the window of these steps ──► lanes.py, groups.py ──► chrome.py ──► trace.json.gz
    RUN/metrics.jsonl (lag)      ────────────────────────────────────────────────────────────┘

A process is a role. The learner's step has its phases within it. A server is busy while any request runs on it, and paused
while a publication holds it; requests and gradings get as many lanes as there are at once. A group goes from its ticket to the
batch that trains it, from where an arrow leads to the step. Counters are worked out from the spans.
"""

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir, latest_rows
from megarl.core.telemetry.spans import TICKETS, Span, read
from megarl.lab.trace.chrome import ChromeTrace
from megarl.lab.trace.groups import Group, groups_of
from megarl.lab.trace.lanes import Unit, changes, nested, packed, union

LEARNER, REQUESTS, BUSY = "learner/rank 0", "/requests", "/busy"
MARGIN_S = 1e-6
"""Arrows begin and end that far within their spans."""


def main(run: Path, steps: int, output: Path | None) -> int:
    """Write the trace, and say where it lies."""
    rundir = RunDir.opened(run)
    trace = trace_of(rundir, steps)
    path = output or rundir.path / "trace.json.gz"
    data = json.dumps(trace, separators=(",", ":"), allow_nan=False).encode()
    try:
        path.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
    except OSError as error:
        raise MegarlError(f"{path}: cannot be written: {error.strerror}; name another file by --output") from None
    shown = trace["otherData"]["steps"]
    what = f"steps {shown[0]} to {shown[-1]}" if shown else "no step is complete yet"
    print(f"{path}: {what}, {len(trace['traceEvents'])} events; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def trace_of(rundir: RunDir, steps: int) -> dict[str, Any]:
    """The trace from the begin of the last `steps` complete steps on; `otherData` has their numbers, and the Unix time of 0."""
    spans, events = read(rundir.trace)
    if not spans:
        raise MegarlError(f"{rundir.trace}: nothing is recorded there yet; try again when the run samples")
    done = [s for s in spans if s.on == LEARNER and s.name == f"step {s.args.get('step')}"][-steps:]
    since = done[0].begin if done else spans[0].begin
    places = _places(spans)
    all_groups = groups_of(spans, events)
    seen = [group for group in all_groups if group.end > since]
    first = min([*(s.begin for of in places.values() for s in of if s.end > since), *(g.begin for g in seen)])
    trace = ChromeTrace(first)
    for place in sorted(places, key=_order):
        shown = [span for span in places[place] if span.end > since]
        _draw(trace, place, nested(shown) if place == LEARNER else [[span] for span in shown])
    _draw_groups(trace, seen, places[LEARNER])
    _count(trace, places, all_groups, since)
    _draw_lag(trace, done, {row["step"]: row for row in latest_rows(rundir.metrics)})
    for event in events:
        if event.at > since:
            trace.instant(event.on, event.name, event.at, event.args)
    return trace.tree(run=str(rundir.path), steps=[s.args["step"] for s in done], begin=first)


def _places(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans but those of groups by where they are drawn, and when each server was busy."""
    places: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on != TICKETS:
            places[span.on].append(span)
    for place in [p for p in places if p.endswith(REQUESTS)]:
        busy = place.removesuffix(REQUESTS) + BUSY
        places[busy] = [Span(busy, "busy", begin, end) for begin, end in union(places[place])]
    return places


def _order(place: str) -> tuple[int, int, str]:
    """The learner first, then servers by number, then the controller."""
    role, _, number = place.partition("/")[0].partition(" ")
    return {"learner": 0, "server": 1}.get(role, 2), int(number or 0), place


def _draw(trace: ChromeTrace, place: str, units: Sequence[Unit]) -> dict[int, str]:
    """On as many lanes as it takes; the lane of each unit's first span, by its id()."""
    lanes = packed(units)
    where = {}
    for number, lane in enumerate(lanes, 1):
        on = place if len(lanes) == 1 else f"{place} {number}"
        for span in lane:
            trace.complete(on, span.name, span.begin, span.end, span.args | ({"unfinished": True} if span.cut else {}))
            where[id(span)] = on
    return where


def _draw_groups(trace: ChromeTrace, seen: Sequence[Group], learner: Sequence[Span]) -> None:
    """With an arrow from each that was taken to the training of its step."""
    units = [group.unit() for group in seen]
    where = _draw(trace, TICKETS, units)
    training = [span for span in learner if span.name == "train"]
    for group, unit in zip(seen, units, strict=True):
        step = next((s for s in training if s.args["step"] == group.step and s.end > group.end), None)
        if group.taken is not None and step is not None:
            into = min(step.begin + MARGIN_S, step.end)  # it may have begun just now
            trace.arrow(f"step {group.step}", (where[id(unit[0])], group.end - MARGIN_S), (LEARNER, into))


def _count(trace: ChromeTrace, places: Mapping[str, Sequence[Span]], all_groups: Sequence[Group], since: float) -> None:
    """Requests on each server, and tickets by what they wait for."""
    for place in sorted(p for p in places if p.endswith(REQUESTS)):
        for at, count in _from(since, changes((s.begin, s.end) for s in places[place])):
            trace.counter(place.removesuffix(REQUESTS), "running requests", at, {"requests": count})
    generating = changes((g.begin, g.now if g.generated is None else g.generated) for g in all_groups)
    waiting = changes((g.generated, g.end) for g in all_groups if g.generated is not None)
    for name, counts in (("tickets being generated", generating), ("tickets waiting for their step", waiting)):
        for at, count in _from(since, counts):
            trace.counter("groups", name, at, {"tickets": count})


def _from(since: float, counts: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """What is the count then, and its changes after that."""
    before = [count for at, count in counts if at <= since]
    yield since, before[-1] if before else 0
    yield from ((at, count) for at, count in counts if at > since)


def _draw_lag(trace: ChromeTrace, done: Sequence[Span], rows: Mapping[int, Mapping[str, Any]]) -> None:
    """At the end of each step: how old its tokens were."""
    for span in done:
        row = rows.get(int(str(span.args["step"])), {})
        for name in ("lag_mean", "lag_max"):
            if math.isfinite(row.get(name, math.nan)):
                trace.counter("learner", name, span.end, {"steps": row[name]})
