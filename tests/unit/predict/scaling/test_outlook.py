"""The outlook of a run whose curve is known."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.evaluation.departure import lasting_departure
from megarl.core.evaluation.forecast import forecast_text, not_worth_it
from megarl.core.recipe import from_tree
from megarl.predict.scaling.extrapolate import forecast

A = 0.61
B = 1.92
C_MID = 2542.0
R_0 = 0.3


def rate(hours: float) -> float:
    return R_0 + (A - R_0) / (1 + (C_MID / hours) ** B)


def rows(
    count: int, hours_each: float, steps_each: int = 100, noise: float = 0.0
) -> list[dict[str, Any]]:
    """Evaluations of the paper's curve, the first at step 0."""
    rng = np.random.default_rng(0)
    found: list[dict[str, Any]] = [{"step": 0, "compute_hours": 0.0, "pass_rate": R_0}]
    for n in range(1, count + 1):
        score = rate(n * hours_each) + noise * rng.standard_normal()
        found.append({"step": n * steps_each, "compute_hours": n * hours_each, "pass_rate": score})
    return [row | {"compute_unit": "gpu", "n_prompts": 1000, "samples": 16} for row in found]


def test_known_curve() -> None:
    """20 evaluations to 8,000 hours, of a run that is half done."""
    found = forecast(rows(20, 400.0), [], steps=4000)
    assert found["predicted_hours"] == 16_000
    assert found["predicted_final"] == pytest.approx(rate(16_000), abs=4e-3)
    assert found["predicted_final_low"] <= rate(16_000) <= found["predicted_final_high"]
    assert found["predicted_asymptote"] == pytest.approx(A, abs=2e-3)
    assert found["predicted_gain"] == pytest.approx(rate(9_000) - rate(8_000), abs=2e-3)
    assert found["predicted_rest_high"] >= rate(16_000) - rate(8_000)
    assert found["predicted_least"] == pytest.approx(rate(8_000), abs=4e-3), "the law does not fall"
    assert found["predicted_least_low"] <= rate(8_000)


def test_a_run_that_falls_behind_its_forecasts_is_noticed_and_one_that_follows_them_is_not() -> (
    None
):
    """The paper's curve with the noise of its 16,000 answers; from the twelfth
    evaluation on the other run loses .1.
    """
    good = rows(14, 600.0, noise=0.004)
    bad = [row | {"pass_rate": row["pass_rate"] - 0.1 * (row["step"] >= 1200)} for row in good]
    for run, alarms in ((good, []), (bad, [1300, 1400])):
        with_forecasts = run[:9] + [
            row | forecast(run[: n + 1], [], 1400) for n, row in enumerate(run) if n >= 9
        ]
        found = [
            with_forecasts[end - 1]["step"]
            for end in range(1, 16)
            if lasting_departure(with_forecasts[:end])
        ]
        assert found == alarms


def test_the_rest_is_worth_its_price_or_not() -> None:
    """60,000 hours of a law whose midpoint is 2,542: the last 3,000 bring .00002, and
    .01 at most.
    """
    found = rows(60, 1000.0, noise=0.002)
    row = found[-1] | forecast(found, [], steps=6300)
    assert row["predicted_hours"] == pytest.approx(63_000)
    assert 0 < row["predicted_rest_high"] < 0.015
    assert not_worth_it(row, "gain < 1e-5 per GPU-hour").startswith(
        "the last 3,000 GPU-hours are predicted to gain 0.0"
    )
    assert not_worth_it(row, "gain < 1e-7 per GPU-hour") == ""
    assert not_worth_it(row, "gain < 1e-5 per core-hour") == "", "the price of another unit"
    assert not_worth_it(row, "") == ""
    assert forecast_text(row).endswith("in the rest")
    assert forecast_text(rows(1, 1.0)[0]) == ""


@pytest.mark.parametrize(
    "price",
    [
        "gain < 1.2.3 per GPU-hour",
        "gain < . per core-hour",
        "gain < 1e-5",
        "gain > 1 per GPU-hour",
        "x",
    ],
)
def test_a_price_that_is_none_is_refused_when_the_recipe_is_read(price: str) -> None:
    with pytest.raises(MegarlError, match=r"run\.stop_when"):
        from_tree({"run": {"stop_when": price}})


@pytest.mark.parametrize(
    "price", ["", "gain < .5 per core-hour", "gain < 0.02 per GPU-hour", "gain < 1e-5 per GPU-hour"]
)
def test_a_price_is_read(price: str) -> None:
    assert from_tree({"run": {"stop_when": price}}).run.stop_when == price


def test_it_is_worth_it_before_the_midpoint() -> None:
    """However flat the first points look: what the rest may bring at best is what
    counts.
    """
    found = rows(9, 100.0, noise=0.004)
    row = found[-1] | forecast(found, [], steps=100_000)
    assert row["predicted_rest_high"] > 0.1
    assert not_worth_it(row, "gain < 1e-6 per GPU-hour") == ""
    assert not_worth_it(rows(2, 100.0)[-1], "gain < 1 per GPU-hour") == "", "no forecast, no end"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_points(count: int) -> None:
    assert forecast(rows(count, 400.0), [], steps=4000) == {}


def test_of_a_task() -> None:
    """The forecast, its noise and its words are of the named task, whatever the others
    do.
    """
    of_task = [
        row
        | {"pass_rate": 0.5, "n_prompts": 1500}
        | {f"{key}/code": row[key] for key in ("pass_rate", "n_prompts")}
        for row in rows(20, 400.0)
    ]
    found = forecast(of_task, [], 4000, "pass_rate/code")
    alone = forecast(rows(20, 400.0), [], 4000)
    assert found == alone | {"predicted_score": "pass_rate/code"}
    assert forecast_text(of_task[-1] | found).startswith("code 0.60")
    assert forecast(of_task, [], 4000) == {}, (
        "a constant, which is what the others make of it, has no curve"
    )


def test_steps_behind_the_early_hours_are_not_read() -> None:
    """There are gigabytes of them in a long run, and each evaluation would read them
    all.
    """

    def steps(epoch: float) -> Iterator[dict[str, Any]]:
        yield {"step": 0, "epoch": 0.0, "compute_hours": 1.0}
        yield {"step": 1, "epoch": epoch, "compute_hours": 900.0}
        yield {"step": 2, "epoch": 0.0, "compute_hours": 1501.0}
        pytest.fail("read on")

    for epoch in (0.0, 1.0):
        assert forecast(rows(20, 400.0), steps(epoch), steps=4000)["predicted_hours"] == 16_000
