"""`megarl logs RUN --role …`: print the end of a role's logs, and follow them.

server, learner, controller: all of that kind      server-3, learner-0: one      supervisor: starts, ends and restarts
"""

import json
import time
from pathlib import Path

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.run.observe import TAIL_BYTES, Tail, last_lines

LOOK_S = 0.5
KINDS = ("server", "learner", "controller")


def main(run: Path, role: str, count: int, follow: bool) -> int:
    """Print the last `count` lines of each file; with `follow`, go on until the run has
    ended.
    """
    rundir = RunDir.opened(run)
    tails: dict[Path, Tail] = {}
    begin = -count
    while True:
        ended = rundir.summary.exists()
        files = logs_of(rundir, role)
        if not files and not follow:
            raise MegarlError(f"{rundir.logs}: no log of {role} yet")
        for file in files:
            if file not in tails:
                tails[file] = Tail(file, max(0, file.stat().st_size - TAIL_BYTES) if begin else 0)
            lines = tails[file].lines()[begin:] if follow else last_lines(file, count)
            where = f"{file.parent.name} {file.stem}: " if len(files) > 1 else ""
            for line in lines:
                shown = (
                    sentence(line) if file.suffix == ".jsonl" else where + terminal.uncoloured(line)
                )
                terminal.say(shown, flush=True)
        if ended or not follow:
            return 0
        begin = 0
        time.sleep(LOOK_S)


def logs_of(rundir: RunDir, role: str) -> list[Path]:
    """Return the role's existing log files, the most recently written one last.
    MegarlError for an unknown role.
    """
    kind, _, index = role.partition("-")
    if role == "supervisor":
        files = [rundir.supervisor]
    elif kind in KINDS and (not index or (index.isdecimal() and kind != "controller")):
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
        row = json.loads(line)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.pop("time")))
        row.pop("session")
        words = [when, row.pop("role", "run"), row.pop("event")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return line
    told = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
    details = [f"{k} {v}" for k, v in told.items() if v != ""]
    return " ".join([*words, *([f"({', '.join(details)})"] if details else [])])
