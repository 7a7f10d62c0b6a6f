"""The records of the journal, one type for each event that a controller must not
forget, and the state that they add up to.

    State() ── apply(Session) ── apply(Admitted) ── apply(Finished) ── … ──►  State
                                                        └─ snapshot() ─► Snapshot ─► State.restored()

Only `apply` changes a state, so the state before a crash and the one rebuilt after it
are the same.
"""

import time
from pathlib import Path

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
        """Begin with the time of a file just written: the file system's clock, as for a
        session's beginning, not a node's.
        """
        self.offset = written.stat().st_mtime - time.monotonic()

    def now(self) -> float:
        return self.offset + time.monotonic()


clock = RecordClock()


class Session(Record, frozen=True, tag="session"):
    """A controller has started within the life `session` of the supervisor, which began
    at `time` (Unix seconds) and holds `devices` devices. spent: hours in the status
    that an earlier controller left. A second record of the same session changes
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
    due: int  # D(g) at the time of the draw, which determines the length budget
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
    pass_rates: dict[
        str, float
    ]  # of each prompt's latest group since the last reset, void groups left out


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

    def compute_hours(self, now: float) -> float:
        """Return devices held × wall time up to `now`, in hours; earlier sessions count
        up to their last record or status.
        """
        if self.session is None:
            return 0.0
        return self.earlier_hours + self.session.devices * max(0.0, now - self.session.time) / 3600

    def apply(self, record: JournalRecord) -> None:
        """Apply the next record. ValueError, without any change, if it contradicts
        earlier records.
        """
        match record:
            case Admitted():
                if record.ticket != self.admission.next_ticket:
                    raise ValueError(
                        f"ticket {record.ticket} is admitted where {self.admission.next_ticket} is"
                        " next"
                    )
                self.admission.admit()
                before = self.tasks.get(record.task)
                pass_rates = {} if before is None or record.reset else before.pass_rates
                drawn = 1 if before is None else before.drawn + 1
                self.tasks[record.task] = TaskHistory(
                    drawn=drawn, last=record, pass_rates=pass_rates
                )
                self.unfinished[record.ticket] = record
            case Finished(group=group):
                self.admission.finish(group.ticket)
                admitted = self.unfinished.pop(group.ticket)
                self.finished += 1
                self.void += bool(group.void)
                self.generated_tokens += sum(r.trained_tokens for r in group.rollouts)
                if not group.void:
                    self.tasks[admitted.task].pass_rates[admitted.prompt_id] = group.pass_rate
                self.last_time = max(self.last_time, record.time)
            case Removed():
                self.admission.remove(record.ticket)
                admitted = self.unfinished.pop(record.ticket)
                self.removed += 1
                self.generated_tokens += record.generated_tokens
                if record.pass_rate is not None:
                    self.tasks[admitted.task].pass_rates[admitted.prompt_id] = record.pass_rate
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
                if record.session in self.earlier_sessions:
                    raise ValueError(
                        f"session {record.session} begins again, but a later one has ended it"
                    )
                if self.session is None or record.session != self.session.session:
                    if self.session is not None:
                        self.earlier_sessions += (self.session.session,)
                        spent = max(
                            self.compute_hours(self.last_time), record.spent - self.joined_hours
                        )
                        self.startup_hours += (
                            0.0 if self.session_published else spent - self.earlier_hours
                        )
                        self.earlier_hours = spent
                    self.session = record
                    self.last_time = record.time
                    self.session_published = False
            case Snapshot():
                pass  # has only what was applied already

    def snapshot(self) -> Snapshot:
        a = self.admission
        return Snapshot(
            prompts_per_batch=a.prompts_per_batch,
            max_lag=a.max_lag,
            phase_steps=a.phase_steps,
            next_ticket=a.next_ticket,
            forgotten=a.forgotten,
            queue=np.array(a.queue, dtype=np.int32),
            unfinished=tuple(self.unfinished.values()),
            tasks=self.tasks,
            evaluations=tuple(self.evaluations.values()),
            **{name: getattr(self, name) for name in StateTotals.__struct_fields__},
        )

    @staticmethod
    def restored(s: Snapshot) -> "State":
        unfinished = {a.ticket: a for a in s.unfinished}
        return State(
            Admission(
                s.prompts_per_batch,
                s.max_lag,
                s.phase_steps,
                next_ticket=s.next_ticket,
                forgotten=s.forgotten,
                queue=s.queue.tolist(),
                unfinished=unfinished,
            ),
            unfinished=unfinished,
            tasks={
                t: msgspec.structs.replace(h, pass_rates=dict(h.pass_rates))
                for t, h in s.tasks.items()
            },
            evaluations={e.version: e for e in s.evaluations},
            **{name: getattr(s, name) for name in StateTotals.__struct_fields__},
        )
