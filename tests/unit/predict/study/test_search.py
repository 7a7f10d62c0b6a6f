"""Successive halving: the chances against closed forms, the rungs with a stand-in for
`megarl train`, and what is stated.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import search as benchmark
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.predict.scaling.points import Curve
from megarl.predict.study import results, running
from megarl.predict.study import search as searching
from megarl.predict.study.plan import opened
from megarl.predict.study.running import StudyOptions
from megarl.predict.study.search import (
    SearchOptions,
    arms,
    chances,
    judge,
    listed_values,
    table_and_plots,
)

VARY = ("learner.optimizer.lr=1e-4,2e-4,4e-4,8e-4",)
LRS = ("1e-4", "2e-4", "4e-4", "8e-4")
FAKE_TRAIN = """
import json, os, pathlib, signal, sys, yaml
tree = yaml.safe_load(open(sys.argv[1]))
run = tree["run"]
given = dict(word.split("=") for word in sys.argv[2:])
run["steps"] = end = int(given.get("run.steps", run["steps"]))
path = pathlib.Path(run["dir"], run["name"])
path.mkdir(parents=True, exist_ok=True)
(path / "recipe.yaml").write_text(yaml.safe_dump(tree))
with (path.parent.parent / "order").open("a") as order:
    order.write(f"{{run['name']}} {{end}}\\n")
if run["name"] in {failing}:
    (path / "summary.json").write_text(json.dumps(dict(outcome="failed")))
    sys.exit(1)
# The law of each arm: A falls as the learning rate rises.
a = 0.95 - 100 * tree["learner"]["optimizer"]["lr"] * 2
metrics, scores = [], []
for step in range(end):
    metrics.append(dict(step=step, generated_tokens=10, compute_hours=step + 1.0))
for step in [s for s in range(0, end + 1, {every}) if s < end] + [end]:
    rate = 0.4 + ((a - 0.4) / (1 + (15 / step) ** 1.2) if step else 0)
    rate = min(rate, {late}) if step > 24 else rate
    scores.append(dict(step=step, pass_rate=rate, n_prompts=10000, samples=4, compute_hours=2.0 * step,
                       training_hours=1.0 * step, compute_unit="core"))
