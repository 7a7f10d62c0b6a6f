"""An alarm for a score outside what an earlier forecast allows: falls are caught, and
the answers' noise may pass.
"""

import math
from typing import Any

import numpy as np
import pytest

from megarl.core.base.rundir import Row
from megarl.core.evaluation.departure import lasting_departure
from megarl.run.scores import score_warnings

ANSWERS = 240


def evaluation(
    step: int, score: float, least: float | None = None, low: float = 0.0, **more: object
) -> Row:
    row: Row = {"step": step, "pass_rate": score, "n_prompts": ANSWERS // 2, "samples": 2} | more
    if least is None:
        return row
    return row | {
        "predicted_score": "pass_rate",
        "predicted_least": least,
        "predicted_least_low": low,
    }


GOOD = [evaluation(0, 0.2), evaluation(10, 0.5), evaluation(20, 0.6, 0.58, 0.53)]
"""The newest has a forecast: .58, with .53 at the lower end of its interval."""


def test_two_scores_below_one_earlier_forecast_are_a_fall() -> None:
    """By hand: noise 1.96 x sqrt(.45 x .55 / 240) = .063; .58 - hypot(.05, .063) =
    .4996.
    """
    bound = 0.58 - math.hypot(0.05, 1.96 * math.sqrt(0.45 * 0.55 / ANSWERS))
    assert bound == pytest.approx(0.4996, abs=1e-4)
    found = lasting_departure([*GOOD, evaluation(30, 0.45), evaluation(40, 0.44)])
    assert found is not None
    assert (found.score, found.step, found.bound, found.forecast_step) == (0.44, 40, 0.58, 20)
    assert not lasting_departure([*GOOD, evaluation(30, 0.45)]), "one may be chance"
    assert not lasting_departure([*GOOD, evaluation(30, 0.45), evaluation(40, 0.52)]), (
        "it has recovered"
    )
    assert not lasting_departure([*GOOD, evaluation(30, 0.51), evaluation(40, 0.51)]), (
        "the answers' noise explains it"
    )
    few = [evaluation(step, 0.45, n_prompts=20) for step in (30, 40)]
    assert not lasting_departure([*GOOD, *few]), "there is more noise with fewer answers"


def test_a_forecast_from_the_fallen_scores_does_not_hide_the_fall() -> None:
    """Forecasts follow the run down; the earlier one counts. A rise above them is no
    alarm.
    """
    down = [
        evaluation(30, 0.45, 0.50, 0.42),
        evaluation(40, 0.44, 0.46, 0.40),
        evaluation(50, 0.43, 0.44, 0.38),
    ]
    assert lasting_departure([*GOOD, *down]) is not None
    assert not lasting_departure(
        [*GOOD, *(evaluation(step, 0.95, 0.9, 0.85) for step in (30, 40, 50))]
    )
    assert not lasting_departure([])
    assert not lasting_departure([evaluation(10 * n, 0.5 - 0.1 * n) for n in range(4)]), (
        "without a forecast there is no judgement"
    )


def test_a_rise_above_the_last_forecast_is_noticed_until_forecasts_follow() -> None:
    """By hand: noise 1.96 x sqrt(.75 x .25 / 240) = .0548; .65 + hypot(.03, .0548) =
    .7125.
    """
    allowed = {"predicted_most": 0.65, "predicted_most_high": 0.68}
    before = [*GOOD[:2], GOOD[2] | allowed]
    found = lasting_departure([*before, evaluation(30, 0.75), evaluation(40, 0.76)])
    assert found is not None
    assert (found.below, found.score, found.bound, found.forecast_step) == (False, 0.76, 0.65, 20)
    assert lasting_departure([*before, evaluation(30, 0.70), evaluation(40, 0.76)]) is None, (
        "one may be chance"
    )
    high = [
        evaluation(30, 0.75) | allowed,
        evaluation(40, 0.76) | {"predicted_most": 0.77, "predicted_most_high": 0.8},
    ]
    assert lasting_departure([*before, *high, evaluation(50, 0.77), evaluation(60, 0.76)]) is None
    (warning,) = score_warnings([*before, evaluation(30, 0.75), evaluation(40, 0.76)], [], 1.0)
    assert warning.name == "rise above the forecast"
    assert "risen to 0.760 at step 40" in warning.text


def test_noise_alone_seldom_alarms() -> None:
    """2,000 runs of five evaluations each, whose true scores the forecast's own
    interval has drawn.
    """
    draw = np.random.default_rng(0)
    alarms = 0
    truths = draw.normal(0.58, (0.58 - 0.53) / 1.96, (2000, 1))
    for scores in draw.binomial(ANSWERS, truths, (2000, 5)) / ANSWERS:
        rows = [*GOOD, *(evaluation(30 + 10 * n, float(score)) for n, score in enumerate(scores))]
        alarms += any(lasting_departure(rows[:end]) for end in range(len(GOOD) + 2, len(rows) + 1))
    assert alarms / 2000 < 0.02
    falls = draw.binomial(ANSWERS, 0.42, (500, 3)) / ANSWERS
    noticed = [
        [*GOOD, *(evaluation(30 + 10 * n, float(score)) for n, score in enumerate(each))]
        for each in falls
    ]
    assert np.mean([lasting_departure(rows) is not None for rows in noticed]) > 0.9, (
        "a fall of .16 is noticed"
    )


def test_the_score_that_is_forecast_is_the_one_that_is_judged() -> None:
    of_code: dict[str, Any] = {
        "predicted_score": "pass_rate/code",
        "predicted_least": 0.58,
        "predicted_least_low": 0.53,
    }
    high = [
        evaluation(step, 0.9, **{"pass_rate/code": 0.4, "n_prompts/code": 120}) for step in (30, 40)
    ]
    found = lasting_departure([evaluation(20, 0.9, **of_code), *high])
    assert found is not None
    assert (found.name, found.score) == ("pass_rate/code", 0.4)
    suite = [row | {"samples/code": 0.01} for row in high]
    assert not lasting_departure([evaluation(20, 0.9, **of_code), *suite]), (
        "a suite has its own number of answers"
    )
    without = [evaluation(step, 0.9) for step in (30, 40)]
    assert not lasting_departure([evaluation(20, 0.9, **of_code), *without]), (
        "the task is no longer scored"
    )


def test_the_warning_says_what_to_do() -> None:
    (warning,) = score_warnings([*GOOD, evaluation(30, 0.45), evaluation(40, 0.44)], [], 1.0)
    assert warning.name == "fall below the forecast"
    assert "held out: the score has fallen to 0.440 at step 40" in warning.text
    assert "by the forecast of step 20 it would stay at 0.580 or above" in warning.text
    assert score_warnings(GOOD, [], 1.0) == score_warnings([], [], 1.0) == []
