"""What held-out scores warn of, and what metrics show beside a fall: named if they show
it, and not if they do not.
"""

import pytest

from megarl.core.base.rundir import Row
from megarl.run.scores import NEWEST, best_of, score_warnings, signs_beside

SCORES = (0.117, 0.487, 0.633, 0.683, 0.733, 0.821, 0.863, 0.746, 0.679)
"""A real model had these, every ten steps."""
FALLEN: Row = {"warning_fall": 1.0, "fall": 0.183, "fall_error": 0.042, "fall_since": 60}
WELL: Row = {
    "zero_variance_share": 0.3,
    "groups_in_loss": 8.0,
    "entropy": 0.5,
    "effective_sample_size": 0.95,
    "grad_norm": 0.4,
}


def evaluations() -> list[Row]:
    return [
        {"step": 10 * n, "pass_rate": score, "n_prompts": 120, "samples": 2}
        for n, score in enumerate(SCORES)
    ]


def test_the_best_is_the_first_of_equal_ones() -> None:
    rows = evaluations()
    assert best_of(rows)["step"] == 60
    assert best_of([*rows, rows[6] | {"step": 90}])["step"] == 60
    assert best_of([]) == best_of(rows, "pass_rate/code") == {}


def test_a_fall_says_since_when_how_far_and_what_to_do() -> None:
    rows = evaluations()
    rows[-1] |= FALLEN
    (warning,) = score_warnings(rows, [WELL], 1.0)
    assert warning.name == "fall of the held-out score"
    for part in (
        "held out: the score has fallen by 0.183 ± 0.042 since step 60, on the same prompts",
        "it is 0.679 at step 80, and was 0.863 at its best, step 60",
        "The metrics of the last step show no usual cause",
        "checkpoint.keep_best",
    ):
        assert part in warning.text
    assert (
        score_warnings([*rows, rows[0] | {"step": 90, "warning_fall": 0.0}], [WELL], 1.0) == []
    ), "it is over"


def test_a_fall_of_one_task_names_it() -> None:
    rows = [row | {"pass_rate/code": 0.9 - row["pass_rate"]} for row in evaluations()]
    rows[-1] |= {f"{name}/code": value for name, value in FALLEN.items()} | {
        "warning_fall/math": 0.0
    }
    (warning,) = score_warnings(rows, [WELL], 1.0)
    assert warning.text.startswith("code: the score has fallen")
    assert "was 0.783 at its best, step 0" in warning.text


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (
            {"zero_variance_share": 0.75, "groups_in_loss": 3.0},
            "few groups are left in the loss (25%, 3.0 a step)",
        ),
        ({"entropy": 0.05}, "low entropy (0.050 nats)"),
        ({"effective_sample_size": 0.73}, "a small effective sample size (0.73)"),
        (
            {"grad_norm": 30.0},
            "gradients clipped in 100% of the steps (norm 30.0 on average, clipped at 1)",
        ),
    ],
)
def test_a_cause_is_named_if_the_metrics_show_it(measured: Row, named: str) -> None:
    steps = [WELL | measured] * NEWEST
    assert signs_beside(steps, 1.0) == f"Beside it, in the last {NEWEST} steps: {named}"
    assert "no usual cause" in signs_beside([WELL] * NEWEST, 1.0)
    assert "no usual cause" in signs_beside([{"step": 1}], 1.0), "what was not measured is no sign"


def test_several_causes_are_all_named() -> None:
    told = signs_beside([{"entropy": 0.05, "effective_sample_size": 0.7}], 1.0)
    assert (
        told
        == "Beside it, in the last step: low entropy (0.050 nats); a small effective sample size"
        " (0.70)"
    )
