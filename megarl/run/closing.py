"""The end of a run: summary and report on disk, and information for the user on the
screen.

The causes of a failure come last, where the user looks first: a table of roles that
died, then the end of the relevant log.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import Row, RunDir, write_atomically
from megarl.core.recipe import Recipe
from megarl.run import summary
from megarl.run.logs import last_lines, log_of
from megarl.run.restart import Role

MOST_DEATHS_SHOWN = 20
WriteReport = Callable[[RunDir], None]
"""Writes RUN/report.html and RUN/reward.png."""


@dataclass(frozen=True)
class RunEnd:
    """How the run ended: all steps done, stopped on request, to be resumed elsewhere,
    or failed. role: whose log says why.
    """

    kind: Literal["finished", "stopped", "elsewhere", "failed"]
    reason: str
    role: Role | None = None


@dataclass(frozen=True)
class Death:
    """A role's abnormal end. time: since the epoch; ending: what it did, as text;
    problem: the last line of its log that looks like a problem.
    """

    role: Role
    nodes: Sequence[str]
    time: float
    ending: str
    problem: str


def closing(
    console: Console,
    recipe: Recipe,
    rundir: RunDir,
    outcome: RunEnd,
    deaths: Sequence[Death],
    log_offsets: Mapping[Path, int],
    wall_s: float,
    write_report: WriteReport | None,
) -> None:
    """Write summary and report; show how the run ended. log_offsets: as in `log_of`.
    write_report: None if its job must end soon.
    """
    values: Row = {}
    with _attempt(rundir.summary):
        values = summary.summarise(recipe, rundir) | {
            # a run that goes on elsewhere is stopped until then
            "outcome": "stopped" if outcome.kind == "elsewhere" else outcome.kind,
            "reason": outcome.reason,
            "wall_seconds": round(wall_s, 1),
        }
        write_atomically(rundir.summary, json.dumps(values, indent=2).encode())
    if write_report is not None:
        with _attempt(rundir.report):
            write_report(rundir)
    with suppress(OSError, MegarlError):  # an unreadable file must not change the exit status
        if values:
            console.print(summary.render(values, rundir))
        if deaths and outcome.kind in ("failed", "elsewhere"):
            console.print(causes(deaths))
        if outcome.role:
            _show_log(log_of(rundir, outcome.role, log_offsets), log_offsets)
    if outcome.kind == "failed":
        terminal.say(f"\nmegarl: {outcome.reason}; see {rundir.logs}", file=sys.stderr)
    elif outcome.kind == "elsewhere":
        terminal.say(
            f"\nmegarl: {outcome.reason}; its checkpoint is kept; start it again on other nodes",
            file=sys.stderr,
        )


def _show_log(log: Path | None, log_offsets: Mapping[Path, int]) -> None:
    """Print the end of the log that says why the run ended, if any."""
    if log is not None:
        lines = map(terminal.uncoloured, last_lines(log, start=log_offsets.get(log, 0)))
        terminal.say(f"\nThe end of {log}:", *lines, sep="\n  ", file=sys.stderr)


@contextmanager
def _attempt(path: Path) -> Iterator[None]:
    """Report any error on stderr and go on: the run is over, and its exit status
    decides whether its job is requeued.
    """
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, MegarlError) else repr(error)
        terminal.say(f"megarl: {path} was not written: {reason}", file=sys.stderr)


def causes(deaths: Sequence[Death]) -> Table:
    """Return a table of the roles that died: when, where and how, and the last problem
    in each log.
    """
    hidden = len(deaths) - MOST_DEATHS_SHOWN
    title = "what died"
    if hidden > 0:
        title = f"what died last ({hidden} before that are in logs/supervisor.jsonl)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for name in ("when", "role", "node", "how"):
        table.add_column(name, no_wrap=True)
    table.add_column("the last problem in its log", overflow="fold")
    for death in deaths[-MOST_DEATHS_SHOWN:]:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(death.time))
        nodes = ",".join(death.nodes)
        table.add_row(at, death.role.name, nodes, death.ending, death.problem or "none")
    return table


def ending_of(status: int) -> str:
    """Return how a role ended, by its exit status. Real-time signals have no name."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
