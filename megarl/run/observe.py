"""The state of a run from its files: the supervisor reads them as they grow, `megarl
status` once.

RUN/status.json (controller) ─┐
RUN/metrics.jsonl (learner) ──┼─► Observer.look() ─► the live view, the restart policy, the watch
RUN/eval.jsonl (controller) ──┤
RUN/logs/*/*.log (all) ───────┘

Lines of logs have no reliable times, so only problems logged while an Observer looks
count as present ones: the live view of `megarl train` shows the last of them. `megarl
status` shows the last one that has a time (status.py).
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from megarl.core.base.files import LONGEST_LINE_BYTES, contents, opened
from megarl.core.base.rundir import Row, RunDir, by_step, parsed, rows_in_order, scores
from megarl.run.health import MEMORY, Health
from megarl.run.restart import Role

PROBLEM = re.compile(r" (ERROR|CRITICAL) |^\S*(Error|Exception)\b.*:|^megarl: |CUDA out of memory")
PEER_LOST = re.compile(
    r"^(?!megarl: ).*(Connection (reset|closed) by peer|ncclRemoteError|Watchdog caught collective)"
)
"""What a rank says when another one has ended."""
OF_SLURM = re.compile(r"^(srun|slurmstepd\S*): error")
TAIL_BYTES = 64 << 10
"""How far back from its end a log is read."""
RECENT = 20
"""Number of steps over which rates and shares are averaged."""


class Tail:
    """Reads a growing file: only complete lines since the last call. An unfinished last
    line is left for a later call.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def lines(self) -> list[str]:
        """Return complete lines since the last call, without line ends; bytes that are
        not UTF-8 are replaced. Empty while the file is missing or cannot be read; a
        later call then returns its lines.
        """
        added: list[str] = []
        try:
            with opened(self.path) as file:
                file.seek(self.offset)
                while line := file.readline(LONGEST_LINE_BYTES):
                    if line.endswith(b"\n"):
                        self.offset += len(line)
                        added += line.decode(errors="replace").splitlines()
                    elif len(line) < LONGEST_LINE_BYTES:
                        break
                    else:  # no line of ours: what was added so far is skipped
                        self.offset = file.seek(0, os.SEEK_END)
        except OSError:
            pass
        return added

    def new(self) -> list[Row]:
        """Return rows since the last call; a line truncated by a crash is skipped."""
        return [row for line in self.lines() if (row := parsed(line)) is not None]


class ServerStatus(msgspec.Struct, kw_only=True):
    """A server's state. busy_share: share of the time during which it had requests
    running.
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
    publish, score, wait, stop), or starting.
    """

    time: float
    step: int = 0
    phase: str = ""
    servers: list[ServerStatus] = []
    tickets: TicketStatus = msgspec.field(default_factory=TicketStatus)
    compute_hours: float = 0.0
    compute_unit: str = ""
    evaluating: list[int] = []
    parity: str = ""  # what is wrong with parity now


@dataclass(frozen=True)
class LoggedProblem:
    """A log line that looks like a problem. time: when it was read; steps_made: steps
    of this life by then.
    """

    log: Path
    text: str
    time: float
    steps_made: int


