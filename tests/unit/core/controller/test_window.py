"""`pipeline.window: auto` in the simulator: the law on every schedule, as many tokens a
second with less lag, no swinging.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.admission import Admission
from megarl.core.controller.window import Window
from megarl.core.journal.records import PublishedVersion, State
from megarl.core.recipe import Recipe, from_tree
from megarl.predict.planning import simulate
from megarl.predict.planning.simulate import Costs, SimulatedStep, summary
from megarl.predict.planning.workload import LogNormal, workload

PROMPTS = 16
GENERATIONS = 4
MEAN = 200
BATCH_S = PROMPTS * GENERATIONS * MEAN * 0.0003 / 2
"""Seconds in which two servers generate a batch, if a decode step costs 0.3 ms for each
request.
"""


def recipe(
    window: str, servers: int = 2, prompts: int = PROMPTS, every: int = 1000, **pipeline: Any
) -> Recipe:
    return from_tree(
        {
            "run": {"steps": 1000},
            "resources": {"servers": servers},
            "batch": {"prompts": prompts},
            "sampling": {"generations": GENERATIONS},
            "length": {"prompt_tokens": 8, "thinking_tokens": [900, 1000], "answer_tokens": 100},
            "pipeline": {"window": window, **pipeline},
            "evaluation": {"every": every, "prompts": 10, "samples": 4},
        }
    )


class Growing:
    """Lengths with a mean of 60 tokens that grow by so much a step,
    to at most 1,100.
    """

    def __init__(self, growth: float) -> None:
        self._growth = growth
        self._groups = 0

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        mean = 60 * self._growth ** (self._groups / PROMPTS)
        self._groups += 1
        return LogNormal(mean, 0.5, 1100).draw(random, count)


def run(
    made: Recipe,
    steps: int,
    train: float,
    per_request: float = 0.0,
    growth: float = 1.0,
    evaluate: bool = False,
) -> tuple[list[SimulatedStep], dict[int, float]]:
    """Return steps, and the window by version. A decode step takes 10 ms, or
    `per_request` for each request.
    """
    random = np.random.default_rng(99)
    costs = Costs(
        step_seconds=(
            (lambda running, held: per_request * running)
            if per_request
            else lambda running, held: 0.01
        ),
        train_seconds=lambda lengths: train * (1 + 0.05 * random.standard_normal()),
        transfer=0.02 * train,
        parity=0.0,
        limit=256,
    )
    work = workload(made, LogNormal(MEAN, 0.5, 1100), 1.0, 0)
    if growth > 1:
        work = replace(work, lengths=Growing(growth))
    windows = {}

    class Watched(Window):
        def note_published(self, version: int, evaluation: int) -> None:
            super().note_published(version, evaluation)
            windows[version] = self.batches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.core.controller.pipeline.Window", Watched)
        return simulate.simulate(made, work, costs, steps, 0, evaluate), windows


def after(steps: list[SimulatedStep], servers: int = 2) -> simulate.Summary:
    return summary(steps, servers, 30)


@pytest.mark.parametrize(
    ("train", "per_request", "most"),
    [
        (
            20.0,
            0.0,
            1.0,
        ),  # the longest answers of batches take 5 to 9 s, whatever runs beside them: half a step
        (10.0, 0.0, 2.0),  # most of a step
        (BATCH_S / 0.3, 0.0003, 1.0),  # servers are busy for 0.3 of a step
        (BATCH_S / 0.8, 0.0003, 4.0),
    ],
)
def test_a_learner_that_limits_waits_no_more_and_trains_fresher_tokens(
    train: float, per_request: float, most: float
) -> None:
    """With a full window it never waits, and every token has a lag of k = 8
    (tests/unit/predict/planning/test_simulate.py).
    """
    auto = after(run(recipe("auto"), 80, train, per_request)[0])
    assert auto.lag_mean <= most < 8 * 2 / 3
    assert auto.learner_idle < 0.005


@pytest.mark.parametrize("per_request", [0.0, 0.0003])
def test_servers_that_limit_keep_the_whole_window(per_request: float) -> None:
    """Generation takes longer than k steps of training: no prompt is ever held back."""
    _, windows = run(recipe("auto"), 40, 0.5, per_request)
    assert set(windows.values()) == {9.0}


def test_noise_does_not_swing_it() -> None:
    """Servers busy for 0.8 of a step, whose times vary by half: the window settles, and
    is soon left alone.
    """
    windows = list(run(recipe("auto"), 200, BATCH_S / 0.8, 0.0003)[1].values())
    assert min(windows) < 9.0
    assert len(set(windows[100:])) == 1
    turns = sum(
        (b - a) * (c - b) < 0 for a, b, c in zip(windows, windows[1:], windows[2:], strict=False)
    )
    assert turns <= 2


def test_longer_answers_are_followed() -> None:
    """Answers grow tenfold over 120 steps, so the longest take three steps instead of
    half of one: it opens in time.
    """
    steps, windows = run(recipe("auto"), 150, 4.0, growth=1.02)
    assert min(windows.values()) <= 3 < windows[149]
    assert after(steps).learner_idle < 0.002


@pytest.mark.parametrize(
    ("servers", "train", "per_request"), [(1, 12.0, 0.0), (2, BATCH_S / 0.8, 0.0003)]
)
def test_it_is_open_before_an_evaluation(servers: int, train: float, per_request: float) -> None:
    """An evaluation holds the only server, or one of two that are busy for 0.8 of a
    step: as with a full window, the learner never waits, before, during and after it.
    """
    made = recipe("auto", servers, every=100)
    steps, windows = run(made, 130, train, per_request, evaluate=True)
    assert sum(step.wait for step in steps[30:]) < 0.1
    assert windows[50] < 6
    assert windows[99] >= 8.8
    assert windows[100] == 9


@settings(max_examples=40, deadline=None)
@given(
    servers=st.integers(1, 3),
    prompts=st.integers(1, 9),
    k=st.integers(0, 8),
    train=st.floats(0, 20),
    per_request=st.sampled_from([0.0, 0.0003, 0.003]),
    every=st.sampled_from([7, 1000]),
    phases=st.booleans(),
)
def test_every_schedule_keeps_lag_within_k(
    servers: int, prompts: int, k: int, train: float, per_request: float, every: int, phases: bool
) -> None:
    made = recipe(
        "auto", servers, prompts, every, k=k, kind="ppo-off-policy" if phases else "pipeline-rl"
    )
    steps, windows = run(made, 30, train, per_request, evaluate=every < 1000)
    assert [t for step in steps for t in step.tickets] == list(range(30 * prompts))
    assert max(max(step.lags) for step in steps) <= made.pipeline.lag_limit
    assert max(windows.values()) <= made.pipeline.window_steps
    assert min(windows.values()) >= min(2, made.pipeline.window_steps)


def test_a_restarted_controller_goes_on_with_the_window_of_the_journal() -> None:
    state = State(Admission(PROMPTS, 8))
    assert Window(recipe("auto"), state.window).batches == 9
    state.apply(PublishedVersion(version=3, time=0.0, compute_hours=0.0, servers=(), window=40))
    kept = State.restored(state.snapshot())
    assert Window(recipe("auto"), kept.window).tickets == 40
    assert Window(recipe("full"), kept.window).tickets == 9 * PROMPTS
