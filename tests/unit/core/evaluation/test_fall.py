"""A fall of the held-out score, on the same prompts: falls are caught, noise and a
small dip pass.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.falling_scores import EVALUATIONS, ScoreCourse, alarms_of, falling, kinds, simulated
from megarl.core.base.rundir import step_folder
from megarl.core.evaluation.answers import Result, SuiteDir
from megarl.core.evaluation.fall import LEAST, comparisons, fall_columns, judge

STEPS = (0, 10, 20)


def scores_of(*levels: float, prompts: int = 100) -> np.ndarray:
    """So many of the prompts are right at each evaluation, the same ones as before as
    far as possible.
    """
    return np.array(
        [[float(prompt < level * prompts) for prompt in range(prompts)] for level in levels]
    )


def test_the_number_of_comparisons_by_hand() -> None:
    """Two evaluations: one. With the third, two more; with the fourth, three of one
    evaluation and one of two.
    """
    assert [comparisons(evaluations) for evaluations in (0, 1, 2, 3, 4)] == [0, 0, 1, 3, 7]


def test_the_fall_and_its_error_by_hand() -> None:
    """20 of 100 prompts turn wrong, none turns right: .2, with sqrt(.2 x .8 x 100 / 99
    / 100).
    """
    found = judge(STEPS, scores_of(0.5, 0.9, 0.7), planned=3)
    assert found is not None
    assert (found.since, found.fall) == (10, pytest.approx(0.2))
    assert found.error == pytest.approx(math.sqrt(0.2 * 0.8 / 99))


def test_what_passes() -> None:
    assert judge(STEPS, scores_of(0.5, 0.7, 0.9), planned=3) is None, "it rises"
    assert judge(STEPS, scores_of(0.9, 0.7, 0.9), planned=3) is None, "it has recovered"
    assert judge(STEPS, scores_of(0.5, 0.9, 0.86), planned=3) is None, (
        "four prompts of 100 may be chance"
    )
    assert judge(STEPS[:1], scores_of(0.5), planned=3) is None
    many = scores_of(0.5, 0.9, 0.9 - LEAST / 2, prompts=10_000)
    assert judge(STEPS, many, planned=3) is None, "certain, but small"
    assert judge(STEPS, scores_of(0.5, 0.9, 0.9 - 2 * LEAST, prompts=10_000), planned=3) is not None


def test_a_longer_run_needs_more_evidence() -> None:
    """Ten prompts of 100 fall: 3.3 standard errors."""
    scores = scores_of(0.5, 0.9, 0.8)
    assert judge(STEPS, scores, planned=3) is not None
    assert judge(STEPS, scores, planned=100) is None


def test_a_small_fall_shows_once_it_has_lasted() -> None:
    """Eight evaluations before and after a fall of .08; no single one of them proves
    it.
    """
    draw = np.random.default_rng(1)
    chance = np.repeat([0.8, 0.72], 8)[:, None]
    scores = draw.binomial(2, np.broadcast_to(chance, (16, 120))) / 2
    steps = range(0, 160, 10)
    found = [judge(steps[:end], scores[:end], planned=16) for end in range(1, 17)]
    assert found[8] is None
    assert found[15] is not None


def test_the_recorded_scores_are_called_falling_and_steady_ones_are_not() -> None:
    """.117 .487 .633 .683 .733 .821 .863 .746 .679 of a real model; the whole table is
    in benchmarks/alarms.md.
    """
    recorded = next(kind for kind in kinds() if kind.name == "the recorded scores")
    noticed = [alarms_of(recorded, np.random.default_rng(seed)) for seed in range(60)]
    assert np.mean([alarms[-2:].any() for alarms in noticed]) > 0.8
    assert not np.any([alarms[:7].any() for alarms in noticed])
    steady = [
        alarms_of(ScoreCourse("flat", np.full(EVALUATIONS, 0.8)), np.random.default_rng(seed))
        for seed in range(60)
    ]
    assert np.mean([alarms.any() for alarms in steady]) <= 0.1
    half = [
        alarms_of(ScoreCourse("falls", falling(0.5)), np.random.default_rng(seed))
        for seed in range(10)
    ]
    assert np.all([alarms[-2:].all() for alarms in half])


def test_two_simulated_scores_differ_as_those_of_the_real_model_did() -> None:
    runs = [
        simulated(ScoreCourse("flat", np.full(EVALUATIONS, 0.8)), np.random.default_rng(seed))
        for seed in range(400)
    ]
    differences = [run[0].mean() - run[1].mean() for run in runs]
    assert 0.038 < np.std(differences) < 0.047


def write(folder: Path, step: int, task: str, rates: dict[str, float] | None) -> None:
    place = SuiteDir(step_folder(folder, step), task)
    place.path.mkdir(parents=True)
    known: dict[str, Any] = {} if rates is None else {"pass_rates": rates}
    result = Result(
        suite=task, model="m", samples=1, settings={}, metrics={}, time=0.0, versions={}, **known
    )
    place.write_result(result)


def rates(right: int, prompts: int = 100) -> dict[str, float]:
    return {f"p{number}": float(number < right) for number in range(prompts)}


def test_the_columns_come_from_the_results_on_disk(tmp_path: Path) -> None:
    for step, right in zip(STEPS, (50, 90, 60), strict=True):
        write(tmp_path, step, "math", rates(right))
    found = fall_columns(tmp_path, 20, ["math"], planned=3)
    assert found == {
        "warning_fall": 1.0,
        "fall": pytest.approx(0.3),
        "fall_error": found["fall_error"],
        "fall_since": 10,
    }
    assert fall_columns(tmp_path, 10, ["math"], planned=3) == {"warning_fall": 0.0}, "as of then"
    assert fall_columns(tmp_path, 30, ["math"], planned=3) == {}, "it was not evaluated"


def test_each_task_is_judged(tmp_path: Path) -> None:
    for step, right in zip(STEPS, (50, 90, 60), strict=True):
        write(tmp_path, step, "math", rates(right))
        write(tmp_path, step, "code", rates(step))
    found = fall_columns(tmp_path, 20, ["math", "code"], planned=3)
    assert found["warning_fall/math"] == 1.0
    assert found["warning_fall/code"] == 0.0


def test_prompts_that_are_not_in_all_results_do_not_count(tmp_path: Path) -> None:
    """An evaluation of an earlier version has no pass rates; after a change of the set,
    the common prompts count.
    """
    write(tmp_path, 0, "math", None)
    write(tmp_path, 10, "math", rates(100))
    write(
        tmp_path,
        20,
        "math",
        rates(100, prompts=100) | {f"new{number}": 0.0 for number in range(300)},
    )
    assert fall_columns(tmp_path, 20, ["math"], planned=3) == {"warning_fall": 0.0}
