"""`megarl scaling` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl import cli
from megarl.core.base.rundir import append_jsonl
from megarl.predict.scaling.points import read_points
from megarl.predict.scaling.published import csv_of, law_named, published, synthetic
from tests.unit.predict.scaling.curves import HOURS

KEYS = {
    "form",
    "A",
    "B",
    "C_mid",
    "R_0",
    "r0_from",
    "score_before",
    "sse",
    "rmse",
    "r2",
    "n",
    "window",
    "A_interval",
    "B_interval",
    "C_mid_interval",
    "warnings",
}


def scaling(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert cli.main(["scaling", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


@pytest.fixture
def points(tmp_path: Path) -> Path:
    return write(tmp_path / "mine.csv", "scalerl-8b")


def write(path: Path, name: str, seeds: int = 1) -> Path:
    path.write_text(
        csv_of([synthetic(law_named(name), HOURS, seed) for seed in range(seeds)], "SYNTHETIC")
    )
    return path


def test_fit_as_json(points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(scaling(capsys, "fit", points, "--until", 8000, "--json"))
    assert set(found) == KEYS
    assert found["A"] == pytest.approx(0.61, abs=0.02)
    assert found["window"] == [1500, 8000]


def test_fit_as_table(points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = scaling(capsys, "fit", points)
    for shown in (
        "mine",
        "C_mid, GPU-hours",
        "logistic",
        "power",
        "(fitted; the score before training is 0.39",
        "1,500 to 16,000 GPU-hours",
    ):
        assert shown in text


def test_fit_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "seeds.csv", "scalerl-8b", seeds=3)
    text = scaling(capsys, "fit", path)
    for shown in ("pooled", "seed 0", "seed 2", "A of the 3 seeds alone"):
        assert shown in text
    one = json.loads(scaling(capsys, "fit", path, "--seed", 1, "--json"))
    assert one["n"] == 30
    assert "no seed 9" in scaling(capsys, "fit", path, "--seed", 9, status=2)


def test_fit_of_a_cpu_run_says_core_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = synthetic(law_named("scalerl-8b"), HOURS, 0)
    for step, (hours, rate) in enumerate(
        [(1, curve.r0), *zip(curve.hours, curve.pass_rate, strict=True)]
    ):
        row = {
            "step": step,
            "pass_rate": rate,
            "compute_hours": hours / 1e4,
            "compute_unit": "core",
        }
        append_jsonl(tmp_path / "eval.jsonl", row)
    text = scaling(capsys, "fit", tmp_path)
    assert "C_mid, core-hours" in text
    assert "not GPU-hours" in text


def test_extrapolate(points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("extrapolate", points, "--until", 8000)
    found = json.loads(scaling(capsys, *asked, "--to", 16_000, "--json"))
    assert found["interval"][0] < found["pass_rate"] < found["interval"][1]
    assert found["later"]["n"] == 16
    assert "16 points are later" in (near := scaling(capsys, *asked, "--to", 16_000))
    assert "times the compute" not in near
    assert "warning: that is 12 times the compute of the last point" in scaling(
        capsys, *asked, "--to", 100_000
    )
    assert "0.5 is reached after 2," in scaling(capsys, *asked, "--reach", 0.5)
    assert "0.9 is never reached" in scaling(capsys, *asked, "--reach", 0.9)
    assert "--to is 0" in scaling(capsys, *asked, "--to", 0, status=2)


def test_compare_draws(points: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other.csv", "loo-ppo-off-policy-8")
    text = scaling(capsys, "compare", points, other, "-o", tmp_path / "pictures" / "both")
    assert "same ceiling within 0.02" in text
    names = {"both.png", "both.svg", "both.html", "both-efficiency.png", "both-efficiency.svg"}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == names
    found = json.loads(scaling(capsys, "compare", points, other, "--json"))
    assert {row["name"] for row in found["runs"]} == {"mine", "other"}
    assert "two runs or more" in scaling(capsys, "compare", points, status=2)


def test_transfer(points: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    larger = write(tmp_path / "larger.csv", "scout-17bx16")
    sources = (f"8e9={points}", f"17e9={larger}", "--size", 70e9, "--to", 20000)
    found = json.loads(scaling(capsys, "transfer", *sources, "--json"))
    assert 0.61 < found["A"] < 0.9
    assert found["A_interval"][0] < found["A"] < found["A_interval"][1]
    text = scaling(capsys, "transfer", *sources, "--r0", 0.45)
    assert "7e+10 parameters" in text
    assert "At 20,000 GPU-hours a pass rate of" in text
    assert "2 sizes hardly show" in text
    assert "1 size cannot show" in scaling(
        capsys, "transfer", f"8e9={points}", "--size", 70e9, status=2
    )


@pytest.mark.parametrize("hours", ["-5", "0", "nan", "inf"])
def test_no_compute(
    hours: str, points: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"--to is {hours}; it is compute in hours, finite and above 0"
    picture = ("-o", tmp_path / "picture")
    sized = (f"8e9={points}", f"17e9={points}", "--size", 70e9)
    for words in (
        ("transfer", *sized),
        ("extrapolate", points),
        ("plot", points, *picture),
        ("compare", points, points),
    ):
        assert said in scaling(capsys, *words, f"--to={hours}", status=2), words
    synthetic = ("published", "--synthetic", "scalerl-8b", f"--hours={hours}")
    assert f"--hours is {hours}; it is compute" in scaling(capsys, *synthetic, status=2)


@pytest.mark.parametrize("score", ["-0.1", "1.5", "nan"])
def test_no_pass_rate(score: str, points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = scaling(capsys, "extrapolate", points, f"--reach={score}", "--json", status=2)
    assert f"--reach is {score}; it is a pass rate, from 0 to 1" in said


def test_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(json.loads(scaling(capsys, "published", "--json"))) == 23
    text = scaling(capsys, "published")
    assert all(law.name in text for law in published())
    assert "scout-17bx16: does not reproduce its own figure's points" in text
    assert "batch-2048: fitted up to 50,000 GPU-hours and run to 100,000 (figure 1)." in text
    assert [law.name for law in published() if law.figure == 1] == ["scout-17bx16", "batch-2048"]


def test_published_curves_begin_where_the_papers_figure_does() -> None:
    """Figure 1 of arXiv 2510.13786: the run of 100,000 GPU-hours ends at 0.6415. From
    an R_0 of 0.3 its fit would end 0.0043 below that.
    """
    law = law_named("batch-2048")
    assert law.r0 == 0.40
    assert float(law(np.array([1e5]))[0]) == pytest.approx(0.6415, abs=0.0025)


def test_synthetic_points_are_labelled_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = scaling(
        capsys, "published", "--synthetic", "batch-2048", "--hours", 1e5, "--evaluations", 74
    )
    assert text.startswith("# SYNTHETIC, no run: drawn from the published fit batch-2048")
    (tmp_path / "long.csv").write_text(text)
    (curve,) = read_points(tmp_path / "long.csv")
    assert (len(curve.hours), curve.hours[-1]) == (74, 1e5)
    assert curve.r0 == pytest.approx(0.4, abs=0.02)
    assert "no C_mid is published" in scaling(
        capsys, "published", "--synthetic", "recipe-grpo", status=2
    )
    assert "no published fit 'x'" in scaling(capsys, "published", "--synthetic", "x", status=2)


def test_committed_points_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[4] / "docs" / "scaling"
    made = {"scalerl-8b": ("--seeds", 3), "context-32k": ("--hours", 45_000)}
    assert {path.name for path in folder.iterdir()} == {f"synthetic-{name}.csv" for name in made}
    for name, options in made.items():
        text = scaling(capsys, "published", "--synthetic", name, *options)
        assert (folder / f"synthetic-{name}.csv").read_text() == text


def test_a_fit_imports_neither_torch_nor_scipy_nor_matplotlib(points: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.csv", "loo-dapo-loss")
    code = f"""
import sys
from megarl.cli import main
main(["scaling", "fit", {str(points)!r}])
main(["scaling", "extrapolate", {str(points)!r}, "--to", "1e5"])
main(["scaling", "compare", {str(points)!r}, {str(other)!r}])
heavy = {{"torch", "transformers", "scipy", "matplotlib", "megarl.core.recipe"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
