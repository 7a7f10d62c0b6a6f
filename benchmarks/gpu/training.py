"""Runs `megarl train` with serving.py's recipe, in a process of its own."""

import subprocess
import sys
import time

import psutil

from benchmarks.gpu.process import ends_of_logs
from megarl.core import recipe as recipes
from megarl.core.base.rundir import Row, RunDir, complete, latest_rows
from megarl.core.recipe import Recipe
from megarl.run.process import adopt_orphans

POLL_S = 0.2
GONE_LIMIT_S = 60


class Training:
    """One life of a run. All its processes end with its part."""

    def __init__(self, recipe: Recipe, resume: bool = False) -> None:
        # not every machine has a process 1 that asks for their status, and `kill` waits
        # for them
        adopt_orphans()
        self.rundir = RunDir(recipe.run.path)
        given = self.rundir.path.with_suffix(".yaml")
        given.write_text(recipes.dump(recipe))
        words = [
            sys.executable,
            "-m",
            "megarl",
            "train",
            str(given),
            *(["run.resume=auto"] if resume else []),
        ]
        self.process = subprocess.Popen(words, cwd=given.parent, stdin=subprocess.DEVNULL)

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl by step."""
        return latest_rows(self.rundir.metrics) if self.rundir.metrics.exists() else []

    def wait_for(self, steps: int, saved: bool = False) -> float:
        """Wait until `steps` steps are trained and, if `saved`, a checkpoint is
        complete; return time.monotonic() then.
        """
        while len(self.rows()) < steps or (saved and not complete(self.rundir.checkpoints)):
            if self.process.poll() is not None:
                raise self.failed()
            time.sleep(POLL_S)
        return time.monotonic()

    def kill(self) -> None:
        """Send SIGKILL to the supervisor, and wait until all processes that it started
        are gone.
        """
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(family, GONE_LIMIT_S)
        if left:
            raise RuntimeError(f"{GONE_LIMIT_S} s after its supervisor was killed: {left}")

    def failed(self) -> RuntimeError:
        print(ends_of_logs(self.rundir.logs))
        failure = self.rundir.failure_file
        why = failure.read_text().strip() if failure.exists() else "its log says why"
        return RuntimeError(
            f"megarl train ended with status {self.process.returncode} at step {len(self.rows())}:"
            f" {why}"
        )