class Observer:
    """Everything known of a run. `rows` (the RECENT newest), `pass_rates` in training
    and `evaluations`, all by step, come from all its lives, the rest from this life.
    compared: the row of the newest step before which servers and learner were compared;
    empty before the first. steps_made: steps of this life that no earlier row has.
    """

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._metrics, self._eval = Tail(rundir.metrics), Tail(rundir.eval)
        # What was there before is not read: logs of weeks have gigabytes.
        there = _sizes(rundir.logs) if rundir.logs.is_dir() else {}
        self._logs = {log: Tail(Path(log), size) for log, size in there.items()}
        self.steps_made = 0
        self._problem: LoggedProblem | None = None
        self.rows: dict[int, Row] = {}
        self.pass_rates: dict[int, float] = {}
        self.compared: Row = {}
        self.health = Health()
        with suppress(OSError):  # not there yet, or a brief failure: the next look reads all
            written = rundir.metrics.stat().st_size
            for row in rows_in_order(rundir.metrics):
                self._take(row)
            self._metrics.offset = written
            for row in rows_in_order(rundir.metrics, max(self.rows, default=0) - MEMORY):
                self.health.add(row)
        self.evaluations = scores(self._eval.new())
        self.status: Status | None = None
        self._changed = 0.0

    def look(self) -> None:
        """Read what was added to the files."""
        new = by_step(self._metrics.new())
        newest = max(self.rows, default=-1)
        self.steps_made += sum(
            step > newest for step in new
        )  # a learner that replays steps has made no progress
        for step, row in sorted(new.items()):
            self._take(row)
            if step > self.health.step:  # a replayed step is the same again
                self.health.add(row)
        self.evaluations |= scores(self._eval.new())
        with suppress(
            OSError, msgspec.DecodeError
        ):  # not written yet, or malformed: keep the last one
            status = msgspec.json.decode(contents(self._rundir.status), type=Status)
            if self.status is None or status.time != self.status.time:
                self._changed = time.monotonic()
            self.status = status
        self._look_at_logs()

    def _take(self, row: Row) -> None:
        """Keep what is shown of a row."""
        step = row["step"]
        self.rows[step] = row
        if len(self.rows) > RECENT:
            del self.rows[min(self.rows)]
        if "pass_rate_train" in row:
            self.pass_rates[step] = row["pass_rate_train"]
        if "parity_rollouts" in row and step >= self.compared.get("step", 0):
            self.compared = row

    def _look_at_logs(self) -> None:
        """Read what was added to logs. Those of all lives are there, so only those that
        have grown are opened.
        """
        sizes: dict[str, int] = {}
        with suppress(OSError):
            sizes = _sizes(self._rundir.logs)
        for path, size in sizes.items():
            if path not in self._logs:
                self._logs[path] = Tail(Path(path))
            tail = self._logs[path]
            for line in tail.lines() if size > tail.offset else ():
                if PROBLEM.search(line):
                    self._problem = LoggedProblem(
                        tail.path, line.strip(), time.time(), self.steps_made
                    )

    @property
    def problem(self) -> str:
        """The last problem in the logs; empty once its role has recovered: a step was
        made since, and a server is clean.
        """
        if (last := self._problem) is None:
            return ""
        kind = last.log.parent.name
        rank = last.log.stem.rpartition(".")[2]
        well = self.steps_made > last.steps_made
        if kind == "server":
            known = self.status is not None and self.status.time > last.time
            servers = self.status.servers if self.status and known else []
            well = (
                well
                and known
                and all(s.state.startswith("clean") for s in servers if str(s.id) == rank)
            )
        return "" if well else f"{kind} {last.log.stem}: {last.text}"

    def joined(self, own: int) -> list[ServerStatus]:
        """Return the working servers that have joined. own: the number of the run's own
        servers.
        """
        servers = self.status.servers if self.status else []
        return [s for s in servers if s.id >= own and s.state in ("clean", "publishing")]

    def forget_status(self) -> None:
        """Discard the status of the controller's last life when it is started again."""
        with suppress(OSError):  # the new controller overwrites it anyway
            self._rundir.status.unlink(missing_ok=True)
        self.status = None

    @property
    def status_age(self) -> float:
        """Seconds since another status was seen, by this machine's clock: the
        controller's may be another.
        """
        return time.monotonic() - self._changed if self.status else 0.0

    @property
    def latest(self) -> Row:
        """The newest step's row; empty before the first."""
        return self.rows[max(self.rows)] if self.rows else {}

    @property
    def scores(self) -> list[Row]:
        """Rows of eval.jsonl, in order of steps."""
        return [self.evaluations[step] for step in sorted(self.evaluations)]

    @property
    def scored(self) -> Row:
        """The newest evaluation; empty before the first."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}


def _sizes(logs: Path) -> dict[str, int]:
    """Return how long each log of a role is."""
    folders = [folder.path for folder in os.scandir(logs) if folder.is_dir()]
    found = (
        file for folder in folders for file in os.scandir(folder) if file.name.endswith(".log")
    )
    return {file.path: file.stat().st_size for file in found}


def log_sizes(rundir: RunDir, role: Role) -> dict[Path, int]:
    """Return the sizes of the role's logs on all nodes and ranks: the offsets at which
    a life that starts now begins.
    """
    sizes: dict[Path, int] = {}
    with suppress(OSError):
        for log in _logs(rundir, role):
            sizes[log] = log.stat().st_size
    return sizes


def log_of(
    rundir: RunDir, role: Role, begins: Mapping[Path, int] = MappingProxyType({})
) -> Path | None:
    """Return the log that says why `role` ended, if any: of its logs the newest with a
    problem, else the newest. That another rank was lost is a problem only if no log has
    its own. begins: the offsets at which its last life began in each log (`log_sizes`);
    logs without new lines are left out.
    """

    def telling(log: Path) -> tuple[bool, bool, float]:
        problem = last_problem(log, begins.get(log, 0))
        return bool(problem) and not PEER_LOST.search(problem), bool(problem), log.stat().st_mtime

    added = (
        log for log in _logs(rundir, role) if log not in begins or log.stat().st_size > begins[log]
    )
    return max(added, key=telling, default=None)


def _logs(rundir: RunDir, role: Role) -> Iterator[Path]:
    return rundir.logs.glob(f"{role.kind}/*.{role.index if role.serves else '*'}.log")


def last_problem(log: Path, begin: int = 0) -> str:
    """Return the last problem near the end of a log; empty if there is none. That a
    peer was lost counts only without others, and Slurm's messages come last. begin: see
    `last_lines`.
    """
    lines = last_lines(log, begin=begin)[::-1]
    problems = sorted(
        (line for line in lines if PROBLEM.search(line)),
        key=lambda line: bool(PEER_LOST.search(line)),
    )
    problems += (line for line in lines if OF_SLURM.search(line))
    return problems[0].strip() if problems else ""


def last_lines(log: Path, count: int = 25, begin: int = 0) -> list[str]:
    """Return the last lines of a log. begin: number of bytes to skip at its beginning."""
    if not log.exists():
        return []
    with opened(log) as file:
        file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
