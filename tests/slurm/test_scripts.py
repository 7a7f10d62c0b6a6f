"""The other shipped scripts, one after the other as a user has them: warm start, a run
of experts, conversion, evaluation.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest

from megarl.core.base.rundir import complete, read_jsonl, step_of
from tests.slurm.jobs import SMALL, Job, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1200)]

ONE = ("--nodes=1",)


def completed(job: Job) -> str:
    job.wait_for_state("COMPLETED")
    return job.output.read_text()


def test_warm_start_experts_conversion_evaluation(jobs: Jobs) -> None:
    for name in (
        "runs/quickstart-moe-sft",
        "runs/quickstart-moe-sft.unfinished",
        "runs/experts",
        "exported",
        "scored",
    ):
        shutil.rmtree(jobs.cwd / name, ignore_errors=True)  # of a first try
    words = ("sft.steps=150", "checkpoint.every=10")
    job = jobs.submit("sft.sbatch", *words, options=ONE, RECIPE="quickstart-moe")
    saved = [0]
    for told in (("--batch", "--signal=USR1"), ("--batch", "--signal=TERM"), ("--signal=TERM",)):
        kept = jobs.cwd / "runs/quickstart-moe-sft.unfinished"
        job.wait_for(lambda: [step_of(p) for p in complete(kept)][-1:] > saved[-1:], "a checkpoint")  # noqa: B023
        jobs.cluster.says("scancel", *told, job.number)
        restarts = str(len(saved))
        job.wait_for(lambda: jobs.cluster.field(job.number, "Restarts") == restarts, "requeue")  # noqa: B023
        found = re.findall(r"saved after step (\d+) of 150", job.output.read_text())
        assert len(found) == len(saved), job.output.read_text()
        saved.append(int(found[-1]))
    assert saved == sorted(set(saved))
    assert f"in steps {saved[-1] + 1} to 150" in completed(job)
    assert (jobs.cwd / "runs/quickstart-moe-sft/config.json").exists()

    experts = ("run.name=experts", "run.steps=3", *SMALL)
    completed(
        jobs.submit(
            "scalerl_17bx16.sbatch", *experts, options=("--nodes=2",), RECIPE="quickstart-moe"
        )
    )
    rundir = jobs.cwd / "runs" / "experts"
    assert json.loads((rundir / "summary.json").read_text())["steps"] == 3

    completed(jobs.submit("convert.sbatch", options=ONE, FROM="runs/experts", TO="exported"))
    verify = (
        sys.executable,
        "-m",
        "checkpoints_tools",
        "verify",
        "runs/experts",
        "exported",
        "--logits",
        "2",
    )
    same = subprocess.run(verify, cwd=jobs.cwd, capture_output=True, text=True, timeout=300)
    assert same.returncode == 0, same.stdout + same.stderr

    more = ("--out", "scored", "--samples", "16", "--limit", "100")
    answers = jobs.cwd / "scored" / "arithmetic" / "answers.jsonl"
    job = jobs.submit("eval.sbatch", *more, options=ONE, MODEL="runs/experts", SUITE="arithmetic")
    job.wait_for(lambda: answers.exists() and bool(answers.read_text()), "an answer")
    jobs.cluster.says("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(lambda: jobs.cluster.field(job.number, "Restarts") == "1", "requeue")
    before = [(row["id"], row["sample"]) for row in read_jsonl(answers)]
    completed(job)
    after = [(row["id"], row["sample"]) for row in read_jsonl(answers)]
    assert 0 < len(before) < len(after) == len(set(after)) == 1600
    assert after[: len(before)] == before
