"""Points from run directories and files; each kind of bad input has its own message."""

import gzip
import json
import math
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import append_jsonl
from megarl.predict.scaling.points import PointColumns, amount, curve_of_run, read_points


def file(folder: Path, text: str, name: str = "points.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(folder: Path, epochs: list[int]) -> Path:
    """An evaluation each 10 steps; the one of step 20 is written twice, as after a
    crash.
    """
    for step, rate in ((0, 0.2), (10, 0.3), (20, 0.9), (20, 0.4), (30, 0.45)):
        row = {
            "step": step,
            "pass_rate": rate,
            "compute_hours": 0.01 + step / 100,
            "compute_unit": "core",
        }
        append_jsonl(folder / "eval.jsonl", row)
    for step, epoch in enumerate(epochs):
        append_jsonl(
            folder / "metrics.jsonl",
            {"step": step, "epoch": epoch, "compute_hours": 0.02 + step / 10},
        )
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
    scores = [
        {"step": step, "compute_hours": float(step), "pass_rate": 0.1 * step} for step in range(3)
    ]
    assert curve_of_run("run", scores, steps, "the run", PointColumns()).first_epoch == 3.0
    assert next(steps)["compute_hours"] == 4.0


def test_run_that_is_in_its_first_epoch(tmp_path: Path) -> None:
    assert read_points(run(tmp_path, [0, 0, 0]))[0].first_epoch == math.inf


TASKS = "data: {tasks: {math: {train: a, heldout: b}, code: {train: c, heldout: d}}}\n"


def run_of_two_tasks(folder: Path, recipe: str = TASKS) -> Path:
    for step in range(4):
        of_tasks = {
            "pass_rate": 0.5,
            "pass_rate/math": 0.3 + step / 10,
            "pass_rate/code": 0.7 - step / 100,
        }
        row = {
            "step": step,
            "compute_hours": 1.0 + step,
            "training_hours": step / 2,
            "compute_unit": "gpu",
        } | of_tasks
        append_jsonl(folder / "eval.jsonl", row)
        append_jsonl(
            folder / "metrics.jsonl",
            {"step": step, "epoch": step // 2, "compute_hours": 1.5 + step},
        )
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def test_columns_of_a_run_directory(tmp_path: Path) -> None:
    (curve,) = read_points(run_of_two_tasks(tmp_path), PointColumns(score="pass_rate/math"))
    assert (curve.r0, curve.pass_rate.tolist()) == (0.3, pytest.approx([0.4, 0.5, 0.6]))
    assert (curve.hours.tolist(), curve.first_epoch) == ([2.0, 3.0, 4.0], 3.5)
    (curve,) = read_points(tmp_path, PointColumns(hours="training_hours", score="pass_rate"))
    assert (curve.r0, curve.pass_rate.tolist(), curve.hours.tolist()) == (
        0.5,
        [0.5] * 3,
        [0.5, 1.0, 1.5],
    )
    assert curve.first_epoch is None, "where the epoch ended is known in other hours"


@pytest.mark.parametrize(
    "columns",
    [PointColumns(score="pass_rate/maths"), PointColumns(hours="hours", score="pass_rate/math")],
)
def test_a_run_directory_without_such_a_column(tmp_path: Path, columns: PointColumns) -> None:
    wrong = columns.hours or columns.score
    with pytest.raises(
        MegarlError, match=f"no column '{wrong}' .it has step, compute_hours, .*pass_rate/code"
    ):
        read_points(run_of_two_tasks(tmp_path), columns)


def test_a_suite_that_was_added_later(tmp_path: Path) -> None:
    for step in range(4):
        row = {"step": step, "compute_hours": 1.0 + step, "compute_unit": "gpu", "pass_rate": 0.5}
        append_jsonl(
            tmp_path / "eval.jsonl", row | ({"pass_rate/aime24": step / 10} if step > 1 else {})
        )
    (curve,) = read_points(tmp_path, PointColumns(score="pass_rate/aime24"))
    assert (curve.r0, curve.hours.tolist(), curve.pass_rate.tolist()) == (
        None,
        [3.0, 4.0],
        [0.2, 0.3],
    )


def test_several_tasks_are_not_fitted_together_unasked(tmp_path: Path) -> None:
    with pytest.raises(
        MegarlError, match=r"several tasks .math, code., .* --score-column pass_rate/math"
    ):
        read_points(run_of_two_tasks(tmp_path))
    (curve,) = read_points(run_of_two_tasks(tmp_path, TASKS + "evaluation: {forecast: code}\n"))
    assert curve.pass_rate.tolist() == pytest.approx([0.69, 0.68, 0.67])


def test_a_recipe_without_tasks_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no task in it, so it is unknown which score to fit"):
        read_points(run_of_two_tasks(tmp_path, "data: {tasks: {}}\n"))


def test_run_without_metrics(tmp_path: Path) -> None:
    assert read_points(run(tmp_path, []))[0].first_epoch is None


def test_csv_of_seeds(tmp_path: Path) -> None:
    text = (
        "# a remark\ngpu_hours,pass_rate,seed,tokens\n0,.2,1,0\n20,.4,1,9\n10,.3,1,5\n10,.35,2,5\n"
    )
    first, second = read_points(file(tmp_path, text))
    assert (first.name, first.r0, first.seed, first.unit) == ("points seed 1", 0.2, 1, "gpu")
    assert first.hours.tolist() == [10, 20]  # sorted
    assert (second.r0, second.pass_rate.tolist()) == (None, [0.35])


def test_later_row_of_a_step_counts(tmp_path: Path) -> None:
    (curve,) = read_points(
        file(tmp_path, "step,compute_hours,pass_rate\n0,0.5,.1\n1,1,.2\n1,2,.3\n")
    )
    assert (curve.r0, curve.hours.tolist(), curve.pass_rate.tolist()) == (0.1, [2], [0.3])


PLAIN = "gpu_hours,pass_rate\n10,.3\n20,.4\n"
RECORDS = [{"gpu_hours": 10, "pass_rate": 0.3}, {"gpu_hours": 20, "pass_rate": 0.4}]
LINES = "".join(json.dumps(row) + "\n" for row in RECORDS)
EXPORTED = {
    "bom.csv": "\ufeff" + PLAIN,
    "out-of-order.csv": "gpu_hours,pass_rate\n20,.4\n10,.3\n",
    "blanks.csv": "\ngpu_hours, pass_rate\n10, .3\n\n20, .4\n,\n",
    "semicolons.csv": "gpu_hours;pass_rate\n10;0,3\n20;0,4\n",
    "excel.csv": "sep=;\r\ngpu_hours;pass_rate\r\n10;0,3\r\n20;0,4\r\n",
    "excel-unicode.txt": "gpu_hours\tpass_rate\r\n10\t0,3\r\n20\t0,4\r\n".encode("utf-16"),
    "tabs.tsv": "gpu_hours\tpass_rate\n10\t.3\n20\t.4\n",
    "percent.csv": "gpu_hours;pass_rate\n10;30 %\n20;40,0%\n",
    "pandas-index.csv": ",gpu_hours,pass_rate\n0,10,.3\n1,20,.4\n",
    "pandas-index-again.csv": "Unnamed: 0,gpu_hours,pass_rate\n0,10,.3\n1,20,.4\n",
    "lists-of-gpus.csv": 'gpus,gpu_hours,pass_rate\n"0,1",10,.3\n"0,1",20,.4\n',
    "no-score.csv": "gpu_hours,pass_rate\n5,\n10,.3\n15,NaN\n20,.4\n25,n/a\n",
    "wandb.csv": (
        '"gpu_hours","a - eval/pass_rate","a - eval/pass_rate__MIN","a - eval/pass_rate__MAX"\n'
        '"10","0.3","0.2","0.4"\n"20","0.4","0.3","0.5"\n'
    ),
    "array.json": json.dumps(RECORDS, indent=1),
    "lines.ndjson": LINES,
    "lines.txt": LINES,
    "cut-off.jsonl": LINES + '{"gpu_hou',
    "pandas.json": json.dumps({"gpu_hours": {"0": 10, "1": 20}, "pass_rate": {"0": 0.3, "1": 0.4}}),
    "pandas-split.json": json.dumps(
        {"columns": ["gpu_hours", "pass_rate"], "data": [[10, 0.3], [20, 0.4]]}
    ),
    "pandas-index.json": json.dumps({"0": RECORDS[0], "1": RECORDS[1]}),
    "pandas-table.json": json.dumps({"schema": {}, "data": RECORDS}),
    "columns.json": json.dumps({"gpu_hours": [10, 20], "pass_rate": [0.3, 0.4]}),
    "compressed.csv.gz": gzip.compress(PLAIN.encode(), mtime=0),
    "compressed.json.gz": gzip.compress(json.dumps(RECORDS).encode(), mtime=0),
}


@pytest.mark.parametrize(("name", "data"), EXPORTED.items())
def test_tables_as_other_programs_export_them(tmp_path: Path, name: str, data: str | bytes) -> None:
    (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    (curve,) = read_points(tmp_path / name)
    assert (curve.name, curve.hours.tolist()) == (name.partition(".")[0], [10, 20])
    assert curve.pass_rate.tolist() == pytest.approx([0.3, 0.4])


def test_a_parquet_file(tmp_path: Path) -> None:
    parquet.write_table(
        pyarrow.Table.from_pylist([*RECORDS, {"gpu_hours": 30}]), tmp_path / "a.parquet"
    )
    assert read_points(tmp_path / "a.parquet")[0].hours.tolist() == [10, 20]
    (tmp_path / "a.parquet").write_bytes(b"PAR1, and nothing else")
    with pytest.raises(MegarlError, match="cannot be read as Parquet"):
        read_points(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("cells", "hours"),
    {
        "1,000;0,5": 1.0,  # by the score, a comma is a decimal mark
        "1.000;0,5": 1000.0,
        "1.000;0.5": 1.0,
        "1,000;0.5": 1000.0,
        "1.234,5;0.5": 1234.5,  # each column has its own mark
        "12 345;1": 12345.0,
        "12'345.5;1": 12345.5,
        "12\u202f345,5;1": 12345.5,
        "1,234,567;1": 1234567.0,
        "1e3;1": 1000.0,
        "1,5e3;1": 1500.0,
    }.items(),
)
def test_numbers_as_people_write_them(tmp_path: Path, cells: str, hours: float) -> None:
    (curve,) = read_points(file(tmp_path, f"gpu_hours;pass_rate\n{cells}\n"))
    assert curve.hours.tolist() == [hours]


def test_rows_without_a_score_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "gpu_hours,a - pass_rate,b - pass_rate\n10,.3,\n20,.4,\n10,,.5\n"
    (curve,) = read_points(file(tmp_path, text), PointColumns(score="a - pass_rate"))
    assert curve.hours.tolist() == [10, 20]
    assert "1 of 3 rows have no a - pass_rate and are left out" in caplog.text


def test_several_scores_at_one_amount_of_compute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be of several seeds, whose column is missing; with their steps, or
    seeds, they are clear.
    """
    read_points(file(tmp_path, "gpu_hours,pass_rate,step\n10,.3,1\n10,.4,2\n"))
    read_points(file(tmp_path, "gpu_hours,pass_rate,seed\n10,.3,1\n10,.4,2\n"))
    assert not caplog.text
    assert read_points(file(tmp_path, "gpu_hours,pass_rate\n10,.3\n10,.4\n"))[0].hours.tolist() == [
        10,
        10,
    ]
    assert "several scores at gpu_hours 10 count as those of one run" in caplog.text


def test_steps_of_tensorboard(tmp_path: Path) -> None:
    path = file(tmp_path, "Wall time,Step,Value\n1.7e9,0,.2\n1.7e9,10,.3\n")
    with pytest.raises(
        MegarlError,
        match=r"a file of TensorBoard, .* give --hours-column Step --score-column Value",
    ):
        read_points(path)
    (curve,) = read_points(path, PointColumns(hours="Step", score="Value"))
    assert (curve.r0, curve.unit, curve.hours.tolist()) == (0.2, "Step", [10])


def test_eval_jsonl_is_read_as_its_run(tmp_path: Path) -> None:
    """With the column that the recipe forecasts, and without a line that a crash cut
    off.
    """
    run = run_of_two_tasks(tmp_path, TASKS + "evaluation: {forecast: code}\n")
    with (run / "eval.jsonl").open("a") as lines:
        lines.write('{"step": 4, "compu')
    (curve,) = read_points(run / "eval.jsonl")
    assert (curve.name, curve.first_epoch) == (tmp_path.name, 3.5)
    assert curve.pass_rate.tolist() == pytest.approx([0.69, 0.68, 0.67])


def test_a_pipe(tmp_path: Path) -> None:
    """As a shell makes of `<(command)`."""
    os.mkfifo(tmp_path / "points")
    writer = threading.Thread(target=lambda: (tmp_path / "points").write_text(PLAIN))
    writer.start()
    assert read_points(tmp_path / "points")[0].hours.tolist() == [10, 20]
    writer.join(timeout=10)


def test_compute_that_is_not_in_hours(tmp_path: Path) -> None:
    """Called GPU-hours, steps would lose the first 1,500, and compare with hours."""
    (curve,) = read_points(
        file(tmp_path, "flops,pass_rate\n1e21,.3\n2e21,.4\n"), PointColumns(hours="flops")
    )
    assert (curve.unit, amount(2.5e21, curve.unit)) == ("flops", "2.5e+21 flops")
    assert read_points(run(tmp_path, []), PointColumns(hours="step"))[0].unit == "step"
    (curve,) = read_points(
        file(tmp_path, "Wall Hours,pass_rate\n1,.3\n2,.4\n"), PointColumns(hours="Wall Hours")
    )
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
    "pass_rate is empty in each of its 2 rows": "gpu_hours,pass_rate\n1,\n2,nan\n",
    "row 1: gpu_hours is '', not a number": "gpu_hours,pass_rate\n,.5\n",
    "row 1: gpu_hours is 'inf', not a number": "gpu_hours,pass_rate\ninf,.5\n",
    "row 2: pass_rate is 50, .*percent, write 54.2% or divide by 100": (
        "gpu_hours,pass_rate\n1,.4\n2,50\n"
    ),
    "row 2: pass_rate is '0,5', not a number; is the comma": "gpu_hours;pass_rate\n1;0.4\n2;0,5\n",
    "row 1: gpu_hours is '1,234', not a number": "gpu_hours;pass_rate\n1,234;1\n",
    "columns 2 and 4 are both called 'pass_rate'": "gpu_hours,pass_rate,x,pass_rate \n1,.5,0,.6\n",
    "its first line has numbers only": "10,.3\n20,.4\n",
    "no column gpu_hours .*; --hours-column Step fits over steps": "Step,a - pass_rate\n1,.5\n",
    "'a - pass_rate' and 'b - pass_rate' may be meant": (
        "gpu_hours,a - pass_rate,b - pass_rate\n1,.5,.6\n"
    ),
    "pass_rate is -0.1, not a pass rate between": "gpu_hours,pass_rate\n1,-.1\n",
    "cannot be negative": "gpu_hours,pass_rate\n-1,.5\n",
    "no compute at step 3; only the score before": "step,gpu_hours,pass_rate\n3,0,.5\n",
    "compute_unit is core, gpu; it is": (
        "compute_hours,pass_rate,compute_unit\n0,.5,gpu\n9,.6,core\n"
    ),
    "compute_unit is cpu; it is gpu or": (
        "compute_hours,pass_rate,compute_unit\n0,.5,cpu\n9,.6,cpu\n"
    ),
    "falls from 9 at step 2 to 3 at step 3": "step,gpu_hours,pass_rate\n1,5,.5\n3,3,.6\n2,9,.5\n",
    "2 different scores before training": "gpu_hours,pass_rate\n0,.5\n0,.6\n",
}


def test_equal_points_of_which_one_has_no_answers(tmp_path: Path) -> None:
    rows = "0,.2,8\n10,.3,8\n10,.3,\n"
    (curve,) = read_points(file(tmp_path, f"gpu_hours,pass_rate,answers\n{rows}"))
    assert curve.pass_rate.tolist() == [0.3, 0.3]
    assert curve.answers is None


def test_how_many_answers_a_score_is_of(tmp_path: Path) -> None:
    assert (
        read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,800\n10,.3,800\n"))[0].answers
        == 800
    )
    assert (
        read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,\n10,.3,\n"))[0].answers
        is None
    )
    rows = "0,.2,200,4\n10,.3,200,4\n"
    assert (
        read_points(file(tmp_path, f"gpu_hours,pass_rate,n_prompts,samples\n{rows}"))[0].answers
        == 800
    )
    (curve,) = read_points(
        file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,400\n20,.3,100\n10,.3,400\n")
    )
    assert curve.answers == 100
    assert curve.noise is not None, "a fork may ask another number of prompts"
    assert curve.noise.tolist() == pytest.approx([0.0229, 0.0458], abs=1e-4)
    with pytest.raises(MegarlError, match="n_prompts is 'all', not a number"):
        read_points(
            file(tmp_path, f"gpu_hours,pass_rate,n_prompts,samples\n{rows.replace('200', 'all')}")
        )
    with pytest.raises(
        MegarlError, match="answers is -5; it is how many each score is the mean of"
    ):
        read_points(file(tmp_path, "gpu_hours,pass_rate,answers\n0,.2,-5\n10,.3,-5\n"))


@pytest.mark.parametrize(("message", "text"), BAD.items())
def test_bad_csv(tmp_path: Path, message: str, text: str) -> None:
    with pytest.raises(MegarlError, match=message) as error:
        read_points(file(tmp_path, text))
    assert "points.csv" in str(error.value)


@pytest.mark.parametrize(
    ("message", "text"),
    {
        "line 1: cannot be read as JSON": "{",
        "line 2: not a JSON object": '{"a":1}\n[]',
        "line 1: cannot be read as JSON .'a' is there 2 times": '{"a": 1, "a": 2}\n{"a": 1}\n',
        "row 1: not a JSON object but a list without names": "[[1, 2]]",
        "columns of different lengths: a 1, b 2": '{"a": [1], "b": [1, 2]}',
        "line 1: pass_rate is True, not a number": '{"gpu_hours": 1, "pass_rate": true}',
        "line 1: gpu_hours is 1000": f'{{"gpu_hours": 1{"0" * 400}, "pass_rate": 0.5}}',
    }.items(),
)
def test_bad_jsonl(tmp_path: Path, message: str, text: str) -> None:
    with pytest.raises(MegarlError, match=message):
        read_points(file(tmp_path, text, "points.jsonl"))


@pytest.mark.parametrize(
    ("message", "data"),
    {
        "not text in UTF-8": b"gpu_hours,pass_rate\n\xe4,.3\n",
        "it has zero bytes": b"a,b\0",
        "a workbook or a ZIP archive": b"PK\x03\x04",
        "cannot be decompressed": gzip.compress(b"gpu_hours,pass_rate\n1,.3\n", mtime=0)[:-9],
    }.items(),
)
@pytest.mark.parametrize("name", ["points.csv", "points.jsonl"])
def test_not_text(tmp_path: Path, name: str, message: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MegarlError, match=message):
        read_points(tmp_path / name)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match="no such run directory or file"):
        read_points(tmp_path / "absent.csv")
    with pytest.raises(MegarlError, match=r"no eval\.jsonl in it"):
        read_points(tmp_path)


def test_evaluation_without_a_score(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "eval.jsonl", {"step": 5, "pass_rate": math.nan, "compute_hours": 1.0})
    with pytest.raises(MegarlError, match="pass_rate is empty in each of its 1 rows"):
        read_points(tmp_path)


def test_amounts() -> None:
    assert amount(16_000, "gpu") == "16,000 GPU-hours"
    assert amount(0.12345, "core") == "0.1235 core-hours"
