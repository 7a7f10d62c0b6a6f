"""Which checkpoints stay: those that reached a milestone first, as the run directory
says.
"""

from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.retention import (
    best_checkpoint,
    milestone_checkpoints,
    named_checkpoint,
    scored_checkpoints,
    split_name,
)
from megarl.core.base.rundir import META, RunDir, append_jsonl, step_folder, step_of
from megarl.core.models.checkpoint import find, prune
from megarl.core.recipe import from_tree

MILESTONES = (250, "1000 GPU-hours")
HOURS_A_STEP = 1.43


def run_with(path: Path, *steps: int, unit: str = "gpu", rows: int = 1000) -> RunDir:
    """A run with complete checkpoints of these steps,
    and the compute of all its steps.
    """
    rundir = RunDir(path)
    for step in steps:
        folder = step_folder(rundir.checkpoints, step)
        folder.mkdir(parents=True)
        (folder / META).write_text("{}")
    for step in range(rows):
        spent = HOURS_A_STEP * (step + 1)
        append_jsonl(rundir.metrics, {"step": step, "compute_hours": spent, "compute_unit": unit})
    return rundir


def scored(rundir: RunDir, scores: dict[int, float]) -> None:
    """Evaluations of these versions that have ended."""
    for step, score in scores.items():
        step_folder(rundir.evaluations, step).mkdir(parents=True, exist_ok=True)
        row = {
            "step": step,
            "pass_rate": score,
            "n_prompts": 9,
            "samples": 1,
            "compute_hours": 1.0,
            "compute_unit": "core",
        }
        append_jsonl(rundir.eval, row)


def steps_kept(rundir: RunDir, *milestones: int | str) -> dict[int | str, int]:
    return {
        milestone: step_of(path)
        for milestone, path in milestone_checkpoints(rundir.checkpoints, milestones).items()
    }


def test_the_first_checkpoint_past_a_milestone_stays(tmp_path: Path) -> None:
    """1,000 hours at 1.43 a step are passed in the 700th step: 699 x 1.43 = 999.57, 700
    x 1.43 = 1001.
    """
    rundir = run_with(tmp_path, 200, 250, 300, 600, 699, 700, 800)
    assert steps_kept(rundir, *MILESTONES) == {250: 250, "1000 GPU-hours": 700}
    assert steps_kept(rundir, 251, ".5 GPU-hours", 801, "1144.1 GPU-hours") == {
        251: 300,
        ".5 GPU-hours": 200,
    }
    assert steps_kept(rundir, "1000 core-hours") == {}, "the run counts others"
    prune(
        rundir.checkpoints, 1, list(milestone_checkpoints(rundir.checkpoints, MILESTONES).values())
    )
    assert sorted(map(step_of, rundir.checkpoints.iterdir())) == [250, 700, 800]
    assert steps_kept(rundir, *MILESTONES) == {
        250: 250,
        "1000 GPU-hours": 700,
    }, "it says the same of what is left"


def test_of_a_damaged_or_incomplete_one_the_next_takes_the_place(tmp_path: Path) -> None:
    rundir = run_with(tmp_path, 250, 300, 700, 710)
    (step_folder(rundir.checkpoints, 250) / META).unlink()
    step_folder(rundir.checkpoints, 700).rename(rundir.checkpoints / "step-0000700.unreadable")
    assert steps_kept(rundir, *MILESTONES) == {250: 300, "1000 GPU-hours": 710}


def test_without_a_row_of_the_step_its_compute_is_not_known(tmp_path: Path) -> None:
    """A learner that was killed wrote no row of the step; the row of a replay counts,
    whose hours are more.
    """
    rundir = run_with(tmp_path, 700, rows=699)
    assert steps_kept(rundir, "1000 GPU-hours") == {}
    append_jsonl(rundir.metrics, {"step": 699, "compute_hours": 1030.0, "compute_unit": "gpu"})
    assert steps_kept(rundir, "1000 GPU-hours", "1031 GPU-hours") == {"1000 GPU-hours": 700}


@pytest.mark.parametrize(
    "milestone", [0, "1000", "1000 hours", "-1 GPU-hours", "1e3 GPU-hours", True]
)
def test_what_is_no_milestone_is_refused(milestone: object) -> None:
    with pytest.raises(MegarlError, match=r"checkpoint\.milestones"):
        from_tree({"checkpoint": {"milestones": [milestone]}})
    assert (
        from_tree({"checkpoint": {"milestones": list(MILESTONES)}}).checkpoint.milestones
        == MILESTONES
    )


def test_the_best_score_with_a_checkpoint_stays(tmp_path: Path) -> None:
    """Version 15 has the highest score, but no checkpoint; of two equal ones the first
    is the best.
    """
    rundir = run_with(tmp_path, 10, 20, 30, 40)
    assert best_checkpoint(rundir.checkpoints) is None
    scored(rundir, {0: 0.1, 10: 0.5, 15: 0.9, 20: 0.8, 30: 0.8, 40: 0.6})
    assert best_checkpoint(rundir.checkpoints) == step_folder(rundir.checkpoints, 20)
    prune(rundir.checkpoints, 1, scored_checkpoints(rundir.checkpoints))
    assert sorted(map(step_of, rundir.checkpoints.iterdir())) == [20, 40]
    scored(rundir, {20: 0.4})
    assert best_checkpoint(rundir.checkpoints) == step_folder(rundir.checkpoints, 40), (
        "the latest row of a version counts"
    )


def test_what_is_being_evaluated_stays_until_its_score_or_a_later_one(tmp_path: Path) -> None:
    rundir = run_with(tmp_path, 10, 20, 25, 30)
    scored(rundir, {10: 0.5})
    step_folder(rundir.evaluations, 20).mkdir()
    assert sorted(map(step_of, scored_checkpoints(rundir.checkpoints))) == [10, 20]
    scored(rundir, {30: 0.2})
    assert sorted(map(step_of, scored_checkpoints(rundir.checkpoints))) == [10], (
        "version 20 never got its score"
    )


def test_a_checkpoint_is_named_by_its_step_or_as_the_best(tmp_path: Path) -> None:
    assert split_name("runs/a@20") == (Path("runs/a"), "20")
    assert split_name("runs/a@best") == (Path("runs/a"), "best")
    assert split_name("runs/a@b") == (Path("runs/a@b"), "")
    rundir = run_with(tmp_path, 10, 20)
    assert named_checkpoint(tmp_path, "10") == step_folder(rundir.checkpoints, 10)
    with pytest.raises(
        MegarlError, match=r"has no checkpoint of step 15; there are those of 10, 20"
    ):
        named_checkpoint(tmp_path, "15")
    with pytest.raises(
        MegarlError,
        match=(
            r"@best: none of its checkpoints \(10, 20\) has a held-out score; checkpoint\.keep_best"
        ),
    ):
        named_checkpoint(tmp_path, "best")
    scored(rundir, {10: 0.5})
    assert (
        find(Path(f"{tmp_path}@best"))
        == find(Path(f"{tmp_path}@10"))
        == step_folder(rundir.checkpoints, 10)
    )
    with pytest.raises(MegarlError, match="no complete checkpoint there"):
        find(Path(f"{tmp_path / 'other'}@best"))
