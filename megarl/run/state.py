"""What is known of a run, from its files: the one reader of `megarl train`'s live view,
`megarl status` and the summary, which only format it.

    RUN/status.json (controller)  ─┐
    RUN/metrics.jsonl (learner)   ─┤
    RUN/eval.jsonl (controller)   ─┼─► Observer.look() ─► RunState   follows the files
    RUN/logs/*/*.log (all roles)  ─┤   read()          ─► RunState   once, with roles
    RUN/logs/supervisor.jsonl     ─┘   history()       ─► History    rows of all lives

Lines of logs have no reliable times, so only problems logged while an Observer looks
count as present ones: the live view of `megarl train` shows the last of them. `read`
takes the last one that has a time (`dated_problem`).
"""

import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from megarl.core.base.files import contents
from megarl.core.base.rundir import (
    Row,
    RunDir,
    SupervisorEvent,
    by_step,
    latest_rows,
    latest_scores,
    parsed,
    rows_in_order,
    scores,
)
from megarl.run.health import MEMORY, Health
from megarl.run.logs import PROBLEM, Tail, last_lines, sentence, sizes
from megarl.run.restart import Role, RoleKind
from megarl.run.scores import NEWEST

RECENT = 20
"""Number of steps over which rates and shares are averaged."""
WARNED = re.compile(r"(\S+ \S+),\d+ (.*?) (?:WARNING|ERROR|CRITICAL) megarl\.\S+: (.*)")
"""A line of a role's log: when, who, what."""
TIME_CHARACTERS = len("2026-03-01 14:05:06")


class ServerStatus(msgspec.Struct, kw_only=True):
    """A server's state. state: Membership's text, such as clean(7). busy_share: share
    of the time during which it had requests running.
    """

    id: int
    state: str = "starting"
    version: int = -1
    running: int = 0
    tokens_per_second: float = 0.0
    busy_share: float = 0.0


class TicketStatus(msgspec.Struct, kw_only=True):
    """Counts of tickets. window: drawn but not yet trained, at most `window_limit`."""

    window: int = 0
    window_limit: int = 0
    running: int = 0
    void: int = 0


class Status(msgspec.Struct, kw_only=True):
    """Part of RUN/status.json. phase: the learner's last command (train, replay,
    publish, score, wait, stop), or starting. parity: what is wrong with it now.
    """

    time: float
    step: int = 0
    phase: str = ""
    servers: list[ServerStatus] = []
    tickets: TicketStatus = msgspec.field(default_factory=TicketStatus)
    compute_hours: float = 0.0
    compute_unit: str = ""
    evaluating: list[int] = []
    parity: str = ""


@dataclass(frozen=True)
class RoleState:
    """The state of a role. state: running, restarting, dropped or ended. seconds: since
    it started. nodes: where it runs.
    """

    state: str
    seconds: float
    restarts: int = 0
    nodes: Sequence[str] = ()


@dataclass
class RunState:
    """What is known of a run.

    rows: the RECENT newest of metrics.jsonl; write_seconds: how long the newest
    checkpoint took to write, 0 if unknown; pass_rates: in training; evaluations: all
    rows of eval.jsonl. These four are of all lives, three of them by step; the rest is
    of this life. compared: the row of the newest step before which servers and learner
    were compared; empty before the first. health: the judgement on all rows.
    steps_made: steps of this life that no earlier row has. status: the controller's,
    None before its first. roles: as the supervisor noted. began: when this life began,
    in seconds since the epoch. problem: the last one to show; empty without any.
    """

    rows: dict[int, Row] = field(default_factory=dict)
    write_seconds: float = 0.0
    pass_rates: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, Row] = field(default_factory=dict)
    compared: Row = field(default_factory=dict)
    health: Health = field(default_factory=Health)
    steps_made: int = 0
    status: Status | None = None
    roles: dict[Role, RoleState] = field(default_factory=dict)
    began: float = 0.0
    problem: str = ""

    @property
    def latest(self) -> Row:
        """The newest step's row; empty before the first."""
        return self.rows[max(self.rows)] if self.rows else {}

    @property
    def newest_rows(self) -> list[Row]:
        """The RECENT newest rows, in order of steps."""
        return [self.rows[step] for step in sorted(self.rows)]

    @property
    def timed_rows(self) -> list[Row]:
        """The newest rows without those replayed after a crash."""
        return [row for row in self.rows.values() if not row.get("replay")]

    @property
    def scores(self) -> list[Row]:
        """Rows of eval.jsonl, in order of steps."""
        return [self.evaluations[step] for step in sorted(self.evaluations)]

    @property
    def latest_score(self) -> Row:
        """The newest evaluation; empty before the first."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    @property
    def servers(self) -> dict[int, ServerStatus]:
        """The controller's servers by their numbers; empty before its first status."""
        if self.status is None:
            return {}
        return {server.id: server for server in self.status.servers}

    def guests(self, run_servers: int) -> list[ServerStatus]:
        """Return the working servers that have joined. run_servers: the number of the
        run's own.
        """
        return [
            server
            for server in self.servers.values()
            if server.id >= run_servers and server.state in ("clean", "publishing")
        ]

    def take(self, row: Row) -> None:
        """Keep what is shown of a row of metrics."""
        step = row["step"]
        self.rows[step] = row
        if len(self.rows) > RECENT:
            del self.rows[min(self.rows)]
        if "pass_rate_train" in row:
            self.pass_rates[step] = row["pass_rate_train"]
        self.write_seconds = row.get("checkpoint_write_seconds", self.write_seconds)
        if "parity_rollouts" in row and step >= self.compared.get("step", 0):
            self.compared = row


