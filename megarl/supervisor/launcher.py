"""How a role is started and ended. `Launcher` is the seam; `LocalLauncher` makes processes of this machine.

Each role leads a session of its own: Ctrl-C in the terminal reaches the supervisor alone, and `kill` reaches all the
role's processes by its group. Roles end with the supervisor however it ends (`megarl.process.die_with_supervisor`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from megarl.process import SUPERVISOR
from megarl.recipe import Recipe
from megarl.supervisor.restart import Role

KILL_LIMIT_S = 30.0
"""A killed process that is not gone by then hangs in the kernel (a driver); nothing more can be done from here."""
COMMANDS = {"server": "serve", "controller": "rollout", "learner": "learn"}


@dataclass(frozen=True)
class Task:
    """What is run for a role: arguments, variables that differ from ours (None: unset), and its log (appended to)."""

    role: Role
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None]
    log: Path


class Running(Protocol):
    """A role that was started."""

    pid: int
    started: float  # time.monotonic()

    def status(self) -> int | None:
        """None while it runs, then its exit status, or minus the signal."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it and all it started, now. Also clears up what a dead one left behind."""


class Launcher(Protocol):
    def start(self, task: Task) -> Running: ...


def task(
    recipe: Recipe,
    resolved: Path,
    role: Role,
    port: int,
    devices: Sequence[str],
    logs: Path,
    python: str = sys.executable,
) -> Task:
    """The role on the resolved recipe. `port` is for servers."""
    arguments = [python, "-m", "megarl", COMMANDS[role.kind], str(resolved)]
    if role.kind == "server":
        arguments += ["--index", str(role.index), "--port", str(port)]
    threads = "1" if role.kind == "controller" else str(recipe.resources.threads)
    environment: dict[str, str | None] = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": None,  # or every role compiles all it imports, at each start
    }
    return Task(role, tuple(arguments), environment, logs / f"{role.name}.log")


class LocalLauncher:
    """Processes of this machine. Call `start` from a thread that lives as long as the roles: they die with it."""

    def start(self, task: Task) -> "LocalProcess":
        environment = dict(os.environ) | {k: v for k, v in task.environment.items() if v is not None}
        for name in [k for k, v in task.environment.items() if v is None]:
            environment.pop(name, None)
        environment[SUPERVISOR] = str(os.getpid())
        with task.log.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(task.arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                task.arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalProcess(process)


class LocalProcess:
    """A session leader and what it has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.started = time.monotonic()

    def status(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the group's number stays taken while any of it lives
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_LIMIT_S)


def sweep(mine: Sequence[int] = ()) -> list[int]:
    """Kill and reap every child and grandchild except the processes `mine` and what they started; their ids.

    Catches what left its role's session: orphans are our children (`megarl.process.adopt_orphans`).
    """
    family = [
        p for child in psutil.Process().children() if child.pid not in mine for p in (child, *_descendants(child))
    ]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=KILL_LIMIT_S)
    return [process.pid for process in family]


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
