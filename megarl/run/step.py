"""Runs in a step of a Slurm job: starts the role with the local launcher, and acts for
the supervisor on the node.

    supervisor ── stdin ──► srun ──► "terminate" ──► SIGTERM to the role
                                     "heard": a report has arrived
    supervisor ◄─ stdout ── srun ◄── Report, a line of JSON: every BEAT_S, and when the
                                     role has ended

The whole role is killed when stdin ends (the supervisor has died), or after UNANSWERED
unacknowledged reports in a row: srun, slurmd or the network between them is gone, and
Slurm may be unable to end the step. The supervisor gives up such a step a little later
(watch.py), so that a role never runs twice.

Slurm carries both streams, so no port is opened and nobody else can listen. The role's
own output goes to its log.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from megarl.core.base.rundir import RunDir
from megarl.run.launcher import LocalLauncher, LocalProcess, RoleCommand
from megarl.run.process import adopt_orphans

BEAT_S = 5.0
TICK_S = 0.2
UNANSWERED = 8
"""A count, not a time: after a suspension by Slurm the last answer is old, but the
supervisor is alive.
"""
STDIN = 0
TERMINATE = b"terminate"
HEARD = b"heard"


class Report(msgspec.Struct, kw_only=True):
    """A report from one node of a step. stopped: a process of the role is stopped.
    status: set once the role has ended.
    """

    node: str
    stopped: bool = False
    status: int | None = None


def encoded(task: RoleCommand) -> str:
    """Encode the task as the argument of `main`, without its nodes' GPUs and ports:
    with them, the task of a large run exceeds the 128 KiB of an argument.
    """
    nodes = tuple(replace(node, gpus=(), ports=()) for node in task.place.nodes)
    task = replace(task, place=replace(task.place, nodes=nodes))
    return msgspec.json.encode(task, enc_hook=lambda rundir: str(rundir.path)).decode()


def place_of(name: str, task: RoleCommand) -> int:
    """Return the place of the node `name` among those of the role. SLURM_PROCID can be
    another number: Slurm sorts the nodes of a job by name, and those of a step as its
    configuration or the network's topology does.
    """
    return [node.name for node in task.place.nodes].index(name)


class Orders(threading.Thread):
    """A thread that reads the supervisor's words from stdin."""

    def __init__(self, process: LocalProcess) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._ended = False
        self.unanswered = 0

    @property
    def are_over(self) -> bool:
        """Whether the supervisor has ended, or nobody answers."""
        return self._ended or self.unanswered >= UNANSWERED

    def run(self) -> None:
        """Read until stdin ends. It is read by its number: a thread blocked in a file
        object would keep Python from exiting.
        """
        unfinished = b""
        while data := os.read(STDIN, 1024):
            *words, unfinished = (unfinished + data).split(b"\n")
            self.unanswered = 0
            if TERMINATE in words:
                self._process.terminate()
        self._ended = True


def main(argument: str) -> int:
    """Run until the role or the supervisor has ended. Return the role's exit status, of
    a role that a signal ended 128 plus its number. argument: as `encoded` makes it.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # Ignore Slurm's signals, but not by SIG_IGN, which the role would inherit.
        signal.signal(number, lambda *_: None)
    # a RunDir is encoded as its path
    task = msgspec.json.decode(
        argument, type=RoleCommand, dec_hook=lambda _, path: RunDir(Path(path))
    )
    n = place_of(os.environ["SLURMD_NODENAME"], task)
    adopt_orphans()
    launcher = LocalLauncher()
    process = launcher.start(task, n)
    if not task.role.serves:  # learner and controller save on a signal
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: process.signal(number))
    orders = Orders(process)
    orders.start()
    node = task.place.nodes[n].name
    next_report = 0.0
    while (status := process.status()) is None and not orders.are_over:
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + BEAT_S
            orders.unanswered += 1
            _say(Report(node=node, stopped=process.why_stuck() is not None))
        time.sleep(TICK_S)
    process.kill()
    process.wait_gone()
    launcher.sweep([])
    if status is None:
        status = -signal.SIGKILL
    _say(Report(node=node, status=status))
    return 128 - status if status < 0 else status


def _say(report: Report) -> None:
    """Send a report to the supervisor."""
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
