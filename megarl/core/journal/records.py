"""The records of the journal, one type for each event that a controller must not
forget, and the state that they add up to.

    State() ── apply(Session) ── apply(Admitted) ── apply(Finished) ── … ──►  State
                                  └─ snapshot() ─► Snapshot ─► State.restored()

Only `apply` changes a state, so the state before a crash and the one rebuilt after it
are the same.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megarl.core.base.admission import Admission
from megarl.core.base.types import Group, Record


class RecordClock:
    """The time of records, in Unix seconds. It is the wall clock only at the start:
    setting that later does no harm.
    """

    def __init__(self) -> None:
        self.offset = time.time() - time.monotonic()

    def start(self, written: Path) -> None:
        """Begin with the modification time of a file just written, so that the clocks
        of nodes do not matter. A session's beginning is counted in the same way.
        """
        self.offset = written.stat().st_mtime - time.monotonic()

    def read(self) -> float:
        """Return the time."""
        return self.offset + time.monotonic()


clock = RecordClock()


class Session(Record, frozen=True, tag="session"):
    """A controller has started within the life `session` of the supervisor, which began
    at `time` (Unix seconds) and holds `devices` devices. spent: compute hours
    that the last status.json showed. A second record of the same session changes
    nothing; one of an earlier session is refused.
    """

    session: str
    time: float
    devices: int
    compute_unit: str
    spent: float = 0.0


class Admitted(Record, frozen=True, tag="admitted"):
    """A prompt of a task got a ticket."""

    ticket: int
    task: str
    prompt_id: str
    epoch: int  # number of the pass over the task's data
    due_step: int  # D(g) at the time of the draw, which determines the length budget
    # too few prompts were left, so all pass rates of the task were forgotten before
    # this draw
    reset: bool = False
    pool: int = 0  # the epoch covers this many of the easiest prompts (`data.curriculum`); 0: all


class Finished(Record, frozen=True, tag="finished"):
    """The group of a ticket is complete or void."""

    group: Group
    time: float


class Removed(Record, frozen=True, tag="removed"):
    """A ticket gave up its slot (zero variance under `refill`); only this summary of
    its group is kept.
    """

    ticket: int
    reason: str
    pass_rate: float | None = None  # None if nothing was graded
    generated_tokens: int = 0  # tokens that were sampled for it


class PublishedVersion(Record, frozen=True, tag="published_version"):
    """`servers` have the weights `version`. Seconds are the slowest server's; startup
    and evaluation hours are totals so far. window: how many tickets may be drawn but
    not trained from now on.
    """

    version: int
    time: float
    compute_hours: float
    servers: tuple[str, ...]
    pause_seconds: float = 0.0
    transfer_seconds: float = 0.0
    resume_seconds: float = 0.0
    startup_hours: float = 0.0
    evaluation_hours: float = 0.0
    joined_hours: float = 0.0  # of servers that the run did not start
    window: int = 0


class Evaluated(Record, frozen=True, tag="evaluated"):
    """The held-out pass rate of the weights `version`. compute_hours: at their
    publication. evaluation_hours: total so far.
    """

    version: int
    time: float
    compute_hours: float
    pass_rate: float
    n_prompts: int
    samples: int
    evaluation_hours: float = 0.0


class TaskHistory(Record, frozen=True):
    """The history of a task that its next draws depend on."""

    drawn: int  # number of draws
    last: Admitted
    # Of each prompt's latest group since the last reset, void groups left out.
    pass_rates: dict[str, float]


class StateTotals(msgspec.Struct, kw_only=True):
    """The part of the state that a snapshot has in the same form."""

    published_version: int = -1  # the highest version ever published, -1 before the first
    session: Session | None = None
    earlier_hours: float = 0.0
    last_time: float = 0.0
    generated_tokens: int = 0  # sampled for finished and removed tickets
    finished: int = 0  # number of tickets, void ones included
    void: int = 0
    removed: int = 0
    startup_hours: float = 0.0  # totals over all lives (megarl/core/controller/metrics.py)
    evaluation_hours: float = 0.0
    joined_hours: float = 0.0
    session_published: bool = False  # whether weights were published in this life of the supervisor
    earlier_sessions: tuple[str, ...] = ()  # names
    window: int = 0  # tickets, from the last publication; 0 before the first
    drawn_before: dict[str, int] = {}  # by task: draws under the shares of a fork's parent


class Snapshot(StateTotals, eq=False, kw_only=True, tag="snapshot"):
    """The state at the head of a journal file, after all records of earlier files. The
    queue of tickets is an int32 array.
    """

    prompts_per_batch: int
    max_lag: int
    phase_steps: int = 1
    next_ticket: int
    forgotten: int
    queue: np.ndarray
    unfinished: tuple[Admitted, ...]
    tasks: dict[str, TaskHistory]
    evaluations: tuple[Evaluated, ...]


JournalRecord = Session | Admitted | Finished | Removed | PublishedVersion | Evaluated | Snapshot


class State(StateTotals):
    """All state that the controller must not lose."""

    admission: Admission
    unfinished: dict[int, Admitted] = {}  # oldest first; a restarted controller makes them again
    tasks: dict[str, TaskHistory] = {}
    evaluations: dict[int, Evaluated] = {}  # by version

    def compute_hours(self, time: float) -> float:
        """Return devices held × wall time up to `time`, in hours; earlier sessions
        count up to their last record or status.
        """
        if self.session is None:
            return 0.0
        seconds = max(0.0, time - self.session.time)
        return self.earlier_hours + self.session.devices * seconds / 3600

    def apply(self, record: JournalRecord) -> None:
        """Apply the next record. ValueError, without any change, if it contradicts
        earlier records.
        """
        match record:
            case Admitted():
                self._admit(record)
            case Finished():
                self._finish(record)
            case Removed():
                self._remove(record)
            case PublishedVersion():
                self.published_version = max(self.published_version, record.version)
                self.last_time = max(self.last_time, record.time)
                self.startup_hours = max(self.startup_hours, record.startup_hours)
                self.joined_hours = max(self.joined_hours, record.joined_hours)
                self.evaluation_hours = max(self.evaluation_hours, record.evaluation_hours)
                self.session_published = True
                self.window = record.window
            case Evaluated():
                self.evaluations[record.version] = record
                self.last_time = max(self.last_time, record.time)
                self.evaluation_hours = max(self.evaluation_hours, record.evaluation_hours)
            case Session():
                self._begin_session(record)
            case Snapshot():
                pass  # has only what was applied already

    def _admit(self, record: Admitted) -> None:
        """Add a ticket. Its task remembers the draw; a reset forgets the task's pass
        rates. ValueError if another ticket is next.
        """
        if record.ticket != self.admission.next_ticket:
            raise ValueError(
                f"ticket {record.ticket} is admitted where {self.admission.next_ticket} is next"
            )
        self.admission.admit()
        history = self.tasks.get(record.task)
        drawn = 1
        pass_rates: dict[str, float] = {}
        if history is not None:
            drawn = history.drawn + 1
            if not record.reset:
                pass_rates = history.pass_rates
        self.tasks[record.task] = TaskHistory(drawn=drawn, last=record, pass_rates=pass_rates)
        self.unfinished[record.ticket] = record

    def _finish(self, record: Finished) -> None:
        """End a ticket with its group, which gives its prompt a pass rate unless it is
        void.
        """
        group = record.group
        self.admission.finish(group.ticket)
        admitted = self.unfinished.pop(group.ticket)
        self.finished += 1
        self.generated_tokens += sum(r.trained_tokens for r in group.rollouts)
        if group.void:
            self.void += 1
        else:
            self.tasks[admitted.task].pass_rates[admitted.prompt_id] = group.pass_rate
        self.last_time = max(self.last_time, record.time)

    def _remove(self, record: Removed) -> None:
        """End a ticket without a group; its prompt gets the pass rate, if any."""
        self.admission.remove(record.ticket)
        admitted = self.unfinished.pop(record.ticket)
        self.removed += 1
        self.generated_tokens += record.generated_tokens
        if record.pass_rate is not None:
            self.tasks[admitted.task].pass_rates[admitted.prompt_id] = record.pass_rate

    def _begin_session(self, record: Session) -> None:
        """Begin a life of the supervisor: add the hours of the one before to the
        totals. Nothing changes if it has begun already, as when only the controller
        restarts. ValueError if a later life has ended it.
        """
        if record.session in self.earlier_sessions:
            raise ValueError(f"session {record.session} begins again, but a later one has ended it")
        if self.session is not None:
            if record.session == self.session.session:
                return
            self.earlier_sessions += (self.session.session,)
            hours_in_status = record.spent - self.joined_hours
            spent = max(self.compute_hours(self.last_time), hours_in_status)
            if not self.session_published:
                self.startup_hours += spent - self.earlier_hours
            self.earlier_hours = spent
        self.session = record
        self.last_time = record.time
        self.session_published = False

    def snapshot(self) -> Snapshot:
        """Return the state as the head of a journal file."""
        admission = self.admission
        return Snapshot(
            prompts_per_batch=admission.prompts_per_batch,
            max_lag=admission.max_lag,
            phase_steps=admission.phase_steps,
            next_ticket=admission.next_ticket,
            forgotten=admission.forgotten,
            queue=np.array(admission.queue, dtype=np.int32),
            unfinished=tuple(self.unfinished.values()),
            tasks=self.tasks,
            evaluations=tuple(self.evaluations.values()),
            **_totals(self),
        )

    @staticmethod
    def restored(snapshot: Snapshot) -> "State":
        """Return the state that a snapshot was made of."""
        unfinished = {admitted.ticket: admitted for admitted in snapshot.unfinished}
        admission = Admission(
            snapshot.prompts_per_batch,
            snapshot.max_lag,
            snapshot.phase_steps,
            next_ticket=snapshot.next_ticket,
            forgotten=snapshot.forgotten,
            queue=snapshot.queue.tolist(),
            unfinished=unfinished,
        )
        tasks = {}
        for task, history in snapshot.tasks.items():
            pass_rates = dict(history.pass_rates)
            tasks[task] = msgspec.structs.replace(history, pass_rates=pass_rates)
        return State(
            admission,
            unfinished=unfinished,
            tasks=tasks,
            evaluations={evaluated.version: evaluated for evaluated in snapshot.evaluations},
            **_totals(snapshot),
        )


def _totals(state: StateTotals) -> dict[str, Any]:
    """Return the fields that a state and its snapshot share."""
    return {name: getattr(state, name) for name in StateTotals.__struct_fields__}
