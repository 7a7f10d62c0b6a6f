"""Reading the spans and events that the roles have written (megarl/core/telemetry/spans.py)."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from megarl.core.telemetry.spans import Life, Open, Row, Span, SpanEvent

_decode = msgspec.json.Decoder(Row).decode


def read(folder: Path) -> tuple[list[Span], list[SpanEvent]]:
    """Return spans and events of all roles, by begin; spans still open end at the last known time."""
    roles = [_role(path) for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith(".1")]
    now = max((last for *_, last in roles), default=0.0)
    spans = [span for ended, begun, _, _ in roles for span in (*ended, *_cut(begun.values(), now))]
    events = [event for _, _, events, _ in roles for event in events]
    return sorted(spans, key=lambda s: (s.begin, -s.end)), sorted(events, key=lambda e: e.at)


Begun = dict[tuple[str, str, float], Open]


def _role(path: Path) -> tuple[list[Span], Begun, list[SpanEvent], float]:
    """Return of one role the spans that have ended, those still open, events and the last time."""
    ended: list[Span] = []
    begun: Begun = {}
    events: list[SpanEvent] = []
    life, last = None, 0.0
    for row in (*_rows(path.with_suffix(".1.jsonl")), *_rows(path)):
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


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a part, if it exists; incomplete lines (a crash, a write under way) are skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(msgspec.DecodeError):
                yield _decode(line)
