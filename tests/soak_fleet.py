"""The quickstart with one server of its own and up to three that join and leave at
random.

    python -m tests.soak_fleet [--seconds 3600] [--between 60] [--folder
    runs/soak-fleet] [--seed 0] [--windows 6] [--enter …]

    window 0: two joined servers stay
    window 1: a join, SIGTERM or SIGKILL every `between` s
    window 2: as 0
    …         Ctrl-C

Checked in the end: every SIGTERM was obeyed with status 0 within its limit; each ticket
of the journal was trained in one step and none is missing. Measured: trained tokens per
core-second of all processes of run and servers, in either kind of window; what joining
servers spend until they have their first weights is not counted. FOLDER/fleet.json has
the figures. In a Slurm allocation whose nodes are this machine, `--enter "srun
--nodes=1 --ntasks=1 --overlap"` makes each server a step.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megarl.core import recipe as recipes
from megarl.core.base.rundir import latest_rows, write_atomically
from megarl.run.join import LEAVE_LIMIT_S
from tests.e2e import runs
from tests.e2e.runs import check_history, check_nothing_left, quiet
from tests.soak import OVERRIDES, prepare

LOOK_S = 1.0
MOST_JOINED = 3
STAYING = 2
LEAST_SHARE = 0.9
"""Tokens per core-second while servers come and go, by those of a fleet that stays."""


@dataclass
class JoinedServer:
    """A `megarl serve --join`. used: its core-seconds. began: whether it has had
    weights. killed: whether it was.
    """

    process: subprocess.Popen[bytes]
    output: Path
    used: float = 0.0
    began: bool = False
    killed: bool = False

    def id(self) -> int | None:
        words = self.output.read_text().partition("megarl: server ")[2].split()
        return int(words[0]) if words else None


@dataclass
class Fleet:
    """The run, its servers, and the core-seconds of each process that was ever seen."""

    folder: Path
    random: random.Random
    enter: list[str]
    joined: list[JoinedServer] = field(default_factory=list)
    cpu: dict[tuple[int, float], float] = field(default_factory=dict)
    starts: float = 0.0
    events: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        overrides = [
            word for word in OVERRIDES if not word.startswith(("run.name", "resources.servers"))
        ]
        self.run = runs.start(self.folder, "run.name=soak", "resources.servers=1", *overrides)

    def look(self) -> None:
        """Count what processes have used, note which servers have got their first
        weights, and drop those that have ended.
        """
        assert self.run.process.poll() is None, f"the run has ended:\n{self.run.tail()}"
        for process in self.run.family():
            self._used(process)
        status = (
            json.loads(self.run.rundir.status.read_text())
            if self.run.rundir.status.exists()
            else {"servers": []}
        )
        clean = {s["id"] for s in status["servers"] if s["state"] == "clean"}
        for server in self.joined:
            server.used = max(server.used, sum(self._used(p) for p in self._family(server)))
            if not server.began and (server.id() in clean or server.process.poll() is not None):
                server.began = True
                self.starts += server.used
        for server in [s for s in self.joined if s.process.poll() is not None]:
            self.joined.remove(server)
            if server.process.returncode not in (
                (-signal.SIGKILL, 128 + signal.SIGKILL) if server.killed else (0,)
            ):
                self.wrong.append(
                    f"a server ended with {server.process.returncode}:"
                    f" {server.output.read_text()[-500:]}"
                )

    def _used(self, process: psutil.Process) -> float:
        with suppress(psutil.Error):
            key = (process.pid, process.create_time())
            times = process.cpu_times()
            self.cpu[key] = times.user + times.system
            return self.cpu[key]
        return 0.0

    def _family(self, server: JoinedServer) -> list[psutil.Process]:
        """The server and all it has started, wherever it was started."""
        last = ["--index", str(server.id())]
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[-2:] == last and str(self.run.rundir.path.resolve()) in words:
                with suppress(psutil.Error):
                    return [process, *process.children(recursive=True)]
        return []

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self.look()
            time.sleep(LOOK_S)

    def join(self) -> None:
        self.count += 1
        output = self.folder / f"joined-{self.count}.out"
        command = [
            *self.enter,
            sys.executable,
            "-m",
            "megarl",
            "serve",
            "--join",
            str(self.run.rundir.path),
        ]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=quiet(), stdout=file, stderr=subprocess.STDOUT
            )
        self.joined.append(JoinedServer(process, output))

    def leave(self, kill: bool) -> None:
        """One of the joined ones is told to go, or killed: the command itself, not an
        srun around it, which would kill it.
        """
        server = self.random.choice(self.joined)
        server.killed = kill
        with suppress(psutil.Error):
            family = self._family(server)
            command = (family[0].parent() if family else None) or server.process
            command.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self.wait(LEAVE_LIMIT_S + 10, lambda: server.process.poll() is not None)
        if server.process.poll() is None:
            self.wrong.append(f"server {server.id()} has not left within {LEAVE_LIMIT_S + 10:g} s")
            server.process.kill()

    def event(self) -> None:
        """A join, a goodbye or, one time in four, a kill."""
        joins = not self.joined or (len(self.joined) < MOST_JOINED and self.random.random() < 0.5)
        kill = self.random.random() < 0.25
        self.join() if joins else self.leave(kill)
        self.events.append("join" if joins else "kill" if kill else "leave")
        print(f"{self.events[-1]}: {len(self.joined)} joined, step {self.run.steps()}", flush=True)

    def settle(self) -> None:
        """Until as many have joined as stay, and work."""
        while len(self.joined) > STAYING:
            self.leave(kill=False)
        while len(self.joined) < STAYING:
            self.join()
        self.wait(900, lambda: all(s.began for s in self.joined))

    def used(self) -> tuple[float, float]:
        """Tokens in trained batches, and core-seconds without starts, so far."""
        under_way = sum(s.used for s in self.joined if not s.began)
        tokens = sum(row["generated_tokens"] for row in latest_rows(self.run.rundir.metrics))
        return tokens, sum(self.cpu.values()) - self.starts - under_way


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak_fleet", description="servers that come and go"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, help="how long, without the first start (3600)"
    )
    parser.add_argument(
        "--between",
        type=float,
        default=60,
        help="seconds between joins and leaves, in the mean (60)",
    )
    parser.add_argument(
        "--windows", type=int, default=6, help="parts of it, quiet ones and others by turns (6)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak-fleet"), help="a new one (runs/soak-fleet)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--enter",
        default="",
        help="words before the command of a server, such as srun and its options",
    )
    options = parser.parse_args()
    prepare(options.folder)
    fleet = Fleet(options.folder.resolve(), random.Random(options.seed), options.enter.split())
    rates: dict[bool, list[float]] = {False: [], True: []}
    try:
        fleet.run.wait_for(lambda: fleet.run.steps() > 0, "the first step", 900)
        for window in range(options.windows):
            fleet.settle()
            changes = bool(window % 2)
            end = time.monotonic() + options.seconds / options.windows
            tokens, cores = fleet.used()
            while (left := end - time.monotonic()) > 0:
                fleet.wait(
                    min(left, options.between * fleet.random.uniform(0.5, 1.5)) if changes else left
                )
                if changes and time.monotonic() < end:
                    fleet.event()
            more, later = fleet.used()
            rates[changes].append((more - tokens) / (later - cores))
            print(f"window {window}: {rates[changes][-1]:.1f} tokens per core-second", flush=True)
        family = fleet.run.family()
        ports = fleet.run.ports()
        fleet.run.process.send_signal(signal.SIGINT)
        assert fleet.run.finish(600) == 130, fleet.run.tail()
        for server in fleet.joined:
            if server.process.wait(60) != 0:
                fleet.wrong.append(
                    f"at the run's end a server left with {server.process.returncode}"
                )
        check_nothing_left(family, ports)
    finally:
        fleet.run.kill()
        for server in fleet.joined:
            server.process.kill()
    summary = _summary(fleet, rates)
    write_atomically(options.folder / "fleet.json", json.dumps(summary, indent=2).encode() + b"\n")
    print(json.dumps(summary, indent=2))
    return 1 if summary["wrong"] else 0


def _summary(fleet: Fleet, rates: dict[bool, list[float]]) -> dict[str, Any]:
    rundir = fleet.run.rundir
    wrong = fleet.wrong
    steps = len(latest_rows(rundir.metrics))
    loaded = recipes.load(str(rundir.recipe))
    try:
        check_history(
            rundir,
            loaded.model_copy(update={"run": loaded.run.model_copy(update={"steps": steps})}),
        )
    except AssertionError as error:
        wrong.append(f"history: {error}")
    share = statistics.mean(rates[True]) / statistics.mean(rates[False])
    if share < LEAST_SHARE:
        wrong.append(f"{share:.2f} of the tokens per core-second of a fleet that stays")
    return {
        "steps": steps,
        "groups": steps * loaded.batch.prompts,
        "events": {name: fleet.events.count(name) for name in ("join", "leave", "kill")},
        "core_seconds_of_starts": round(fleet.starts),
        "tokens_per_core_second_quiet": [round(rate, 1) for rate in rates[False]],
        "tokens_per_core_second_changing": [round(rate, 1) for rate in rates[True]],
        "share": round(share, 3),
        "wrong": wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
