"""The shipped array script: each job of the array is one run of the study, and the
table has them all in the end.
"""

import pytest

from tests.slurm.jobs import RUN_LIMIT_S, SMALL, Jobs

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]


def test_array_fills_the_table(jobs: Jobs) -> None:
    words = (
        "--seeds",
        "0",
        *SMALL,
        "resources.servers=1",
        "run.steps=3",
        "evaluation.every=3",
        "pipeline.k=2",
    )
    job = jobs.submit(
        "study.sbatch",
        *words,
        options=("--nodes=1", "--array=0-1", "--exclusive=user"),
        RECIPE="quickstart",
        STUDY="runs/studies/array",
    )
    job.wait_for(
        lambda: not jobs.cluster.says("squeue", "-h", "-j", job.number),
        "end of the array",
        RUN_LIMIT_S,
    )
    study = jobs.cwd / "runs" / "studies" / "array"
    assert sorted(path.name for path in (study / "runs").iterdir()) == [
        "prompt-level-advantage-seed0",
        "quickstart-seed0",
    ]
    table = (study / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:4]] == [
        "quickstart",
        "prompt-level-advantage",
    ]
    assert len(list((study / "points").glob("*.csv"))) == 2
