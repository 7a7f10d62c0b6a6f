"""benchmarks/real_comparison.py: what counts as training, and what the table says. No
model is trained.
"""

from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.real_comparison import (
    HeldOutScore,
    MeasuredTraining,
    TrainingWatch,
    check_files,
    compare,
    measured,
    recipe_of,
    settings_of,
    table,
)
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import differences, load


class FakeTime:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def training(*pass_rates: float, seconds_per_step: float, tokens: int) -> MeasuredTraining:
    """Twenty steps of equal length; evaluations every ten steps have these
    pass rates.
    """
    ends = tuple(seconds_per_step * step for step in range(1, 21))
    scores = tuple(
        HeldOutScore(step=10 * number, seconds=10 * number * seconds_per_step, pass_rate=rate)
        for number, rate in enumerate(pass_rates)
    )
    return MeasuredTraining(tokens=(tokens,) * 20, ends=ends, scores=scores)


def test_evaluations_do_not_count_as_training() -> None:
    time = FakeTime()
    watch = TrainingWatch(time)
    watch.start()
    time.now += 4
    with watch.paused():
        time.now += 30
    time.now += 3
    assert watch.seconds() == 7


def test_a_watch_that_starts_again_forgets() -> None:
    time = FakeTime()
    watch = TrainingWatch(time)
    watch.start()
    with watch.paused():
        time.now += 30
    watch.start()
    time.now += 2
    assert watch.seconds() == 2


def test_a_runs_own_files_are_read() -> None:
    """A step ends when the next batch is handed out; core-hours are divided among the
    cores.
    """
    rows = [
        {"step": step, "generated_tokens": 1000.0 + step, "training_hours": hours}
        for step, hours in enumerate((0.002, 0.01, 0.02))
    ]
    scores = [
        {"step": 0, "training_hours": 0.0, "pass_rate": 0.1},
        {"step": 3, "training_hours": 0.03, "pass_rate": 0.7},
    ]
    found = measured(rows, scores, cores=2)
    assert found.tokens == (1000, 1001, 1002)
    assert found.ends == pytest.approx((18, 36, 54))
    assert found.scores[0] == HeldOutScore(0, 0.0, 0.1)
    assert found.first_at(0.6) == HeldOutScore(3, cast(Any, pytest.approx(54)), 0.7)


def test_the_first_score_at_least_as_high_counts() -> None:
    found = training(0.1, 0.6, 0.5, seconds_per_step=2, tokens=1)
    first = found.first_at(0.6)
    assert first is not None
    assert first.step == 10
    assert found.first_at(0.61) is None


def test_the_first_steps_do_not_count_in_the_speed() -> None:
    steady = training(0.1, seconds_per_step=4, tokens=100)
    assert steady.tokens_per_second == 25
    slow_begin = MeasuredTraining(
        tokens=(900, 900, 900, *steady.tokens[3:]),
        ends=tuple(end + 60 for end in steady.ends),
        scores=(),
    )
    assert slow_begin.tokens_per_second == 25


def test_the_table_has_both_ratios() -> None:
    fast = training(0.1, 0.6, 0.8, seconds_per_step=5, tokens=1000)
    slow = training(0.1, 0.3, 0.7, seconds_per_step=10, tokens=800)
    lines = table(fast, slow).splitlines()
    assert "| completion tokens/s | 200.0 | 80.0 | 2.50 |" in lines
    assert (
        "| seconds to a held-out pass rate of 0.5 | 50 (step 10) | 200 (step 20) | 4.00 |" in lines
    )
    assert "| held out | 0.10 0.60 0.80 | 0.10 0.30 0.70 | |" in lines


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (0.8, 0.4, "| 100 (step 20) | not in 20 steps | above 2.00 |"),
        (0.4, 0.8, "| not in 20 steps | 200 (step 20) | – |"),
        (0.4, 0.4, "| not in 20 steps | not in 20 steps | – |"),
    ],
)
def test_the_table_says_who_did_not_arrive(ours: float, theirs: float, said: str) -> None:
    fast = training(0.1, 0.2, ours, seconds_per_step=5, tokens=1000)
    slow = training(0.1, 0.2, theirs, seconds_per_step=10, tokens=1000)
    assert table(fast, slow).splitlines()[3].endswith(said)


def test_megarl_trains_as_shipped(tmp_path: Path) -> None:
    changed = [key for key, _, _ in differences(load("quickstart-real"), recipe_of(tmp_path, 30))]
    assert changed == ["run.dir", "run.steps"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    recipe = load("quickstart-real", [f"model.path={tmp_path}"])
    with pytest.raises(
        MegarlError, match=r"config.json: no such file; `make quickstart-real` makes it"
    ):
        check_files(recipe)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(MegarlError, match="--steps 3: the first 3 are not counted"):
        compare(3, "{}", None)


@pytest.mark.parametrize("text", ["[1]", "bf16=false", ""])
def test_settings_of_trl_are_an_object(text: str) -> None:
    with pytest.raises(MegarlError, match="not a JSON object"):
        settings_of(text)


def test_settings_of_trl_are_read() -> None:
    assert settings_of('{"bf16": false}') == {"bf16": False}