@dataclass(frozen=True)
class LoggedProblem:
    """A log line that looks like a problem. time: when it was read; steps_made: steps
    of this life by then.
    """

    log: Path
    text: str
    time: float
    steps_made: int

    def is_over(self, state: RunState) -> bool:
        """Return whether its role has recovered: a step was made since and, if the role
        is a server, a later status of the controller says that it is clean.
        """
        if state.steps_made <= self.steps_made:
            return False
        if self.log.parent.name != "server":
            return True
        if state.status is None or state.status.time <= self.time:
            return False
        server_id = self.log.stem.rpartition(".")[2]  # NODE.SERVER.log
        return all(
            server.state.startswith("clean")
            for server in state.status.servers
            if str(server.id) == server_id
        )


class Observer:
    """Follows the files of a run and folds them into its `state`."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._metrics = Tail(rundir.metrics)
        self._eval = Tail(rundir.eval)
        # What was there before is not read: logs of weeks have gigabytes.
        lengths = sizes(rundir.logs) if rundir.logs.is_dir() else {}
        self._logs = {log: Tail(Path(log), size) for log, size in lengths.items()}
        self._problem: LoggedProblem | None = None
        self._status_changed = 0.0
        self.state = RunState()
        with suppress(OSError):  # not there yet, or a brief failure: the next look reads all
            self._read_earlier_rows()
        self.state.evaluations = scores(self._eval.new())

    def _read_earlier_rows(self) -> None:
        """Take the rows that metrics.jsonl has so far, and judge the last MEMORY."""
        file = self._rundir.metrics
        size = file.stat().st_size  # before reading: what is added meanwhile is read again
        for row in rows_in_order(file):
            self.state.take(row)
        self._metrics.offset = size
        for row in rows_in_order(file, max(self.state.rows, default=0) - MEMORY):
            self.state.health.add(row)

    def look(self) -> None:
        """Read what was added to the files."""
        self._look_at_metrics()
        self.state.evaluations |= scores(self._eval.new())
        self._look_at_status()
        self._look_at_logs()
        self.state.problem = self._present_problem()

    def _look_at_metrics(self) -> None:
        """Take the new rows of metrics.jsonl, and count the steps made. Steps that a
        learner replays are neither counted nor judged again.
        """
        state = self.state
        rows = by_step(self._metrics.new())
        newest = max(state.rows, default=-1)
        for step in rows:
            if step > newest:  # a learner that replays steps has made no progress
                state.steps_made += 1
        for step, row in sorted(rows.items()):
            state.take(row)
            if step > state.health.step:  # a replayed step is the same again
                state.health.add(row)

    def _look_at_status(self) -> None:
        """Read the controller's status; keep the last one if it is not written yet, or
        malformed.
        """
        state = self.state
        with suppress(OSError, msgspec.DecodeError):
            status = msgspec.json.decode(contents(self._rundir.status), type=Status)
            if state.status is None or status.time != state.status.time:
                self._status_changed = time.monotonic()
            state.status = status

    def _look_at_logs(self) -> None:
        """Read what was added to logs. Those of all lives are there, so only those that
        have grown are opened.
        """
        lengths: dict[str, int] = {}
        with suppress(OSError):
            lengths = sizes(self._rundir.logs)
        for path, size in lengths.items():
            tail = self._logs.setdefault(path, Tail(Path(path)))
            if size <= tail.offset:
                continue
            for line in tail.lines():
                if PROBLEM.search(line):
                    self._problem = LoggedProblem(
                        tail.path, line.strip(), time.time(), self.state.steps_made
                    )

    def _present_problem(self) -> str:
        """Return the last problem in the logs; empty once its role has recovered."""
        problem = self._problem
        if problem is None or problem.is_over(self.state):
            return ""
        return f"{problem.log.parent.name} {problem.log.stem}: {problem.text}"

    def forget_status(self) -> None:
        """Discard the status of the controller's last life when it is started again."""
        with suppress(OSError):  # the new controller overwrites it anyway
            self._rundir.status.unlink(missing_ok=True)
        self.state.status = None

    @property
    def status_age(self) -> float:
        """Seconds since another status was seen, by this machine's clock: the
        controller's may be another.
        """
        if self.state.status is None:
            return 0.0
        return time.monotonic() - self._status_changed


