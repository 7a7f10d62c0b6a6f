"""`make soak`: the quickstart with two servers for hours, and a fault of one role every
few minutes.

    python -m tests.soak [--seconds 7200] [--between 180] [--folder runs/soak] [--seed
    0]

    start ──► a random fault (FAULTS) ──► the next step is trained ──► … ──► Ctrl-C
                    every 5 s: memory of each role, zombies
          ──► checks ──► FOLDER/soak.json, and a table

Checked in the end: the pass rate has risen; memory of no role has grown; nobody was a
zombie for longer than a moment; each ticket of the journal was trained in one step,
none is missing, and replayed steps were the same bit for bit.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megarl.core import recipe as recipes
from megarl.core.base.rundir import latest_rows, read_jsonl, write_atomically
from tests.e2e import runs
from tests.e2e.runs import LiveRun, check_history, check_nothing_left

LOOK_S = 5.0
RECOVERY_LIMIT_S = 900.0
GROWTH = 1.15
"""Largest growth of a role's memory from the second quarter of its samples, when caches
are full, to the last.
"""
SETTLED_S = 60.0
"""A role that is younger is still loading: it is not counted."""
OVERRIDES = (
    "run.name=soak",
    "run.steps=100000",
    "resources.servers=2",
    "serving.kv_tokens=32768",
    "evaluation.every=20",
    "evaluation.prompts=80",
    "checkpoint.every=10",
    "run.resume=auto",
)


class Soak:
    """One run, over all lives of its supervisor."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.run = self.start()
        self.began = time.monotonic()
        self.memory: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.zombies: set[int] = set()
        self.lasting_zombies: list[str] = []
        self.faults: list[dict[str, Any]] = []

    def start(self) -> LiveRun:
        return runs.start(self.folder, *OVERRIDES)

    def wait(self, seconds: float) -> None:
        """Look now and then."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(min(LOOK_S, max(0.0, end - time.monotonic())))

    def look(self) -> None:
        """Memory of each role with all it has started, and who is a zombie for the
        second time.
        """
        assert self.run.process.poll() is None, f"the run has ended:\n{self.run.tail()}"
        now = time.monotonic() - self.began
        zombies = set()
        for name, leader in self.leaders().items():
            try:
                if time.time() - leader.create_time() > SETTLED_S:
                    family = [leader, *leader.children(recursive=True)]
                    self.memory[name].append(
                        (now, sum(process.memory_info().rss for process in family))
                    )
            except psutil.NoSuchProcess:
                continue
        for process in self.run.family():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    zombies.add(process.pid)
                    if process.pid in self.zombies:
                        self.lasting_zombies.append(
                            f"{process.pid} {process.name()} at {now:.0f} s"
                        )
            except psutil.NoSuchProcess:
                continue
        self.zombies = zombies

    def leaders(self) -> dict[str, psutil.Process]:
        """Roles that live, by name, and the supervisor."""
        found = {"supervisor": psutil.Process(self.run.process.pid)}
        for child in found["supervisor"].children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "serve" in words:
                found[f"server-{words[words.index('--index') + 1]}"] = child
            elif "rollout" in words or "learn" in words:
                found["controller" if "rollout" in words else "learner"] = child
        return found

    def fault(self) -> None:
        """One, drawn at random; until who it hit is replaced and the run has trained
        another step.
        """
        name, action = self.random.choice(FAULTS)
        self.run.wait_for(lambda: len(self.leaders()) == 5, "all roles", RECOVERY_LIMIT_S)
        steps = self.trained()
        began = time.monotonic()
        victim = action(self)
        self.run.wait_for(
            lambda: not victim.is_running(), f"the end of its victim: {name}", RECOVERY_LIMIT_S
        )
        self.run.wait_for(
            lambda: len(self.leaders()) == 5, f"all roles after: {name}", RECOVERY_LIMIT_S
        )
        again = self.trained()
        self.run.wait_for(lambda: self.trained() > again, f"a step after: {name}", RECOVERY_LIMIT_S)
        seconds = time.monotonic() - began
        self.faults.append(
            {
                "at": round(began - self.began),
                "fault": name,
                "step": steps,
                "seconds": round(seconds, 1),
            }
        )
        print(
            f"{began - self.began:7.0f} s  step {steps:5}  {name}: a new step and all roles after"
            f" {seconds:.0f} s",
            flush=True,
        )

    def trained(self) -> int:
        """Steps that were made so far and are not to be made again."""
        return max((row["step"] for row in read_jsonl(self.run.rundir.metrics)), default=-1) + 1

    def end(self) -> None:
        """As a user ends it."""
        family = self.run.family()
        ports = self.run.ports()
        self.run.process.send_signal(signal.SIGINT)
        assert self.run.finish(600) == 130, self.run.tail()
        check_nothing_left(family, ports)

    def summary(self) -> dict[str, Any]:
        """What was seen, and what was wrong with it."""
        rundir = self.run.rundir
        steps = len(latest_rows(rundir.metrics))
        loaded = recipes.load(str(rundir.recipe))
        recipe = loaded.model_copy(update={"run": loaded.run.model_copy(update={"steps": steps})})
        scores = [row["pass_rate"] for row in latest_rows(rundir.eval)]
        growth = {
            name: round(grown([size for _, size in samples]), 3)
            for name, samples in self.memory.items()
        }
        wrong = [f"{name} grew to {by} of its size" for name, by in growth.items() if by > GROWTH]
        wrong += [f"zombie {which}" for which in self.lasting_zombies]
        third = max(1, len(scores) // 3)
        before = statistics.mean(scores[:third])
        after = statistics.mean(scores[-third:])
        if not after > before:
            wrong.append(f"the pass rate went from {before:.3f} to {after:.3f}")
        try:
            check_history(rundir, recipe)
        except AssertionError as error:
            wrong.append(f"history: {error}")
        return {
            "seconds": round(time.monotonic() - self.began),
            "steps": steps,
            "groups": steps * recipe.batch.prompts,
            "replayed_steps": len(list(read_jsonl(rundir.metrics))) - steps,
            "pass_rates": [round(score, 3) for score in scores],
            "memory_growth": growth,
            "faults": self.faults,
            "wrong": wrong,
        }


Fault = Callable[[Soak], psutil.Process]
"""Does it, and says who will have to be replaced."""


def kill(role: str, sig: signal.Signals = signal.SIGKILL) -> Fault:
    def act(soak: Soak) -> psutil.Process:
        victim = soak.leaders()[f"server-{soak.random.randrange(2)}" if role == "server" else role]
        victim.send_signal(sig)
        return victim

    return act


def kill_child(soak: Soak) -> psutil.Process:
    """One of the processes that a server has started."""
    server = soak.leaders()[f"server-{soak.random.randrange(2)}"]
    soak.random.choice(server.children(recursive=True)).kill()
    return server


def kill_supervisor(soak: Soak) -> psutil.Process:
    family = soak.run.family()
    ports = soak.run.ports()
    soak.run.kill()
    check_nothing_left(family, ports)
    soak.run = soak.start()
    return family[0]


FAULTS: list[tuple[str, Fault]] = [
    ("server killed", kill("server")),
    ("server stopped (SIGSTOP)", kill("server", signal.SIGSTOP)),
    ("a process of a server killed", kill_child),
    ("controller killed", kill("controller")),
    ("learner killed", kill("learner")),
    ("supervisor killed, run resumed", kill_supervisor),
]


def grown(sizes: list[int]) -> float:
    """The last quarter's median by the second quarter's; 1 for too few samples."""
    quarter = len(sizes) // 4
    if quarter < 5:
        return 1.0
    return statistics.median(sizes[-quarter:]) / statistics.median(sizes[quarter : 2 * quarter])


def prepare(folder: Path) -> None:
    """Data and a warm start, as the quickstart makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    for words in (
        ("data", "arithmetic", "runs/quickstart-data"),
        ("sft", "quickstart", "sft.steps=200"),
    ):
        made = runs.megarl(*words, cwd=folder, limit_s=900)
        assert made.returncode == 0, made.stderr


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="a run with faults, for hours"
    )
    parser.add_argument("--seconds", type=float, default=7200, help="how long (7200)")
    parser.add_argument(
        "--between", type=float, default=180, help="seconds between faults, in the mean (180)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak"), help="a new one (runs/soak)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(options.folder)
    soak = Soak(options.folder.resolve(), options.seed)
    try:
        soak.run.wait_for(lambda: soak.trained() > 0, "the first step", RECOVERY_LIMIT_S)
        while (left := options.seconds - (time.monotonic() - soak.began)) > 0:
            soak.wait(min(left, options.between * soak.random.uniform(0.5, 1.5)))
            if time.monotonic() - soak.began < options.seconds:
                soak.fault()
        soak.end()
    finally:
        soak.run.kill()
    summary = soak.summary()
    write_atomically(options.folder / "soak.json", json.dumps(summary, indent=2).encode() + b"\n")
    print(
        json.dumps({name: value for name, value in summary.items() if name != "faults"}, indent=2)
    )
    return 1 if summary["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
