"""How long a run will take by what another took: `megarl plan --measured RUN`."""

import json
from pathlib import Path

import pytest

from megarl import cli
from megarl.core.base.rundir import RunDir, append_jsonl
from megarl.core.recipe import Recipe, dump, from_tree
from megarl.predict.planning.measured import estimate, speeds_of
from tests.unit.conftest import Tree

STEP = {
    "generated_tokens": 960.0,
    "server_busy_share": 1.0,
    "step_seconds": 10.0,
    "train_seconds": 4.0,
    "wait_seconds": 5.0,
}
"""A step for which the learner waits: a server makes 96 tokens a second."""


@pytest.fixture
def small(tree: Tree) -> Recipe:
    sizes = {"batch": {"prompts": 8}, "sampling": {"generations": 4}}
    return from_tree(tree | sizes | {"evaluation": {"every": 10, "prompts": 16, "samples": 2}})


def run_of(recipe: Recipe, steps: int, **figures: float) -> Path:
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    for step in range(steps):
        append_jsonl(rundir.metrics, {"step": step, "time": 1e9 + step, **STEP, **figures})
    return rundir.path


def test_the_same_recipe_takes_as_long_again(small: Recipe) -> None:
    speeds = speeds_of(run_of(small, 4), small)
    assert (speeds.server_tokens, speeds.mean_tokens, speeds.other_seconds) == (96.0, 30.0, 1.0)
    found = estimate(small, speeds, speeds.mean_tokens)
    assert (found.servers, found.learner, found.step) == (10.0, 5.0, 10.0)
    assert (found.evaluation, found.evaluations) == (
        10.0,
        9,
    ), "32 answers of 30 tokens; at step 0 and every 10 of 80"
    assert found.total == 80 * 10 + 9 * 10


def test_what_changes_the_time(small: Recipe) -> None:
    speeds = speeds_of(run_of(small, 4), small)
    synchronous = from_tree(small.model_dump(), ["pipeline.k=0"])
    assert estimate(synchronous, speeds, 30.0).step == 15.0, "they take turns"
    twice = from_tree(small.model_dump(), ["batch.prompts=16"])
    assert estimate(twice, speeds, 30.0).step == 20.0
    assert estimate(small, speeds, 3.0).step == 5.0, "short answers: now the servers wait"


def test_it_is_shown_with_what_does_not_compare(
    small: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(small, 4)
    assert cli.main(["plan", str(run / "recipe.yaml"), "--measured", str(run)]) == 0
    shown = capsys.readouterr().out
    assert (
        "32 rollouts of 30 tokens: servers 10.0 s, learner 5.0 s (1.0 of them not training); 10.0"
        " s, by the servers" in shown
    )
    assert "80 steps in 14.8 minutes" in shown
    assert "note" not in shown
    other = ["plan", str(run / "recipe.yaml"), "--measured", str(run), "resources.threads=2"]
    assert cli.main(other) == 0
    assert "note: resources.threads was 1 there and is 2 here" in capsys.readouterr().out
    assert cli.main([*other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["step"] == 10.0


def test_what_cannot_be_measured_is_one_message(
    small: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(small, 1)
    recipe = str(run / "recipe.yaml")
    for words, said in (
        (["--measured", str(run)], "1 steps were timed there, and 2 are needed"),
        (["--measured", str(tmp_path)], "not a run directory"),
        (["--measured", str(run), "--gpus", "2", "--gpu", "h100"], "--measured takes only"),
        ([], "or --measured RUN"),
    ):
        assert cli.main(["plan", recipe, *words]) == 2
        assert said in capsys.readouterr().err
    for step in range(1, 4):
        append_jsonl(
            RunDir(run).metrics,
            {"step": step, "time": 1e9 + step, **STEP, "server_busy_share": 0.0},
        )
    RunDir(run).metrics.write_text(
        "\n".join(RunDir(run).metrics.read_text().splitlines()[1:]) + "\n"
    )
    assert cli.main(["plan", recipe, "--measured", str(run)]) == 2
    assert "no tokens were generated in its 3 timed steps" in capsys.readouterr().err
