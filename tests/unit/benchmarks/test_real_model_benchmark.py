"""benchmarks/real_model.py: what its tables say of a record."""

import gzip
import json
from pathlib import Path

from benchmarks.real_model import RealRun, predictions, read, signals, table

STEPS = [
    {
        "step": step,
        "groups_in_loss": 3.0,
        "entropy": 0.1,
        "grad_norm": 9.0,
        "effective_sample_size": 0.9,
        "step_seconds": 11.0,
        "truncation_rate": 0.9 if step < 10 else 0.0,
    }
    for step in range(20)
]
SCORES = (
    {"step": 0, "pass_rate": 0.05, "warning_fall": 0.0},
    {"step": 10, "pass_rate": 0.53, "warning_fall": 0.0},
    {"step": 20, "pass_rate": 0.2, "warning_fall": 1.0},
)
RUN = RealRun("fast", 1, {"learner.optimizer.lr": 5e-5}, "x86_64", {}, SCORES, tuple(STEPS))


def test_a_line_for_each_run() -> None:
    assert (
        table([RUN]).splitlines()[2]
        == "| fast | `learner.optimizer.lr=5e-05` | 1 | 0.05 0.53 0.20 | 3.00 | 0.10 | 9.00 | 0.90"
        " | 11.0 |"
    )


def test_when_it_was_said_that_the_score_has_fallen() -> None:
    line = signals([RUN]).splitlines()[2]
    assert line.endswith(" | 20 | never |")
    assert "`truncation`" in line


def test_when_it_was_said_that_the_score_is_below_its_forecast() -> None:
    forecast = {"predicted_score": "pass_rate", "predicted_least": 0.6, "predicted_least_low": 0.55}
    scores = [
        {"step": step, "pass_rate": rate, "n_prompts": 120, "samples": 2}
        for step, rate in ((30, 0.4), (40, 0.4))
    ]
    first = {"step": 20, "pass_rate": 0.6, "n_prompts": 120, "samples": 2, **forecast}
    line = signals([RealRun("low", 1, {}, "x86_64", {}, (first, *scores), ())]).splitlines()[2]
    assert line.endswith("| never | 40 |")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    head = {"name": "fast", "seed": 1, "changes": {}, "machine": "x86_64", "versions": {}}
    lines = [head, {"score": SCORES[1]}, {"step": STEPS[0]}]
    path = tmp_path / "fast.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    run = read(path)
    assert run.scores == (SCORES[1],)
    assert run.steps == (STEPS[0],)


def evaluated_often(seed: int, falls_from: int) -> RealRun:
    """A run whose scores follow a law of compute until a step,
    and are .3 from then on.
    """
    scores = []
    for step in range(0, 31, 3):
        hours = step / 100
        lawful = 0.05 + 0.7 * hours / (hours + 0.06)
        score = 0.3 if step >= falls_from else lawful
        scores.append(
            {
                "step": step,
                "pass_rate": score,
                "compute_hours": hours,
                "compute_unit": "core",
                "answers": 240,
            }
        )
    return RealRun(f"run-{seed}", seed, {"evaluation.every": 3}, "x86_64", {}, tuple(scores), ())


def test_a_law_of_half_a_run_holds_for_one_that_goes_on_and_not_for_one_that_falls(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "picture"
    runs = [evaluated_often(0, falls_from=31), evaluated_often(1, falls_from=18), RUN]
    lasting, falling, both = predictions(runs, picture).splitlines()[2:]
    assert lasting.startswith("| run-0 | `evaluation.every=3` | 0.55 | 0.")
    assert "| 0.63 | 5 of 5 |" in lasting
    assert "| 0.30 | 0 of 5 |" in falling
    assert "| 0.63 0.30 | 5 of 10 |" in both
    assert picture.with_suffix(".png").stat().st_size > 10_000
