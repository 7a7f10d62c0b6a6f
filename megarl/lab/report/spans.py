"""Reading the spans and events that the roles have written (megarl/core/telemetry/spans.py)."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from megarl.core.telemetry.spans import Life, Open, Row, Span, SpanEvent

_decode = msgspec.json.Decoder(Row).decode


def read(folder: Path) -> tuple[list[Span], list[SpanEvent]]:
    """Return spans and events of all roles, by begin; spans still open end at the last known time."""
    roles = [_Read.of(path) for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith(".1")]
    now = max((role.last for role in roles), default=0.0)
    spans = [span for role in roles for span in (*role.spans, *role.still_open(now))]
    events = [event for role in roles for event in role.events]
    return sorted(spans, key=lambda s: (s.begin, -s.end)), sorted(events, key=lambda e: e.at)


class _Read:
    """The rows of one role."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.events: list[SpanEvent] = []
        self.last = 0.0
        self._life: Life | None = None
        self._open: dict[tuple[str, str, float], Open] = {}

    @staticmethod
    def of(path: Path) -> "_Read":
        result = _Read()
        for part in (path.with_suffix(".1.jsonl"), path):
            for row in _rows(part):
                result._add(row)
        return result

    def still_open(self, now: float) -> list[Span]:
        return [Span(o.on, o.name, o.begin, max(now, o.begin), o.args, cut=True) for o in self._open.values()]

    def _add(self, row: Row) -> None:
        match row:
            case Life():
                if row != self._life:
                    self.spans += self.still_open(self.last)
                    self._open.clear()
                self._life, at = row, self.last
            case Open():
                self._open[row.on, row.name, row.begin] = row
                at = row.begin
            case Span():
                self._open.pop((row.on, row.name, row.begin), None)
                self.spans.append(row)
                at = row.end
            case SpanEvent():
                self.events.append(row)
                at = row.at
        self.last = max(self.last, at)


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a part, if it exists; incomplete lines (a crash, a write under way) are skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield _decode(line)
            except msgspec.DecodeError:
                continue
