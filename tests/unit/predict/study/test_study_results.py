"""The table of a study against runs whose numbers are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import append_jsonl
from megarl.predict.study import results
from megarl.predict.study.plan import Study, prepare
from megarl.predict.study.running import side_by_side

TRUTH = {"quickstart": (0.9, 2.0, 0.02), "grpo": (0.7, 2.0, 0.04)}  # A, B, C_mid
R_0 = 0.4


def sigmoid(hours: np.ndarray, a: float, b: float, c_mid: float) -> np.ndarray:
    return R_0 + (a - R_0) / (1 + (c_mid / hours) ** b)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two recipes, two seeds, whose pass rates lie on known curves."""
    study = prepare(tmp_path / "study", side_by_side(list(TRUTH), ["base=quickstart"]), (0, 1))
    for task in study.tasks:
        task.rundir.create()
        rate = 0.01 if task.variant == "quickstart" else 0.008  # hours an evaluation
        hours = rate * np.arange(1, 13)
        shift = 0.002 * (1 if task.seed else -1)
        for step in range(12):
            lag = step / 2 + (1.0 if task.variant == "quickstart" else 0.0)
            append_jsonl(
                task.rundir.metrics, {"step": step, "generated_tokens": 10.0, "lag_mean": lag}
            )
        points = [
            (0.0, R_0),
            *zip(hours, sigmoid(hours, *TRUTH[task.variant]) + shift, strict=True),
        ]
        for step, (hour, value) in enumerate(points):
            row = {
                "step": step,
                "compute_hours": float(hour),
                "pass_rate": float(value),
                "compute_unit": "core",
            }
            append_jsonl(task.rundir.eval, row | {"n_prompts": 10_000, "samples": 4})
        task.rundir.summary.write_text('{"outcome": "finished"}')
    return study


def test_table(study: Study) -> None:
    rows = {row.variant: row for row in results.collect(study)}
    for variant, (a, b, c_mid) in TRUTH.items():
        fit = rows[variant].fit
        assert fit is not None
        assert (fit.A, fit.B, fit.C_mid) == pytest.approx((a, b, c_mid), rel=0.02)
    shared = 0.008 * 12  # the least compute that a run reached
    assert np.mean(rows["quickstart"].at_equal_compute) == pytest.approx(
        float(sigmoid(np.array(shared), 0.9, 2.0, 0.02)), abs=2e-3
    )
    text = results.markdown(list(rows.values()))
    last = float(sigmoid(np.array(0.12), 0.9, 2.0, 0.02))
    assert (
        f"| quickstart | 2 | 0.400 | {last:.3f} ± 0.003 |" in text
    )  # 0.002 around it: sqrt(2) x 0.002
    assert "core-hours" in text
    lag = results.HEADINGS.index("lag")
    assert [results.cells(rows[variant])[lag] for variant in TRUTH] == ["3.75", "2.75"]
    held = {variant: row.at_ceiling for variant, row in rows.items()}
    ceilings = {round(fit.A, 5) for fit in held.values() if fit is not None}
    assert len(ceilings) == 1  # B stands at one A
    (ceiling,) = ceilings
    assert f"B with A held at {ceiling:.3f}" in text
    assert (
        "- A is more than 0.02 from that at which B is held, so B is no speed: quickstart,"
        " grpo" in text
    )
    assert all(f" | {fit.B:.2f} [" in text for fit in held.values() if fit is not None)


def test_files(study: Study) -> None:
    assert results.write(study, Console(quiet=True)) == 0
    written = sorted(str(p.relative_to(study.path)) for p in study.path.glob("**/*.csv"))
    assert written == [f"points/{v}-seed{s}.csv" for v in sorted(TRUTH) for s in (0, 1)]
    lines = (study.path / written[-1]).read_text().splitlines()
    assert lines[0] == "compute_hours,pass_rate,step,tokens,seed,compute_unit,lag"
    assert lines[1] == "0.000000,0.400000,0,0,1,core,0.0"
    assert lines[3].split(",")[2:4] == ["2", "20"]  # two steps of ten tokens
    assert [line.split(",")[-1] for line in lines[3:5]] == [
        "1.25",
        "1.5",
    ]  # means of 1, 1.5 and of 1, 1.5, 2
    for picture in ("scaling.png", "scaling.svg", "final.png", "final.svg"):
        assert (study.path / picture).stat().st_size > 5_000
    first, *others = results.collect(study)
    results.plot_final([first._replace(fit=None), *others], study.path / "final")
    assert "asymptote A" in (study.path / "final.svg").read_text(), (
        "also where the first variant has no fit"
    )


def test_unfinished_study(study: Study) -> None:
    """Runs that have not finished are named and not counted."""
    for task in study.tasks[:3]:
        task.rundir.summary.unlink()
    results.write(study, Console(quiet=True))
    assert [(row.variant, len(row.runs)) for row in results.collect(study)] == [("grpo", 1)]
    table = (study.path / "table.md").read_text()
    assert "- not finished: quickstart-seed0, grpo-seed0, quickstart-seed1" in table
    assert [p.name for p in (study.path / "points").iterdir()] == ["grpo-seed1.csv"]


def test_nothing_to_show(tmp_path: Path) -> None:
    study = prepare(tmp_path / "study", side_by_side(["quickstart"], []), (0,))
    with pytest.raises(MegarlError, match="no run has finished yet"):
        results.write(study, Console(quiet=True))
    assert json.loads((study.path / "study.json").read_text())["seeds"] == [0]
