"""Jobs of the shipped scripts with a tiny recipe, and what can be asked of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megarl.core import recipe as recipes
from megarl.core.base.rundir import RunDir, latest_rows, read_jsonl
from tests.slurm.cluster import Cluster

START_LIMIT_S = 400.0
RUN_LIMIT_S = 500.0
END_LIMIT_S = 120.0
SMALL = (
    "resources.servers=2",
    "evaluation.every=100",
    "evaluation.prompts=20",
    "evaluation.samples=2",
    "checkpoint.every=4",
    "batch.prompts=12",
)


@dataclass
class Jobs:
    """The jobs of one test."""

    cluster: Cluster
    cwd: Path
    environment: dict[str, str]
    numbers: list[str] = field(default_factory=list)

    def submit(
        self, script: str, *words: str, options: tuple[str, ...] = (), **environment: str
    ) -> "Job":
        """A script of launch/slurm, cut down to nodes without GPUs."""
        output = self.cwd / f"slurm-{time.monotonic_ns()}.out"
        options = ("--gpus-per-node=0", "--time=60", f"--output={output}", *options)
        number = self.cluster.submit(
            *options,
            f"launch/slurm/{script}",
            *words,
            cwd=self.cwd,
            environment=self.environment | environment,
        )
        self.numbers.append(number)
        return Job(self.cluster, self.cwd, number, output)

    def train(self, name: str, *overrides: str, nodes: int = 2) -> "Job":
        """The quickstart by the 8B script, for a recipe of two servers and one learner
        rank.
        """
        words = (f"run.name={name}", *SMALL, *overrides)
        job = self.submit(
            "scalerl_8b.sbatch", *words, options=(f"--nodes={nodes}",), RECIPE="quickstart"
        )
        job.rundir = RunDir(self.cwd / "runs" / name)
        return job

    def cancel(self) -> None:
        self.cluster.revive()
        for number in self.numbers:
            self.cluster.says("scancel", "--full", number)
        self.cluster.wait_for(
            lambda: not self.cluster.says("squeue", "-h"), "empty queue", END_LIMIT_S
        )


@dataclass
class Job:
    cluster: Cluster
    cwd: Path
    number: str
    output: Path
    rundir: RunDir = field(default_factory=lambda: RunDir(Path()))

    @property
    def recipe(self) -> recipes.Recipe:
        return recipes.load(str(self.rundir.recipe))

    def steps(self) -> int:
        return len(latest_rows(self.rundir.metrics))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_jsonl(self.rundir.logs / "supervisor.jsonl") if e["event"] == name]

    def processes(self) -> list[psutil.Process]:
        """Processes of the run on any node: command lines of roles and their parents
        name its folder.
        """
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(self.rundir.path.name in word for word in process.info["cmdline"] or []):
                found.append(process)
        return found

    def role(self, kind: str, index: int = 0) -> psutil.Process:
        """The process that the step's agent has started."""
        found = self.roles(kind, index)
        assert found, f"no process of {kind} {index}"
        return found[0]

    def roles(self, kind: str, index: int = 0) -> list[psutil.Process]:
        """Those of all nodes of the step, without their forks."""
        found = {}
        for process in self.processes():
            words = process.info["cmdline"]
            if words[1:4] == ["-m", "megarl", kind] and (
                kind != "serve" or words[-3] == str(index)
            ):
                found[process.pid] = process
        return [process for process in found.values() if process.ppid() not in found]

    def take_down(self, node: str, down: list[str]) -> None:
        """Slurm takes it from the job, as if it had died."""
        down.append(node)
        self.cluster.says("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def wait_for(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float = RUN_LIMIT_S,
        fails: bool = False,
    ) -> None:
        """Until it holds. fails: whether the job may."""
        logs = [self.output, *self.rundir.logs.glob("*/*.log")]

        def fulfilled() -> bool:
            return condition() or (
                not fails and self.cluster.state(self.number) == "FAILED" and self._failed(what)
            )

        self.cluster.wait_for(fulfilled, what, limit_s, logs)

    def _failed(self, what: str) -> bool:
        raise AssertionError(f"the job failed before {what}:\n{self.output.read_text()}")

    def wait_for_state(self, state: str, limit_s: float = RUN_LIMIT_S, fails: bool = False) -> None:
        self.wait_for(lambda: self.cluster.state(self.number) == state, state, limit_s, fails)
