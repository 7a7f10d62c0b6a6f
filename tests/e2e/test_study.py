"""A study of real runs: interrupted, continued, and read."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, megarl, quiet

LIMIT_S = 300.0


@pytest.mark.stack
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_study(workplace: Path) -> None:
    """Ctrl-C stops the run under way with a checkpoint; the same command ends the study
    with a table, plots and CSVs.
    """
    study = workplace / "runs" / "studies" / "small"
    words = [
        "study",
        "compare",
        "quickstart",
        "grpo",
        "base=quickstart",
        "--seeds",
        "0",
        "--dir",
        "runs/studies/small",
        *SMALL,
    ]
    words += ["run.steps=4", "evaluation.every=2", "pipeline.k=2"]
    metrics = study / "runs" / "quickstart-seed0" / "metrics.jsonl"
    with (workplace / "study.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl", *words],
            cwd=workplace,
            env=quiet(),
            stdout=log,
            stderr=log,
        )
        end = time.monotonic() + LIMIT_S
        while not metrics.exists():
            assert process.poll() is None, (workplace / "study.log").read_text()
            assert time.monotonic() < end, "no step within the limit"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    done = megarl(*words, cwd=workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2 done" in done.stdout
    table = (study / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in table[2:4]] == ["quickstart", "grpo"]
    for name in ("quickstart-seed0", "grpo-seed0"):
        with (study / "points" / f"{name}.csv").open() as file:
            points = list(csv.DictReader(file))
        # A score that is lost with the interruption is made up for by the next
        # version's.
        steps = [int(p["step"]) for p in points]
        assert (steps[0], steps[-1]) == (0, 4)
        assert name.startswith("quickstart") or steps == [0, 2, 4]
        hours = [float(p["compute_hours"]) for p in points]
        assert hours == sorted(hours)
        assert hours[0] > 0
    assert (study / "scaling.png").stat().st_size > 5_000
    refused = megarl(*words, "run.steps=5", cwd=workplace)
    assert refused.returncode == 2
    assert "this study began with" in refused.stderr