for name, rows in (("metrics", metrics), ("eval", scores)):
    (path / f"{{name}}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(path / "summary.json").write_text(json.dumps(dict(outcome="finished")))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "LOOK_S", 0.02)
    monkeypatch.setattr(results, "write", lambda study, console: 0)  # seconds of matplotlib
    train_as(monkeypatch, tmp_path)


def train_as(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failing: tuple[str, ...] = (),
    every: int = 3,
    late: float = 1.0,
) -> None:
    script = tmp_path / "fake_train.py"
    script.write_text(FAKE_TRAIN.format(failing=failing, every=every, late=late))
    monkeypatch.setattr(running, "TRAIN", (sys.executable, str(script)))


def search(
    path: Path, task: int | None = None, branch: int = 0, overrides: tuple[str, ...] = ()
) -> int:
    options = StudyOptions("0", str(path), task, False, ["run.steps=48", *overrides])
    return searching.search(["quickstart"], options, SearchOptions(VARY, "", branch))


def order(path: Path) -> list[str]:
    return (path / "order").read_text().splitlines()


def rung(path: Path, step: int) -> dict[str, Any]:
    return json.loads((path / "rungs" / f"{step}.json").read_text())


@pytest.mark.processes
def test_the_better_half_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "study"
    assert search(path) == 0
    named = [f"quickstart-lr-{lr}-seed0" for lr in LRS]
    assert order(path) == [
        *(f"{name} 12" for name in named),
        *(f"{name} 24" for name in named[:2]),
        f"{named[0]} 48",
    ]
    assert rung(path, 12)["kept"] == ["quickstart-lr-1e-4", "quickstart-lr-2e-4"]
    assert rung(path, 24)["kept"] == ["quickstart-lr-1e-4"]
    said = (path / "search.md").read_text()
    assert "Winner: quickstart-lr-1e-4" in said
    assert "But " not in said
    # 2 hours a step: 4 x 12 + 2 x 12 + 24 steps of 4 x 48.
    assert (
        "Compute: 192 core-hours; all arms to step 48, at their own pace, 384 core-hours: 50% saved"
        in said
    )
    assert search(path) == 0
    assert len(order(path)) == 7, "nothing is left to do"
    with pytest.raises(MegarlError, match="rungs 12, 24; go on with the same"):
        search(path, branch=6)
    study = opened(path)
    scores = study.tasks[0].rundir.eval  # now as of a job on another partition
    scores.write_text(scores.read_text().replace('"core"', '"gpu"'))
    assert "Compute: not added up, because the runs count core-hours and GPU-hours." in (
        searching.report(study)
    )


@pytest.mark.processes
def test_a_winner_that_disappoints_is_not_praised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last rung its score stands still: the arm dropped there has more
    chances, and the report says so.
    """
    train_as(monkeypatch, tmp_path, late=0.7)
    assert search(tmp_path / "study") == 0
    said = (tmp_path / "study" / "search.md").read_text()
    assert "Winner: quickstart-lr-1e-4" in said
    assert "But quickstart-lr-2e-4, dropped at step 24, is likelier" in said


@pytest.mark.processes
def test_an_array_for_each_rung_decides_the_same(tmp_path: Path) -> None:
    """Jobs come in any order, and one again; the decision is whoever's starts next."""
    alone = tmp_path / "alone"
    array = tmp_path / "array"
    assert search(alone) == 0
    for tasks in ((2, 0, 3, 1), (3, 1, 0, 2, 1), (0, 1, 2, 3)):
        assert [search(array, task) for task in tasks] == [0] * len(tasks)
    assert sorted(order(array)) == sorted(order(alone))
    assert rung(array, 12) == rung(alone, 12)
    assert rung(array, 24) == rung(alone, 24)
    assert table_and_plots(array) == 0
    assert (array / "search.md").read_text() == (alone / "search.md").read_text()
    with pytest.raises(MegarlError, match="tasks 0 to 3, not 4"):
        search(array, 4)


@pytest.mark.processes
def test_a_failed_arm_is_named_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_as(monkeypatch, tmp_path, failing=("quickstart-lr-1e-4-seed0",))
    assert search(tmp_path / "study") == 0, "its failure is a result"
    assert rung(tmp_path / "study", 12)["failed"] == ["quickstart-lr-1e-4-seed0"]
    said = (tmp_path / "study" / "search.md").read_text()
    assert "- failed: quickstart-lr-1e-4-seed0; see logs/quickstart-lr-1e-4-seed0.log" in said
    assert "Winner: quickstart-lr-2e-4" in said
    train_as(monkeypatch, tmp_path, failing=tuple(f"quickstart-lr-{lr}-seed0" for lr in LRS))
    with pytest.raises(MegarlError, match="no run reached step 12"):
        search(tmp_path / "none")


@pytest.mark.processes
def test_too_few_scores_for_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_as(monkeypatch, tmp_path, every=10)
    assert search(tmp_path / "study") == 0
    why = "because there is no fit (quickstart-lr-1e-4-seed0: 2 points in the window"
    said = (tmp_path / "study" / "search.md").read_text()
    assert f"step 12, by the last scores and the noise of their answers, {why}" in said
    assert rung(tmp_path / "study", 12)["kept"] == ["quickstart-lr-1e-4", "quickstart-lr-2e-4"]


@pytest.mark.processes
def test_arms_branch_from_one_trunk(tmp_path: Path) -> None:
    path = tmp_path / "study"
    assert search(path, task=1, branch=6) == 0
    assert not (path / "order").exists(), "the trunk is the first arm's job's"
    assert search(path, task=0, branch=6) == 0
    assert order(path) == ["trunk-seed0 6"]
    assert search(path, branch=6) == 0
    assert order(path)[1:5] == [f"quickstart-lr-{lr}-seed0 12" for lr in LRS]
    study = opened(path)
    assert {load(str(task.recipe)).run.fork for task in study.tasks} == {
        f"{path}/runs/trunk-seed0@6"
    }
    assert load(str(study.trunk.tasks[0].recipe)).run.fork == ""
    assert load(str(study.trunk.tasks[0].recipe)).learner.optimizer.lr == 1e-4
    # The trunk's 6 steps, 4 x 6, 2 x 12 and 24, of 6 + 4 x 42 or, without it, of 4 x
    # 48; 2 hours each.
    assert (
        "Compute: 156 core-hours; all arms to step 48, at their own pace, 384 core-hours"
        in (path / "search.md").read_text()
    )


def test_arms() -> None:
    made = arms(
        ["quickstart", "grpo"],
        ["run.steps=9", "base=quickstart"],
        ["loss.cap=3,5", "batch.prompts=4,8"],
    )
    assert list(made) == [
        f"{name}-cap-{cap}-prompts-{prompts}"
        for cap in (3, 5)
        for prompts in (4, 8)
        for name in ("quickstart", "grpo")
    ]
    chosen = made["quickstart-cap-5-prompts-4"]
    assert (chosen.loss.cap, chosen.batch.prompts, chosen.run.steps) == (5, 4, 9)


@pytest.mark.parametrize(
    ("text", "values"),
    {
        "1e-4,2e-4": ["1e-4", "2e-4"],
        "[10,20],[30, 40]": ["[10,20]", "[30, 40]"],
        "{a: 1, b: 2}, {a: 3}": ["{a: 1, b: 2}", "{a: 3}"],
        "'a,b',\"c,d\", null": ["'a,b'", '"c,d"', "null"],
        "hub:a/b:train,runs/x@40": ["hub:a/b:train", "runs/x@40"],
        "[[1,2],[3]],[]": ["[[1,2],[3]]", "[]"],
        "": [],
        "a,,b": [],
        "[1,2": [],
        "1],[2": [],
    }.items(),
)
def test_values_are_split_at_the_commas_between_them(text: str, values: list[str]) -> None:
    assert listed_values(text) == values


def test_arms_of_lists() -> None:
    made = arms(["quickstart"], [], ["length.thinking_tokens=[10,12],[20,24]"])
    assert list(made) == ["quickstart-thinking_tokens-10-12", "quickstart-thinking_tokens-20-24"]
    assert [tuple(one.length.thinking_tokens) for one in made.values()] == [(10, 12), (20, 24)]


@pytest.mark.parametrize(
    ("vary", "rungs", "branch", "overrides", "said"),
    [
        ((), "", 0, (), "two arms or more"),
        (("loss.cap=",), "", 0, (), "--vary: 'loss.cap=' is not KEY=A,B"),
        (
            ("learner.optimizer.schedule=constant,cosine",),
            "",
            0,
            (),
            "learner.optimizer.schedule: an arm that ends at a rung",
        ),
        (("run.steps=50,60",), "", 0, (), r"run.steps: the arms have \[50, 60\]"),
        (("loss.cap=3,5,3",), "", 0, (), "--vary: loss.cap=3 and loss.cap=3 make the same recipe"),
        (
            ("loss.cap=3,3.0",),
            "",
            0,
            (),
            "--vary: loss.cap=3 and loss.cap=3.0 make the same recipe",
        ),
        (("run.seed=1,2",), "", 0, (), "--vary: run.seed=1 and run.seed=2 make the same recipe"),
        (
            ("loss.cap=3,5", "loss.cap=4,6"),
            "",
            0,
            (),
            "--vary: loss.cap=3 loss.cap=4 and loss.cap=5 loss.cap=4 make",
        ),
        (VARY, "30,20", 0, (), "--rungs 30,20, --branch 0: they have to rise"),
        (VARY, "30,100", 0, (), "below run.steps, which is 100"),
        (VARY, "", 25, (), "--rungs 25,50, --branch 25"),
        (VARY, "a", 0, (), "--rungs: 'a' is not a list of numbers"),
        (VARY, "", 0, ("run.steps=3",), "--rungs 0,1"),
    ],
)
def test_refused(
    tmp_path: Path,
    vary: tuple[str, ...],
    rungs: str,
    branch: int,
    overrides: tuple[str, ...],
    said: str,
) -> None:
    options = StudyOptions("0", str(tmp_path / "study"), None, False, overrides)
    with pytest.raises(MegarlError, match=said):
        searching.search(["quickstart"], options, SearchOptions(vary, rungs, branch))
    assert not (tmp_path / "study").exists()


def test_chances_of_two_normals() -> None:
    """P(a > b) of two normals is Phi of the difference of means over the root of the
    variances' sum.
    """
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.normal(0.6, 0.05, 100_000), rng.normal(0.55, 0.1, 100_000)])
    expected = 0.5 * (1 + math.erf(0.05 / math.hypot(0.05, 0.1) / math.sqrt(2)))
    assert chances(drawn, drawn, within=0.0)[0] == pytest.approx(expected, abs=0.005)


