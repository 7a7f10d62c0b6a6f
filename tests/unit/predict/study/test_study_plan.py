"""What a study is on disk, and that it stays the same study."""

import json
from pathlib import Path

import pytest

from megarl import cli
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.predict.study.plan import Study, opened, prepare
from megarl.predict.study.running import side_by_side


def made(path: Path, seeds: tuple[int, ...] = (0, 1), overrides: tuple[str, ...] = ()) -> Study:
    return prepare(
        path, side_by_side(["quickstart", "grpo"], ["base=quickstart", *overrides]), seeds
    )


def test_rounds_of_seeds(tmp_path: Path) -> None:
    study = made(tmp_path)
    assert [t.name for t in study.tasks] == [
        "quickstart-seed0",
        "grpo-seed0",
        "quickstart-seed1",
        "grpo-seed1",
    ]
    assert opened(tmp_path) == study
    recipe = load(str(study.tasks[3].recipe))
    assert (recipe.run.seed, recipe.run.resume, recipe.run.path) == (
        1,
        "auto",
        tmp_path / "runs" / "grpo-seed1",
    )
    assert recipe.loss.kind == "clip"


def test_the_same_study_goes_on(tmp_path: Path) -> None:
    first = made(tmp_path)
    before = {t.recipe: t.recipe.stat().st_mtime_ns for t in first.tasks}
    assert made(tmp_path) == first
    assert {t.recipe: t.recipe.stat().st_mtime_ns for t in first.tasks} == before


def test_another_study_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(MegarlError, match="seeds 0, 1; go on with the same"):
        made(tmp_path, seeds=(0,))
    with pytest.raises(
        MegarlError, match=r"quickstart-seed0.yaml: this study began with run.steps: 100, not 7"
    ):
        made(tmp_path, overrides=("run.steps=7",))


@pytest.mark.parametrize("seeds", ["-1", "0,-1", "a"])
def test_a_seed_that_no_recipe_takes(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "loo", "quickstart", f"--seeds={seeds}", "--dry-run"]) == 2
    assert f"--seeds: {seeds!r} is not a list of numbers such as 0,1,2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds=1,1"], "--seeds: 1,1 has a seed twice"),
        (["--task=24"], "--task: the study has tasks 0 to"),
    ],
)
def test_a_dry_run_refuses_what_a_study_would(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["study", "loo", "quickstart", *options, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no study"):
        opened(tmp_path)


def test_states(tmp_path: Path) -> None:
    task = made(tmp_path).tasks[0]
    assert task.state() == "waiting"
    task.rundir.create()
    task.rundir.recipe.write_text("")
    assert task.state() == "begun"
    for outcome, state in (("stopped", "begun"), ("failed", "failed"), ("finished", "done")):
        task.rundir.summary.write_text(json.dumps({"outcome": outcome}))
        assert task.state() == state
