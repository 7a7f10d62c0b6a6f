"""The logs of a run: files that grow are followed, the line that says why a role ended
is found, and `megarl logs RUN --role …` prints the end of a role's logs.

    server, learner, controller    all logs of that kind
    server-3, learner-0            those of one
    supervisor                     starts, ends and restarts
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.files import LONGEST_LINE_BYTES, opened
from megarl.core.base.rundir import Row, RunDir, parsed
from megarl.run.restart import Role

LOOK_S = 0.5
KINDS = ("server", "learner", "controller")
PROBLEM = re.compile(r" (ERROR|CRITICAL) |^\S*(Error|Exception)\b.*:|^megarl: |CUDA out of memory")
PEER_LOST = re.compile(
    r"^(?!megarl: ).*(Connection (reset|closed) by peer|ncclRemoteError|Watchdog caught collective)"
)
"""What a rank says when another one has ended."""
OF_SLURM = re.compile(r"^(srun|slurmstepd\S*): error")
TAIL_BYTES = 64 << 10
"""How far back from its end a log is read."""


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
        with suppress(OSError), opened(self.path) as file:
            file.seek(self.offset)
            while line := file.readline(LONGEST_LINE_BYTES):
                if line.endswith(b"\n"):
                    self.offset += len(line)
                    added += line.decode(errors="replace").splitlines()
                elif len(line) < LONGEST_LINE_BYTES:
                    break  # unfinished
                else:  # too long for a line of ours: go on after all that the file has now
                    self.offset = file.seek(0, os.SEEK_END)
        return added

    def new(self) -> list[Row]:
        """Return rows since the last call; a line truncated by a crash is skipped."""
        rows = map(parsed, self.lines())
        return [row for row in rows if row is not None]


def sizes(logs: Path) -> dict[str, int]:
    """Return how long each log of a role is."""
    lengths: dict[str, int] = {}
    folders = [folder.path for folder in os.scandir(logs) if folder.is_dir()]
    for folder in folders:
        for file in os.scandir(folder):
            if file.name.endswith(".log"):
                lengths[file.path] = file.stat().st_size
    return lengths


def log_sizes(rundir: RunDir, role: Role) -> dict[Path, int]:
    """Return the sizes of the role's logs on all nodes and ranks: the offsets at which
    a life that starts now begins.
    """
    lengths: dict[Path, int] = {}
    with suppress(OSError):
        for log in _logs(rundir, role):
            lengths[log] = log.stat().st_size
    return lengths


def log_of(
    rundir: RunDir, role: Role, log_offsets: Mapping[Path, int] = MappingProxyType({})
) -> Path | None:
    """Return the log that says why `role` ended, if any: of its logs the newest with a
    problem, else the newest. That another rank was lost is a problem only if no log has
    its own. log_offsets: where its last life began in each log, in bytes (`log_sizes`);
    logs without new lines are left out.
    """

    def telling(log: Path) -> tuple[bool, bool, float]:
        """Return a key by which logs are sorted, the most telling one last."""
        problem = last_problem(log, log_offsets.get(log, 0))
        is_cause = bool(problem) and not PEER_LOST.search(problem)
        return is_cause, bool(problem), log.stat().st_mtime

    grown = [
        log
        for log in _logs(rundir, role)
        if log not in log_offsets or log.stat().st_size > log_offsets[log]
    ]
    return max(grown, key=telling, default=None)


def _logs(rundir: RunDir, role: Role) -> Iterator[Path]:
    """Yield the logs of a server, or those of all ranks of another role."""
    rank = str(role.index) if role.serves else "*"
    return rundir.logs.glob(f"{role.kind}/*.{rank}.log")


def last_problem(log: Path, start: int = 0) -> str:
    """Return the last problem near the end of a log; empty if there is none. That a
    peer was lost counts only without others, and Slurm's messages come last. start: see
    `last_lines`.
    """
    newest_first = last_lines(log, start=start)[::-1]
    problems = [line for line in newest_first if PROBLEM.search(line)]
    problems.sort(key=lambda line: bool(PEER_LOST.search(line)))
    problems += [line for line in newest_first if OF_SLURM.search(line)]
    return problems[0].strip() if problems else ""


def last_lines(log: Path, count: int = 25, start: int = 0) -> list[str]:
    """Return the last lines of a log. start: bytes to skip at its beginning."""
    if not log.exists():
        return []
    with opened(log) as file:
        file.seek(max(start, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()[-count:]


def main(run: Path, role: str, count: int, follow: bool) -> int:
    """Print the last `count` lines of each file; with `follow`, go on until the run has
    ended.
    """
    rundir = RunDir.opened(run)
    tails: dict[Path, Tail] = {}
    is_first_look = True
    while True:
        ended = rundir.summary.exists()
        files = logs_of(rundir, role)
        if not files and not follow:
            raise MegarlError(f"{rundir.logs}: no log of {role} yet")
        for file in files:
            lines = last_lines(file, count)
            if follow:
                lines = _followed(tails, file, count if is_first_look else None)
            _show(file, lines, named=len(files) > 1)
        if ended or not follow:
            return 0
        is_first_look = False
        time.sleep(LOOK_S)


def _followed(tails: dict[Path, Tail], file: Path, count: int | None) -> list[str]:
    """Return the new lines of a file. count: at the first look, how many of its last
    ones instead; then None.
    """
    if count is None:
        tail = tails.setdefault(file, Tail(file))
        return tail.lines()
    tails[file] = Tail(file, max(0, file.stat().st_size - TAIL_BYTES))
    return tails[file].lines()[-count:]


def _show(file: Path, lines: list[str], named: bool) -> None:
    """Print lines of a file. named: say which file, as there are several."""
    prefix = f"{file.parent.name} {file.stem}: " if named else ""
    for line in lines:
        if file.suffix == ".jsonl":
            text = sentence(line)
        else:
            text = prefix + terminal.uncoloured(line)
        terminal.say(text, flush=True)


def logs_of(rundir: RunDir, role: str) -> list[Path]:
    """Return the role's existing log files, the most recently written one last.
    MegarlError for an unknown role.
    """
    kind, _, index = role.partition("-")
    may_have_index = index.isdecimal() and kind != "controller"
    if role == "supervisor":
        files = [rundir.supervisor]
    elif kind in KINDS and (not index or may_have_index):
        logs = rundir.logs.glob(f"{kind}/*.{index or '*'}.log")
        files = sorted(logs, key=lambda log: (log.stat().st_mtime, log.name))
    else:
        raise MegarlError(
            f"--role: {role!r} is none of {', '.join(KINDS)}, supervisor, server-N and learner-N"
        )
    return [log for log in files if log.exists()]


def sentence(line: str) -> str:
    """Format a supervisor event as a sentence: when, who, what, details. Other lines
    are returned unchanged.
    """
    try:
        row: dict[str, Any] = json.loads(line)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.pop("time")))
        row.pop("session")
        words = [at, row.pop("role", "run"), row.pop("event")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return line
    details = []
    for key, value in row.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        if text != "":
            details.append(f"{key} {text}")
    if details:
        words.append(f"({', '.join(details)})")
    return " ".join(words)
