"""Groups in a trace: from the ticket, over generation and grading, to the batch that trains it. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megarl.core.telemetry.spans import TICKETS, Event, Span, Value
from megarl.lab.trace.lanes import Unit


@dataclass(frozen=True)
class Group:
    """begin: its ticket was given. generated: all its rollouts were graded, taken: the batch of `step` was sent; None: not yet.

    removed: it gave up its slot (zero variance under `refill`) and is never taken. now: what is not over ends there.
    """

    ticket: int
    begin: float
    now: float
    generated: float | None
    taken: float | None
    step: int
    removed: bool
    args: dict[str, Value]

    @property
    def end(self) -> float:
        over = self.generated if self.removed else self.taken
        return self.now if over is None else over

    def unit(self) -> Unit:
        """The whole, and its two parts within it."""
        generated = self.end if self.generated is None else self.generated
        open_ = self.taken is None and not self.removed
        parts = [
            Span(TICKETS, f"ticket {self.ticket}", self.begin, self.end, self.args, cut=open_),
            Span(TICKETS, "generated", self.begin, generated, cut=self.generated is None),
        ]
        if generated < self.end:
            waits = "waits" if self.taken is None else f"waits for step {self.step}"
            parts.append(Span(TICKETS, waits, generated, self.end, cut=open_))
        return parts


def groups_of(spans: Sequence[Span], events: Iterable[Event]) -> list[Group]:
    """By ticket. One that a crash of the controller cut short goes on in its next life."""
    lives: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.on == TICKETS:
            lives[_int(span.args["ticket"])].append(span)
    taken: dict[int, Event] = {}
    for event in events:
        for ticket in _ints(event.args.get("tickets")):
            taken.setdefault(ticket, event)
    now = max((span.end for span in spans), default=0.0)
    return [_group(ticket, of, taken.get(ticket), now) for ticket, of in sorted(lives.items())]


def _group(ticket: int, lives: Sequence[Span], taken: Event | None, now: float) -> Group:
    begin, last = min(span.begin for span in lives), max(lives, key=lambda span: span.end)
    return Group(
        ticket=ticket,
        begin=begin,
        now=now,
        generated=None if last.cut else last.end,
        taken=None if taken is None else max(taken.at, last.end),
        step=-1 if taken is None else _int(taken.args["step"]),
        removed=bool(last.args.get("removed")),
        args=last.args,
    )


def _int(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _ints(value: Value | None) -> list[int]:
    return value if isinstance(value, list) else []
