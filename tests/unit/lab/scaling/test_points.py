"""Points from run directories and files; each kind of bad input has its own message."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import append_jsonl
from megarl.lab.scaling.points import PointColumns, amount, curve_of_run, read_points


def file(folder: Path, text: str, name: str = "points.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(folder: Path, epochs: list[int]) -> Path:
    """An evaluation each 10 steps; the one of step 20 is written twice, as after a crash."""
    for step, rate in ((0, 0.2), (10, 0.3), (20, 0.9), (20, 0.4), (30, 0.45)):
        row = {"step": step, "pass_rate": rate, "compute_hours": 0.01 + step / 100, "compute_unit": "core"}
        append_jsonl(folder / "eval.jsonl", row)
    for step, epoch in enumerate(epochs):
        append_jsonl(folder / "metrics.jsonl", {"step": step, "epoch": epoch, "compute_hours": 0.02 + step / 10})
    return folder


def test_run_directory(tmp_path: Path) -> None:
    (curve,) = read_points(run(tmp_path, [0, 0, 1, 1, 2]))
    assert curve.name == tmp_path.name
    assert (curve.r0, curve.unit, curve.seed) == (0.2, "core", None)
    assert curve.hours.tolist() == pytest.approx([0.11, 0.21, 0.31])
    assert curve.pass_rate.tolist() == [0.3, 0.4, 0.45]
    assert curve.first_epoch == pytest.approx(0.22)


def test_rows_after_the_first_epoch_are_not_asked_for() -> None:
    """Each evaluation asks for them, of a run that may have a hundred thousand."""
    steps = ({"epoch": step // 3, "compute_hours": float(step)} for step in range(10))
    scores = [{"step": step, "compute_hours": float(step), "pass_rate": 0.1 * step} for step in range(3)]
    assert curve_of_run("run", scores, steps, "the run", PointColumns()).first_epoch == 3.0
    assert next(steps)["compute_hours"] == 4.0


def test_run_that_is_in_its_first_epoch(tmp_path: Path) -> None:
    assert read_points(run(tmp_path, [0, 0, 0]))[0].first_epoch == math.inf


TASKS = "data: {tasks: {math: {train: a, heldout: b}, code: {train: c, heldout: d}}}\n"


def run_of_two_tasks(folder: Path, recipe: str = TASKS) -> Path:
    for step in range(4):
        of_tasks = {"pass_rate": 0.5, "pass_rate/math": 0.3 + step / 10, "pass_rate/code": 0.7 - step / 100}
        row = {"step": step, "compute_hours": 1.0 + step, "training_hours": step / 2, "compute_unit": "gpu"} | of_tasks
        append_jsonl(folder / "eval.jsonl", row)
        append_jsonl(folder / "metrics.jsonl", {"step": step, "epoch": step // 2, "compute_hours": 1.5 + step})
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def test_columns_of_a_run_directory(tmp_path: Path) -> None:
    (curve,) = read_points(run_of_two_tasks(tmp_path), PointColumns(score="pass_rate/math"))
    assert (curve.r0, curve.pass_rate.tolist()) == (0.3, pytest.approx([0.4, 0.5, 0.6]))
    assert (curve.hours.tolist(), curve.first_epoch) == ([2.0, 3.0, 4.0], 3.5)
    (curve,) = read_points(tmp_path, PointColumns(hours="training_hours", score="pass_rate"))
    assert (curve.r0, curve.pass_rate.tolist(), curve.hours.tolist()) == (0.5, [0.5] * 3, [0.5, 1.0, 1.5])
    assert curve.first_epoch is None, "where the epoch ended is known in other hours"


@pytest.mark.parametrize(
    "columns", [PointColumns(score="pass_rate/maths"), PointColumns(hours="hours", score="pass_rate/math")]
)
def test_a_run_directory_without_such_a_column(tmp_path: Path, columns: PointColumns) -> None:
    wrong = columns.hours or columns.score
    with pytest.raises(MegarlError, match=f"no column '{wrong}' .it has step, compute_hours, .*pass_rate/code"):
        read_points(run_of_two_tasks(tmp_path), columns)


def test_a_suite_that_was_added_later(tmp_path: Path) -> None:
    for step in range(4):
        row = {"step": step, "compute_hours": 1.0 + step, "compute_unit": "gpu", "pass_rate": 0.5}
        append_jsonl(tmp_path / "eval.jsonl", row | ({"pass_rate/aime24": step / 10} if step > 1 else {}))
    (curve,) = read_points(tmp_path, PointColumns(score="pass_rate/aime24"))
    assert (curve.r0, curve.hours.tolist(), curve.pass_rate.tolist()) == (None, [3.0, 4.0], [0.2, 0.3])


def test_several_tasks_are_not_fitted_together_unasked(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=r"several tasks .math, code., .* --score-column pass_rate/math"):
        read_points(run_of_two_tasks(tmp_path))
    (curve,) = read_points(run_of_two_tasks(tmp_path, TASKS + "evaluation: {forecast: code}\n"))
    assert curve.pass_rate.tolist() == pytest.approx([0.69, 0.68, 0.67])


def test_a_recipe_without_tasks_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no task in it, so it is unknown which score to fit"):
        read_points(run_of_two_tasks(tmp_path, "data: {tasks: {}}\n"))


def test_run_without_metrics(tmp_path: Path) -> None:
    assert read_points(run(tmp_path, []))[0].first_epoch is None


def test_csv_of_seeds(tmp_path: Path) -> None:
    text = "# a remark\ngpu_hours,pass_rate,seed,tokens\n0,.2,1,0\n20,.4,1,9\n10,.3,1,5\n10,.35,2,5\n"
    first, second = read_points(file(tmp_path, text))
    assert (first.name, first.r0, first.seed, first.unit) == ("points seed 1", 0.2, 1, "gpu")
    assert first.hours.tolist() == [10, 20]  # sorted
    assert (second.r0, second.pass_rate.tolist()) == (None, [0.35])


def test_later_row_of_a_step_counts(tmp_path: Path) -> None:
    (curve,) = read_points(file(tmp_path, "step,compute_hours,pass_rate\n0,0.5,.1\n1,1,.2\n1,2,.3\n"))
    assert (curve.r0, curve.hours.tolist(), curve.pass_rate.tolist()) == (0.1, [2], [0.3])


def test_a_csv_of_a_spreadsheet_begins_with_a_mark(tmp_path: Path) -> None:
    (curve,) = read_points(file(tmp_path, "\ufeffgpu_hours,pass_rate\n10,.3\n20,.4\n"))
    assert curve.hours.tolist() == [10, 20]


@pytest.mark.parametrize("header", ["gpu_hours;pass_rate", "gpu_hours, pass_rate", "gpu_hours\tpass_rate"])
def test_separators_of_other_programs(tmp_path: Path, header: str) -> None:
    separator = header.removeprefix("gpu_hours").removesuffix("pass_rate")
    (curve,) = read_points(file(tmp_path, f"{header}\n10{separator}.3\n20{separator}.4\n"))
    assert (curve.hours.tolist(), curve.pass_rate.tolist()) == ([10, 20], [0.3, 0.4])


def test_compute_that_is_not_in_hours(tmp_path: Path) -> None:
    """Called GPU-hours, steps would lose the first 1,500, and compare with hours."""
    (curve,) = read_points(file(tmp_path, "flops,pass_rate\n1e21,.3\n2e21,.4\n"), PointColumns(hours="flops"))
    assert (curve.unit, amount(2.5e21, curve.unit)) == ("flops", "2.5e+21 flops")
    assert read_points(run(tmp_path, []), PointColumns(hours="step"))[0].unit == "step"
    (curve,) = read_points(file(tmp_path, "Wall Hours,pass_rate\n1,.3\n2,.4\n"), PointColumns(hours="Wall Hours"))
    assert curve.unit == "gpu"


def test_jsonl_with_other_names(tmp_path: Path) -> None:
    rows = [{"h": 1, "acc": 0.5, "compute_unit": "core"}, {"h": 2, "acc": 0.6}]
    path = file(tmp_path, "\ufeff" + "\n".join(map(json.dumps, rows)) + "\n\n", "points.jsonl")
    (curve,) = read_points(path, PointColumns(hours="h", score="acc"))
    assert curve.unit == "core"
    np.testing.assert_array_equal(curve.pass_rate, [0.5, 0.6])


BAD = {
    "no points": "gpu_hours,pass_rate\n",
    "no column gpu_hours or compute_hours": "hours,pass_rate\n1,.5\n",
    "no column 'pass_rate'": "gpu_hours,score\n1,.5\n",
    "row 2: 2 headers, but another number of fields": "gpu_hours,pass_rate\n1,.5\n2,.5,.6\n",
    "row 1: 2 headers, but another": "gpu_hours,pass_rate\n1\n",
    "row 2: pass_rate is 'much', not a number": "gpu_hours,pass_rate\n1,.5\n2,much\n",
    "row 1: pass_rate is '', not a number": "gpu_hours,pass_rate\n1,\n",
    "row 1: pass_rate is nan": "gpu_hours,pass_rate\n1,nan\n",
    "row 1: gpu_hours is inf": "gpu_hours,pass_rate\ninf,.5\n",
    "percent, divide it by 100": "gpu_hours,pass_rate\n1,50\n",
    "pass_rate is -0.1, not a pass rate between": "gpu_hours,pass_rate\n1,-.1\n",
    "cannot be negative": "gpu_hours,pass_rate\n-1,.5\n",
    "no compute at step 3; only the score before": "step,gpu_hours,pass_rate\n3,0,.5\n",
    "compute_unit is core, gpu; it is": "compute_hours,pass_rate,compute_unit\n0,.5,gpu\n9,.6,core\n",
    "compute_unit is cpu; it is gpu or": "compute_hours,pass_rate,compute_unit\n0,.5,cpu\n9,.6,cpu\n",
    "falls from 9 at step 2 to 3 at step 3": "step,gpu_hours,pass_rate\n1,5,.5\n3,3,.6\n2,9,.5\n",
    "row 1: gpu_hours is '0,5', not a": "gpu_hours;pass_rate\n0,5;.5\n",
    "2 different scores before training": "gpu_hours,pass_rate\n0,.5\n0,.6\n",
}


def test_how_many_answers_a_score_is_of(tmp_path: Path) -> None:
    assert read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,800\n10,.3,800\n"))[0].answers == 800
    assert read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,\n10,.3,\n"))[0].answers is None
    rows = "0,.2,200,4\n10,.3,200,4\n"
    assert read_points(file(tmp_path, f"gpu_hours,pass_rate,n_prompts,samples\n{rows}"))[0].answers == 800
    (curve,) = read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,400\n20,.3,100\n10,.3,400\n"))
    assert curve.answers == 100
    assert curve.noise is not None, "a fork may ask another number of prompts"
    assert curve.noise.tolist() == pytest.approx([0.0229, 0.0458], abs=1e-4)
    with pytest.raises(MegarlError, match="n_prompts is 'all', not a number"):
        read_points(file(tmp_path, f"gpu_hours,pass_rate,n_prompts,samples\n{rows.replace('200', 'all')}"))
    with pytest.raises(MegarlError, match="answers is -5; it is how many each score is the mean of"):
        read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,-5\n10,.3,-5\n"))


@pytest.mark.parametrize(("message", "text"), BAD.items())
def test_bad_csv(tmp_path: Path, message: str, text: str) -> None:
    with pytest.raises(MegarlError, match=message) as error:
        read_points(file(tmp_path, text))
    assert "points.csv" in str(error.value)


@pytest.mark.parametrize(
    ("message", "text"),
    {
        "line 1: not JSON": "{",
        "line 2: not a JSON object": '{"a":1}\n[]',
        "line 1: gpu_hours is 1000": f'{{"gpu_hours": 1{"0" * 400}, "pass_rate": 0.5}}',
    }.items(),
)
def test_bad_jsonl(tmp_path: Path, message: str, text: str) -> None:
    with pytest.raises(MegarlError, match=message):
        read_points(file(tmp_path, text, "points.jsonl"))


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MegarlError, match="not a CSV file"):
        read_points(tmp_path / "points.csv")
    (tmp_path / "points.csv").rename(tmp_path / "points.jsonl")
    with pytest.raises(MegarlError, match="not a JSONL file"):
        read_points(tmp_path / "points.jsonl")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no such run directory or file"):
        read_points(tmp_path / "absent.csv")
    with pytest.raises(MegarlError, match=r"no eval\.jsonl in it"):
        read_points(tmp_path)


def test_evaluation_without_a_score(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "eval.jsonl", {"step": 5, "pass_rate": math.nan, "compute_hours": 1.0})
    with pytest.raises(MegarlError, match="step 5: pass_rate is nan"):
        read_points(tmp_path)


def test_amounts() -> None:
    assert amount(16_000, "gpu") == "16,000 GPU-hours"
    assert amount(0.12345, "core") == "0.1235 core-hours"
