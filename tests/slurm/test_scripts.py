"""The other shipped scripts, one after the other as a user has them: warm start, a run of experts, conversion, evaluation."""

import json
import re
import subprocess
import sys

import pytest

from megarl.rundir import complete
from tests.slurm.jobs import SMALL, Job, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

ONE = ("--nodes=1",)


def completed(job: Job) -> str:
    job.wait_for_state("COMPLETED")
    return job.output.read_text()


def test_warm_start_experts_conversion_evaluation(jobs: Jobs) -> None:
    words = ("sft.steps=60", "sft.checkpoint_every=10")
    job = jobs.submit("sft.sbatch", *words, options=ONE, RECIPE="quickstart-moe")
    job.wait_for(lambda: bool(complete(jobs.cwd / "runs/quickstart-moe-sft.unfinished")), "a checkpoint")
    jobs.cluster.says("scancel", "--batch", "--signal=USR1", job.number)
    output = completed(job)
    assert jobs.cluster.field(job.number, "Restarts") == "1"
    saved = re.search(r"saved after step (\d+) of 60", output)
    assert saved is not None, output
    assert f"in steps {int(saved[1]) + 1} to 60" in output
    assert (jobs.cwd / "runs/quickstart-moe-sft/config.json").exists()

    words = ("run.name=experts", "run.steps=3", *SMALL)
    completed(jobs.submit("scalerl_17bx16.sbatch", *words, options=("--nodes=2",), RECIPE="quickstart-moe"))
    rundir = jobs.cwd / "runs" / "experts"
    assert json.loads((rundir / "summary.json").read_text())["steps"] == 3

    completed(jobs.submit("convert.sbatch", options=ONE, FROM="runs/experts", TO="exported"))
    verify = (sys.executable, "-m", "checkpoints_tools", "verify", "runs/experts", "exported", "--logits", "2")
    same = subprocess.run(verify, cwd=jobs.cwd, capture_output=True, text=True, timeout=300)
    assert same.returncode == 0, same.stdout + same.stderr

    more = ("--out", "scored", "--samples", "2", "--limit", "10")
    completed(jobs.submit("eval.sbatch", *more, options=ONE, MODEL="runs/experts", SUITE="arithmetic"))
    answers = (jobs.cwd / "scored" / "arithmetic" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 20
