"""The state of a run from its files: the supervisor reads them as they grow, `megarl status` once.

RUN/status.json (controller) ─┐
RUN/metrics.jsonl (learner) ──┼─► Observer.look() ─► the live view, the restart policy, the watch
RUN/eval.jsonl (controller) ──┤
RUN/logs/*/*.log (all) ───────┘

Lines of the logs have no times that can be relied on, so only what is added while it looks is a problem of now: the live view
of `megarl train` shows the last one, `megarl status` does not.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from megarl.core.base.rundir import Row, RunDir, by_step, parsed, scores
from megarl.run.health import Health
from megarl.run.restart import Role

PROBLEM = re.compile(r" (ERROR|CRITICAL) |^\S*(Error|Exception)\b.*:|^megarl: |CUDA out of memory")
OF_SLURM = re.compile(r"^(srun|slurmstepd\S*): error")
TAIL_BYTES = 64 << 10
"""How far back from its end a log is read."""


class Tail:
    """Reads a growing file: `new()` returns complete lines since the last call; an unfinished last line waits for its end."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset

    def lines(self) -> list[str]:
        """Return complete lines since the last call, without line ends; bytes that are not UTF-8 are replaced.

        No line while the file is not there or cannot be read: a later call returns what this one did not.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()

    def new(self) -> list[Row]:
        """Return rows since the last call; a line truncated by a crash is skipped."""
        return [row for line in self.lines() if (row := parsed(line)) is not None]


class ServerStatus(msgspec.Struct, kw_only=True):
    """A server's state. `busy_share`: share of the time with requests running."""

    id: int
    state: str = "starting"
    version: int = -1
    running: int = 0
    tokens_per_second: float = 0.0
    busy_share: float = 0.0


class TicketStatus(msgspec.Struct, kw_only=True):
    """Counts of tickets. `window`: drawn and not yet trained, at most `window_limit`."""

    window: int = 0
    window_limit: int = 0
    running: int = 0
    void: int = 0


class Status(msgspec.Struct, kw_only=True):
    """Part of RUN/status.json. phase: the learner's last command (train, replay, publish, score, wait, stop), or starting."""

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
    """A log line that looks like a problem. time: when it was read; steps_made: steps of this life by then."""

    log: Path
    text: str
    time: float
    steps_made: int


class Observer:
    """Everything known of a run. `rows` and `evaluations` (by step) come from all its lives, the rest from this life.

    steps_made: steps of this life that no row was written of before.
    """

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._metrics, self._eval = Tail(rundir.metrics), Tail(rundir.eval)
        # What was there before is not read: logs of weeks have gigabytes.
        self._logs = {log: Tail(log, log.stat().st_size) for log in rundir.logs.glob("*/*.log")}
        self.steps_made = 0
        self._problem: LoggedProblem | None = None
        self.rows = by_step(self._metrics.new())
        self.health = Health(row for _, row in sorted(self.rows.items()))
        self.evaluations = scores(self._eval.new())
        self.status: Status | None = None

    def look(self) -> None:
        """Read what was added to the files."""
        new, newest = by_step(self._metrics.new()), max(self.rows, default=-1)
        self.rows |= new
        self.steps_made += sum(step > newest for step in new)  # a learner that replays steps has not come further
        for step in sorted(step for step in new if step > self.health.step):  # a replayed step is the same again
            self.health.add(new[step])
        self.evaluations |= scores(self._eval.new())
        with suppress(OSError, msgspec.DecodeError):  # not written yet, or malformed: keep the last one
            self.status = msgspec.json.decode(self._rundir.status.read_bytes(), type=Status)
        self._look_at_logs()

    def _look_at_logs(self) -> None:
        paths: list[Path] = []
        with suppress(OSError):
            paths.extend(self._rundir.logs.glob("*/*.log"))
        for path in paths:
            for line in self._logs.setdefault(path, Tail(path)).lines():
                if PROBLEM.search(line):
                    self._problem = LoggedProblem(path, line.strip(), time.time(), self.steps_made)

    @property
    def problem(self) -> str:
        """The last problem in the logs; empty once its role has recovered: a step was made since, and the server is clean."""
        if (last := self._problem) is None:
            return ""
        kind, rank = last.log.parent.name, last.log.stem.rpartition(".")[2]
        well = self.steps_made > last.steps_made
        if kind == "server":
            known = self.status is not None and self.status.time > last.time
            servers = self.status.servers if self.status and known else []
            well = well and known and all(s.state.startswith("clean") for s in servers if str(s.id) == rank)
        return "" if well else f"{kind} {last.log.stem}: {last.text}"

    def joined(self, own: int) -> list[ServerStatus]:
        """Return the servers at work that the run, which has `own` of its own, has not started."""
        servers = self.status.servers if self.status else []
        return [s for s in servers if s.id >= own and s.state in ("clean", "publishing")]

    def forget_status(self) -> None:
        """Discard the status of the controller's last life when it is started again."""
        self._rundir.status.unlink(missing_ok=True)
        self.status = None

    @property
    def status_age(self) -> float:
        """Seconds since the controller wrote its status."""
        return time.time() - self.status.time if self.status else 0.0

    @property
    def latest(self) -> Row:
        """The newest step's row; empty before the first."""
        return self.rows[max(self.rows)] if self.rows else {}

    @property
    def compared(self) -> Row:
        """The row of the newest step before which servers and learner were compared; empty before the first."""
        return next((row for _, row in sorted(self.rows.items(), reverse=True) if "parity_rollouts" in row), {})


def log_sizes(rundir: RunDir, role: Role) -> dict[Path, int]:
    """Return how long the logs of the role are, of all nodes and ranks: where a life that starts now begins in them."""
    sizes: dict[Path, int] = {}
    with suppress(OSError):
        for log in _logs(rundir, role):
            sizes[log] = log.stat().st_size
    return sizes


def log_of(rundir: RunDir, role: Role, begins: Mapping[Path, int] = MappingProxyType({})) -> Path | None:
    """Return the log that says why `role` ended, if any: of the learner's ranks one with a problem, else the newest.

    begins: where its last life began in each log (`log_sizes`); logs to which that has added nothing are left out.
    """

    def telling(log: Path) -> tuple[bool, float]:
        return role.kind == "learner" and bool(last_problem(log, begins.get(log, 0))), log.stat().st_mtime

    added = (log for log in _logs(rundir, role) if log not in begins or log.stat().st_size > begins[log])
    return max(added, key=telling, default=None)


def _logs(rundir: RunDir, role: Role) -> Iterator[Path]:
    return rundir.logs.glob(f"{role.kind}/*.{role.index if role.serves else '*'}.log")


def last_problem(log: Path, begin: int = 0) -> str:
    """Return the last problem near the end of a log; empty if there is none. Slurm's messages count only if no other does.

    begin: see `last_lines`.
    """
    lines = last_lines(log, begin=begin)[::-1]
    problems = [line for pattern in (PROBLEM, OF_SLURM) for line in lines if pattern.search(line)]
    return problems[0].strip() if problems else ""


def last_lines(log: Path, count: int = 25, begin: int = 0) -> list[str]:
    """Return the last lines of a log. begin: bytes at its beginning that are left out."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
