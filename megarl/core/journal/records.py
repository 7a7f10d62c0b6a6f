"""What the journal records: one type for each thing that a controller must not forget."""

import numpy as np

from megarl.core.base.types import Group, Record


class Session(Record, frozen=True, tag="session"):
    """A controller has started within the life `session` of the supervisor, which began at `time` and holds `devices`.

    A second one of the same session (a restarted controller) changes nothing. time: Unix seconds, as everywhere here.
    """

    session: str
    time: float
    devices: int
    compute_unit: str


class Admitted(Record, frozen=True, tag="admitted"):
    """This prompt of this task has this ticket, drawn in this pass over the task's data.

    reset: too few prompts were left, so all pass rates of the task were forgotten before this draw (`data.on_exhausted`).
    pool: its epoch goes through so many of the easiest prompts (`data.curriculum`); 0: all.
    due: D(g) when it was drawn. It decides the length budget, which must not change when a removal ahead lowers D(g).
    """

    ticket: int
    task: str
    prompt_id: str
    epoch: int
    due: int
    reset: bool = False
    pool: int = 0


class Finished(Record, frozen=True, tag="finished"):
    """The group of its ticket is complete, or void."""

    group: Group
    time: float


class Removed(Record, frozen=True, tag="removed"):
    """The ticket gives up its slot (zero variance under `refill`); of its group the summary stays.

    pass_rate: None if nothing was graded; generated_tokens: sampled for it all the same.
    """

    ticket: int
    reason: str
    pass_rate: float | None = None
    generated_tokens: int = 0


class PublishedVersion(Record, frozen=True, tag="published_version"):
    """These servers have these weights. Seconds are wall time of the slowest server; startup_hours, evaluation_hours: of the
    compute so far."""

    version: int
    time: float
    compute_hours: float
    servers: tuple[str, ...]
    pause_seconds: float = 0.0
    transfer_seconds: float = 0.0
    resume_seconds: float = 0.0
    startup_hours: float = 0.0
    evaluation_hours: float = 0.0


class Evaluated(Record, frozen=True, tag="evaluated"):
    """The held-out pass rate of these weights. compute_hours: when they were published; evaluation_hours: so far."""

    version: int
    time: float
    compute_hours: float
    pass_rate: float
    n_prompts: int
    samples: int
    evaluation_hours: float = 0.0


class TaskHistory(Record, frozen=True):
    """What the draws of a task follow from. drawn: tickets so far, the last of them; pass_rates: of the latest group of each
    prompt since they were last forgotten; a void group says nothing."""

    drawn: int
    last: Admitted
    pass_rates: dict[str, float]


class Snapshot(Record, frozen=True, tag="snapshot"):
    """The state at the head of a journal file: the fold of all files before it. Tickets are int32 arrays."""

    prompts_per_batch: int
    max_lag: int
    next_ticket: int
    forgotten: int
    queue: np.ndarray
    unfinished: tuple[Admitted, ...]
    tasks: dict[str, TaskHistory]
    published_version: int
    evaluations: tuple[Evaluated, ...]
    session: Session | None
    earlier_hours: float
    last_time: float
    generated_tokens: int
    finished: int
    void: int
    removed: int
    phase_steps: int = 1
    startup_hours: float = 0.0
    evaluation_hours: float = 0.0
    session_published: bool = False


JournalRecord = Session | Admitted | Finished | Removed | PublishedVersion | Evaluated | Snapshot
