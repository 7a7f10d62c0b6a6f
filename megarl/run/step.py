"""In a step of a Slurm job, on its node: starts the role as the local launcher does, and is the supervisor's hand there.

    supervisor ── stdin ──► srun ──► "terminate" ──► the role's SIGTERM; "heard" ──► its report has arrived
    supervisor ◄─ stdout ── srun ◄── Report, a line of JSON: each BEAT_S, and when the role has ended

All of the role gets SIGKILL when that stdin ends (the supervisor has died) and when UNANSWERED reports in a row were not
heard: srun, slurmd or the network between is gone, and Slurm may not be able to end the step. The supervisor gives such a
step up a little later (watch.py), so that there are never two of a role.

Slurm carries both, so there is no port to open and nobody else to listen. The role's own output goes to its log.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from megarl.core.base.process import adopt_orphans
from megarl.core.base.rundir import RunDir
from megarl.run.launcher import LocalLauncher, LocalProcess, Task
from megarl.run.nodes import Node
from megarl.run.placement import Place
from megarl.run.restart import Role

BEAT_S = 5.0
TICK_S = 0.2
UNANSWERED = 8
"""Counted and not timed: a step that Slurm suspends has old answers and a living supervisor."""
STDIN = 0
TERMINATE, HEARD = b"terminate", b"heard"


class Report(msgspec.Struct, kw_only=True):
    """Of one node of a step. status: of the role, once it has ended; stopped: one of its processes is."""

    node: str
    stopped: bool = False
    status: int | None = None


class Order(msgspec.Struct, kw_only=True):
    """A Task, as an argument."""

    role: Role
    arguments: tuple[str, ...]
    environment: dict[str, str | None]
    place: Place
    run: str

    @staticmethod
    def of(task: Task) -> "Order":
        return Order(
            role=task.role,
            arguments=task.arguments,
            environment=dict(task.environment),
            place=task.place,
            run=str(task.rundir.path),
        )

    def task(self, node: Node) -> Task:
        """As it is on `node`: with the interface that its process groups are to use."""
        interface = {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface}
        return Task(self.role, self.arguments, self.environment | interface, self.place, RunDir(Path(self.run)))


class Orders(threading.Thread):
    """What the supervisor says."""

    def __init__(self, process: LocalProcess) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._ended = False
        self.unanswered = 0

    @property
    def gone(self) -> bool:
        """Whether there is nobody any more who does."""
        return self._ended or self.unanswered >= UNANSWERED

    def run(self) -> None:
        rest = b""
        while said := os.read(STDIN, 1024):  # no file object: a thread that waits in one keeps Python from ending
            *words, rest = (rest + said).split(b"\n")
            self.unanswered = 0
            if TERMINATE in words:
                self._process.terminate()
        self._ended = True


def main(argument: str) -> int:
    """Until the role has ended, or the supervisor has; the role's status as a shell gives it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, _pass)
    order = msgspec.json.decode(argument, type=Order)
    n = int(os.environ["SLURM_PROCID"])
    node = order.place.nodes[n]
    adopt_orphans()
    launcher = LocalLauncher()
    process = launcher.start(order.task(node), n)
    if order.role.kind != "server":  # learner and controller save
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: process.signal(number))
    orders = Orders(process)
    orders.start()
    due = 0.0
    while (status := process.status()) is None and not orders.gone:
        if time.monotonic() >= due:
            due = time.monotonic() + BEAT_S
            orders.unanswered += 1
            _say(Report(node=node.name, stopped=process.still() is not None))
        time.sleep(TICK_S)
    process.kill()
    process.wait_gone()
    launcher.sweep([])
    status = -signal.SIGKILL if status is None else status
    _say(Report(node=node.name, status=status))
    return 128 - status if status < 0 else status


def _pass(_number: int, _frame: object) -> None:
    """A handler, not SIG_IGN, which the role would inherit. Slurm's own signals reach all of a step, or this process alone
    (proctrack/cgroup)."""


def _say(report: Report) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
