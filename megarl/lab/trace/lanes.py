"""Spans on lanes: what is at the same time lies side by side, what is part of something within it. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from megarl.core.telemetry.spans import Span

Unit = Sequence[Span]
"""Spans that stay on one lane: the first has the others within it."""


def nested(spans: Iterable[Span]) -> list[Unit]:
    """Units of spans that lie within each other."""
    units: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        if units and span.end <= units[-1][0].end:
            units[-1].append(span)
        else:
            units.append([span])
    return list(units)


def packed(units: Iterable[Unit]) -> list[list[Span]]:
    """As few lanes as there are units at once; those of a lane are apart."""
    lanes: list[list[Span]] = []
    free_from: list[float] = []
    for unit in sorted(units, key=lambda u: (u[0].begin, -u[0].end)):
        lane = next((n for n, free in enumerate(free_from) if free <= unit[0].begin), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            free_from.append(0.0)
        lanes[lane] += unit
        free_from[lane] = unit[0].end
    return lanes


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Times, in order and apart, at which there is any of them."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.begin, span.end))
    return found


def changes(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """(time, how many there are from then on), at each time at which that changes."""
    steps: dict[float, int] = defaultdict(int)
    for begin, end in spans:
        steps[begin] += 1
        steps[end] -= 1
    count, found = 0, []
    for at, by in sorted(steps.items()):
        count += by
        if by:
            found.append((at, count))
    return found