def roles_after(events: Iterable[SupervisorEvent]) -> dict[Role, RoleState]:
    """Return the states of the roles after these events of one life."""
    roles: dict[Role, RoleState] = {}
    for event in events:
        if not event.role:
            continue
        kind, _, index = event.role.partition("-")
        role = Role(cast(RoleKind, kind), int(index))
        earlier = roles.get(role, RoleState("", 0.0))
        state = {"started": "running", "restart": "restarting"}.get(event.event, event.event)
        seconds = time.time() - event.time if state == "running" else 0.0
        restarts = earlier.restarts
        if event.event == "restart":
            restarts += 1
        roles[role] = RoleState(state, seconds, restarts, event.nodes or earlier.nodes)
    return roles


def read(rundir: RunDir) -> RunState:
    """Return the present state of a run from its files alone, with its roles and the
    newest problem that has a time.
    """
    observer = Observer(rundir)
    observer.look()
    state = observer.state
    events = list(rundir.events())
    life = [event for event in events if event.session == events[-1].session]  # the last one
    state.roles = roles_after(life)
    state.began = life[0].time if life else time.time()
    state.problem = dated_problem(rundir)
    return state


def dated_problem(rundir: RunDir) -> str:
    """Return the newest warning or failure that roles and supervisor have written down
    with its time; empty without any.
    """
    lines = Tail(rundir.supervisor).lines()
    events = [line for line in lines if _is_failure(parsed(line) or {})]
    newest = max(map(sentence, reversed(events)), default="", key=_time_of)
    logs = [(log.stat().st_mtime, log) for log in rundir.logs.glob("*/*.log")]
    for written, log in sorted(logs, reverse=True):
        if time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written)) < _time_of(newest):
            # This log was last written before the newest problem, and so were all that
            # follow. A run that was started often has thousands.
            break
        warnings = map(WARNED.fullmatch, last_lines(log, count=1000))
        problems = [" ".join(warning.groups()) for warning in warnings if warning]
        newest = max([newest, *reversed(problems)], key=_time_of)
    return newest


def _is_failure(event: Row) -> bool:
    """Return whether an event of the supervisor is a role's failure."""
    kind = event.get("event")
    return kind in ("hung", "dropped") or (kind == "ended" and bool(event.get("status")))


def _time_of(problem: str) -> str:
    """Return the time with which a problem's text begins; empty for an empty text."""
    return problem[:TIME_CHARACTERS]


@dataclass(frozen=True)
class History:
    """All rows of a run, of all its lives: of metrics.jsonl and eval.jsonl, both in
    order of steps, and the supervisor's events.
    """

    rows: list[Row]
    evaluations: list[Row]
    events: list[SupervisorEvent]


def history(rundir: RunDir, rows: list[Row] | None = None) -> History:
    """Read a run's history. rows: of metrics.jsonl, if they are known."""
    if rows is None:
        rows = latest_rows(rundir.metrics)
    return History(rows, latest_scores(rundir.eval), list(rundir.events()))


@dataclass(frozen=True)
class RunJudgement:
    """The judgement on all rows of a run, its NEWEST rows and its evaluations."""

    health: Health
    newest: list[Row]
    evaluations: list[Row]


def judged(rundir: RunDir) -> RunJudgement:
    """Judge all rows of a run one after the other; few are in memory at once."""
    health = Health()
    newest: deque[Row] = deque(maxlen=NEWEST)
    for row in rows_in_order(rundir.metrics):
        health.add(row)
        newest.append(row)
    return RunJudgement(health, list(newest), latest_scores(rundir.eval))
