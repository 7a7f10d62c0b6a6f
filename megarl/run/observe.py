"""What the run's files say now: read as they grow, by the supervisor alone.

RUN/status.json (controller) ─┐
RUN/metrics.jsonl (learner) ──┼─► Observer.look() ─► the live view, the restart policy, the watch
RUN/eval.jsonl (controller) ──┤
RUN/logs/*/*.log (all) ───────┘
"""

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megarl.core.base.rundir import RunDir, by_step, scores
from megarl.core.telemetry.metrics import Tail
from megarl.run.restart import Role

PROBLEM = re.compile(r" (ERROR|CRITICAL) |^\S*(Error|Exception)\b.*:|^megarl: |CUDA out of memory")
OF_SLURM = re.compile(r"^(srun|slurmstepd\S*): error")
TAIL_BYTES = 64 << 10
"""The end of a log is looked for in no more of it."""


class ServerStatus(msgspec.Struct, kw_only=True):
    """`busy_share`: of the time, with requests running."""

    id: int
    state: str = "starting"
    version: int = -1
    running: int = 0
    tokens_per_second: float = 0.0
    busy_share: float = 0.0


class TicketStatus(msgspec.Struct, kw_only=True):
    """`window`: drawn and not trained yet, of at most `window_limit`; `waiting`: of them, not being generated."""

    window: int = 0
    window_limit: int = 0
    running: int = 0
    waiting: int = 0
    finished: int = 0
    void: int = 0


class Status(msgspec.Struct, kw_only=True):
    """RUN/status.json. `phase`: what the learner was last told (train, replay, publish, score, wait, stop), or starting."""

    time: float
    step: int = 0
    version: int = 0
    phase: str = ""
    servers: list[ServerStatus] = []
    tickets: TicketStatus = msgspec.field(default_factory=TicketStatus)
    compute_hours: float = 0.0
    compute_unit: str = ""
    eval: dict[str, Any] | None = None
    evaluating: list[int] = []
    rollout_tokens_per_second: float = 0.0
    parity: str = ""  # what is wrong with it now


@dataclass(frozen=True)
class Problem:
    """A line of a log that looks like one; time: when it was read, with so many steps made in this life."""

    log: Path
    text: str
    time: float
    steps_made: int


class Observer:
    """All that is known of a run. `rows` and `evaluations` by step, from all its lives; the others from this life."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._metrics, self._eval = Tail(rundir.metrics), Tail(rundir.eval)
        self._logs: dict[Path, Tail] = {}
        self.steps_made = 0
        self._look_at_logs()
        self._problem: Problem | None = None  # what was found are problems of an earlier life
        self.rows = by_step(self._metrics.new())
        self.evaluations = scores(self._eval.new())
        self.status: Status | None = None

    def look(self) -> None:
        """Take in what is new."""
        new = by_step(self._metrics.new())
        self.rows |= new
        self.steps_made += len(new)
        self.evaluations |= scores(self._eval.new())
        with suppress(OSError, msgspec.DecodeError):  # not written yet, or no status: the last one stays
            self.status = msgspec.json.decode(self._rundir.status.read_bytes(), type=Status)
        self._look_at_logs()

    def _look_at_logs(self) -> None:
        for path in self._rundir.logs.glob("*/*.log"):
            for line in self._logs.setdefault(path, Tail(path)).lines():
                if PROBLEM.search(line):
                    self._problem = Problem(path, line.strip(), time.time(), self.steps_made)

    @property
    def problem(self) -> str:
        """The last one of the logs; empty once its role is well again: a step was made since, and a server is clean."""
        if (found := self._problem) is None:
            return ""
        kind, rank = found.log.parent.name, found.log.stem.rpartition(".")[2]
        well = self.steps_made > found.steps_made
        if kind == "server":
            servers = self.status.servers if self.status and self.status.time > found.time else []
            well = well and any(str(s.id) == rank and s.state.startswith("clean") for s in servers)
        return "" if well else f"{kind} {found.log.stem}: {found.text}"

    def forget_status(self) -> None:
        """The controller is started anew: what its last life said no longer holds."""
        self._rundir.status.unlink(missing_ok=True)
        self.status = None

    @property
    def status_age(self) -> float:
        """Seconds since the controller wrote its status."""
        return time.time() - self.status.time if self.status else 0.0

    @property
    def latest(self) -> dict[str, Any]:
        """Row of the newest step; empty before the first."""
        return self.rows[max(self.rows)] if self.rows else {}

    @property
    def compared(self) -> dict[str, Any]:
        """Row of the newest step before which servers and learner were compared; empty before the first."""
        return next((row for _, row in sorted(self.rows.items(), reverse=True) if "parity_rollouts" in row), {})


def log_of(rundir: RunDir, role: Role) -> Path | None:
    """The log that says why `role` ended: of the learner's ranks that which has a problem among its last lines, else the one
    written last. None if it has written none."""
    rank = str(role.index) if role.kind == "server" else "*"
    logs = rundir.logs.glob(f"{role.kind}/*.{rank}.log")
    return max(
        logs, key=lambda log: (role.kind == "learner" and bool(last_problem(log)), log.stat().st_mtime), default=None
    )


def last_problem(log: Path) -> str:
    """The last of its last lines that looks like one, what Slurm says of it only if there is no other; else empty."""
    lines = last_lines(log)[::-1]
    found = [line for problem in (PROBLEM, OF_SLURM) for line in lines if problem.search(line)]
    return found[0].strip() if found else ""


def last_lines(log: Path, count: int = 25) -> list[str]:
    """The end of a log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]
