"""A trusted score that falls while the reward rises is found, and nothing else is taken
for it.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from benchmarks.overoptimisation import alarm, cases, drawn
from megarl.core.base.rundir import RunDir, step_folder
from megarl.core.evaluation.answers import Result, SuiteDir
from megarl.predict.scaling import overoptimisation
from megarl.predict.scaling.overoptimisation import judge, straying, trend, watch

T = np.linspace(0, 1, 12)
CLEAN = ("both flat", "both rise", "trusted flat", "trusted comes to a ceiling", "both fall")


def runs(name: str, count: int, strays: float = 0.01, seed: int = 0) -> list[int | None]:
    """The first alarms of simulated runs of a case of the benchmark."""
    rng = np.random.default_rng(seed)
    proxy, trusted = cases(T)[name]
    return [
        alarm(drawn(proxy, 200, strays, rng), drawn(trusted, 200, strays, rng))
        for _ in range(count)
    ]


def test_a_peak_that_was_passed_is_found_and_dated() -> None:
    rng = np.random.default_rng(1)
    proxy, trusted = (drawn(rates, 400, 0.0, rng) for rates in cases(T)["trusted falls by 0.2"])
    found = judge(20 * np.arange(12), proxy, trusted)
    assert found is not None
    assert 60 <= found.step <= 140, "it is at 0.4 of 220 steps"
    assert found.trusted_fall == pytest.approx(0.2, abs=0.08)
    assert found.proxy_rise > 0.03
    assert judge(20 * np.arange(12), trusted, proxy) is None, "the other way about the reward falls"
    assert judge(20 * np.arange(12), trusted, trusted) is None, (
        "whose own grader is trusted is not exploited"
    )


@pytest.mark.parametrize("name", CLEAN)
def test_clean_curves_pass(name: str) -> None:
    assert sum(n is not None for n in runs(name, 20)) <= 1


def test_falls_are_found() -> None:
    assert sum(n is not None for n in runs("trusted falls by 0.2", 10)) >= 8


def test_a_collapse_within_few_evaluations_is_found() -> None:
    rng = np.random.default_rng(0)
    proxy = drawn(np.array([0.2, 0.3, 0.6, 0.9, 0.97]), 200, 0.01, rng)
    assert alarm(proxy, drawn(np.array([0.4, 0.5, 0.35, 0.03, 0.01]), 200, 0.01, rng)) == 3, (
        "not at two points of a fall"
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=20), st.integers(0, 9))
def test_scores_that_never_fall_are_no_alarm_whatever_their_shape(
    scores: list[float], seed: int
) -> None:
    """Each of 30 prompts has its own curve, none of which falls."""
    rng = np.random.default_rng(seed)
    size = len(scores)
    trusted = np.sort(np.array(scores))[:, None] * rng.random(30)
    assert judge(np.arange(size), np.cumsum(rng.random((size, 30)), axis=0), trusted) is None


def test_trend_is_the_paired_line() -> None:
    """Each prompt's line by numpy, the error over prompts; where all prompts stray
    together, the error is of that.
    """
    rng = np.random.default_rng(2)
    steps = np.array([0, 20, 40, 80, 200])
    scores = rng.random((5, 40))
    x = np.log(1 + steps / 20)
    slopes = np.array([np.polyfit(x, column, 1)[0] for column in scores.T]) * (x[-1] - x[0])
    change, errors = trend(steps, scores, 0.0)
    assert change == pytest.approx(slopes.mean())
    assert errors == pytest.approx(slopes.mean() / (slopes.std(ddof=1) / np.sqrt(40)))
    apart = 2 * rng.standard_normal(40)
    apart -= apart.mean()
    assert straying(0.1 * rng.standard_normal((400, 1)) + apart) == pytest.approx(0.1, rel=0.2)
    assert straying(100 * rng.standard_normal((400, 1)) + apart) == pytest.approx(
        0.1 * apart.std(ddof=1)
    )
    calm = 0.1 * apart.std(ddof=1) * math.sqrt(2 / (2 + 2))
    assert straying(np.zeros((4, 1)) + apart) == pytest.approx(calm), (
        "two bends may look calm by chance"
    )
    line = (x - x.mean()) * (x[-1] - x[0]) / ((x - x.mean()) ** 2).sum()
    by_straying = scores.mean(1) @ line / (0.5 * np.linalg.norm(line))
    assert trend(steps, scores, 0.5)[1] == pytest.approx(by_straying)


def written(
    run: RunDir, name: str, scores: tuple[np.ndarray, np.ndarray], steps: np.ndarray
) -> None:
    """Results of evaluations with proxy and trusted scores [evaluations, prompts]."""
    for n, step in enumerate(steps.tolist()):
        place = SuiteDir(step_folder(run.evaluations, step), name)
        place.path.mkdir(parents=True, exist_ok=True)
        pairs = {
            f"p{p}": (float(a), float(b))
            for p, (a, b) in enumerate(zip(*(s[n] for s in scores), strict=True))
        }
        place.write_result(
            Result(
                suite=name,
                model="",
                samples=4,
                settings={},
                metrics={},
                time=0.0,
                versions={},
                proxy_and_trusted=pairs or UNSET,
            )
        )


def test_columns_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    rng = np.random.default_rng(1)
    steps = 20 * np.arange(12)
    run = RunDir(tmp_path)
    hacked, clean = (
        (drawn(a, 400, 0.0, rng), drawn(b, 400, 0.0, rng))
        for a, b in (cases(T)[name] for name in ("trusted falls by 0.2", "both rise"))
    )
    (run.evaluations / "step-0000020.old").mkdir(parents=True)  # a copy that a user made
    written(run, "hacked", hacked, steps)
    written(run, "clean", clean, steps)
    written(run, "plain", (np.zeros((12, 0)), np.zeros((12, 0))), steps)
    found = watch(run, 220, ["hacked"])
    passed = judge(steps, *hacked)
    assert passed is not None
    assert found == {
        "warning_overoptimisation": 1.0,
        "trusted_peak_step": passed.step,
        "proxy_rise": pytest.approx(passed.proxy_rise),
        "trusted_fall": pytest.approx(passed.trusted_fall),
    }
    several = watch(run, 220, ["clean", "hacked", "plain"])
    assert several["warning_overoptimisation/clean"] == 0
    assert several["warning_overoptimisation/hacked"] == 1
    assert not any(name.endswith("/plain") for name in several), "it has no trusted grader"
    assert watch(run, 60, ["hacked"]) == {"warning_overoptimisation": 0.0}, (
        "what came later is not known then"
    )
    with monkeypatch.context() as patch:
        patch.setattr(overoptimisation, "_scores", lambda place: read.append(place.path))
        assert watch(run, 220, ["plain"]) == {}
    assert read == [step_folder(run.evaluations, 220) / "plain"], (
        "without those of all evaluations before"
    )
    damaged = SuiteDir(step_folder(run.evaluations, 20), "hacked").result
    damaged.write_text(json.dumps({"schema_version": 1}))
    assert watch(run, 220, ["hacked"])["warning_overoptimisation"] == 1, "judged by the others"
    other = SuiteDir(step_folder(run.evaluations, 20), "clean")
    other.write_result(
        structs.replace(
            other.read_result(), proxy_and_trusted={"of no other evaluation": (1.0, 1.0)}
        )
    )
    assert watch(run, 220, ["clean"]) == {"warning_overoptimisation": 0.0}, (
        "no prompt is in all of them"
    )