def test_b_decides_among_equal_ceilings() -> None:
    a = np.array([[0.70, 0.70, 0.70], [0.69, 0.69, 0.65], [0.50, 0.50, 0.50]])
    b = np.array([[1.0, 2.0, 1.0], [2.0, 1.0, 2.0], [9.0, 9.0, 9.0]])
    assert chances(a, b).tolist() == pytest.approx([2 / 3, 1 / 3, 0])


def test_the_last_scores_have_their_noise() -> None:
    def scored(rate: float, answers: int) -> list[Curve]:
        return [Curve(f"{rate}", np.array([1.0]), np.array([rate]), 0.3, "core", answers=answers)]

    few, many = (judge({"a": scored(0.50, n), "b": scored(0.52, n)}) for n in (100, 10_000))
    noise = math.hypot(*(math.sqrt(p * (1 - p) / 100) for p in (0.5, 0.52)))
    expected = 0.5 * (1 + math.erf(0.02 / noise / math.sqrt(2)))
    assert few.problem
    assert few.chance(["b"]) == pytest.approx(expected, abs=0.03)
    assert many.chance(["b"]) > 0.99


def test_what_is_stated_holds() -> None:
    """Over searches among known laws the best arm is found about as often as was
    stated, within 3 deviations; a search that were always sure would not be.
    """
    found = benchmark.simulated(30, seed=1, spread=0.06)
    stated = np.array([one.stated for one in found])
    good = float(np.mean([one.posterior.good for one in found]))
    assert abs(stated.mean() - good) < 3 * math.sqrt(float((stated * (1 - stated)).sum())) / len(
        found
    )
    assert 1 - good > 3 * math.sqrt(good * (1 - good) / len(found))
