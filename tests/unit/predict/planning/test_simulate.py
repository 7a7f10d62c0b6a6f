"""The simulator against cases with an answer on paper, and what must hold on every
schedule.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.recipe import Recipe, from_tree
from megarl.predict.planning.simulate import Costs, SimulatedStep, simulate, summary
from megarl.predict.planning.workload import Lengths, LogNormal, workload


@dataclass(frozen=True)
class Constant:
    """All lengths equal."""

    tokens: int

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens, np.int64)


def recipe(
    servers: int = 1,
    prompts: int = 4,
    generations: int = 2,
    transport: str = "process_group",
    **pipeline: Any,
) -> Recipe:
    return from_tree(
        {
            "weights": {"transport": transport},
            "run": {"steps": 1000},
            "resources": {"servers": servers},
            "batch": {"prompts": prompts},
            "sampling": {"generations": generations},
            "length": {"prompt_tokens": 8, "thinking_tokens": [900, 1000], "answer_tokens": 100},
            "pipeline": pipeline,
            "evaluation": {"every": 5, "prompts": 10, "samples": 2},
        }
    )


def run(
    made: Recipe,
    steps: int,
    lengths: Lengths,
    decode: float | Callable[[float, float], float] = 0.01,
    train: float = 0.0,
    transfer: float = 0.0,
    swap: float = 0.0,
    parity: float = 0.0,
    limit: int = 1000,
    share: float = 1.0,
    seed: int = 0,
    evaluate: bool = False,
) -> list[SimulatedStep]:
    costs = Costs(
        step_seconds=decode if callable(decode) else lambda running, held: decode,
        train_seconds=lambda sequences: train,
        transfer=transfer,
        parity=parity,
        limit=limit,
        swap=swap,
    )
    return simulate(made, workload(made, lengths, share, seed), costs, steps, seed, evaluate)


def seconds(steps: Sequence[SimulatedStep]) -> float:
    """Return the seconds of the last step."""
    return steps[-1].ended - steps[-2].ended


def test_synchronous_steps_take_generation_then_publication_then_training() -> None:
    """k = 0: nothing overlaps. 100 tokens at 10 ms, 2 s of training, 0.3 + 0.2 s of
    publishing.
    """
    steps = run(recipe(k=0), 4, Constant(100), train=2.0, transfer=0.3, parity=0.2)
    assert seconds(steps) == pytest.approx(100 * 0.01 + 2.0 + 0.5)
    assert all(set(step.lags) == {0} for step in steps)


def test_a_slow_learner_sets_the_pace_and_finds_the_window_full() -> None:
    """Training 10 s a batch, generation 1 s: a step is training and publication, and
    every token is k steps old.
    """
    steps = run(recipe(k=3), 12, Constant(100), train=10.0, transfer=0.1)
    assert seconds(steps) == pytest.approx(10.1)
    assert set(steps[-1].lags) == {3}
    assert steps[-1].wait == 0


@pytest.mark.parametrize(("transport", "pause"), [("process_group", 0.02), ("disk", 0.1)])
def test_slow_servers_set_the_pace(transport: str, pause: float) -> None:
    """One server that works on one request at a time: 8 rollouts of 100 tokens at 10
    ms. It generates while weights are staged beside its own, and stands still for the
    swap of 0.02 s a step; else for the transfer of 0.1 s.
    """
    steps = run(
        recipe(k=8, transport=transport),
        12,
        Constant(100),
        train=0.5,
        transfer=0.1,
        swap=0.02,
        limit=1,
    )
    assert steps[-1].ended - steps[4].ended == pytest.approx(7 * (8 * 1.0 + pause), rel=0.002)


@pytest.mark.parametrize("servers", [1, 4])
def test_throughput_is_what_the_servers_can_do(servers: int) -> None:
    """A decode step of 1 ms + 0.1 ms a request, and always 16 requests a server: 16 /
    2.6 ms tokens/s each.
    """
    made = recipe(servers=servers, prompts=16 * servers, k=8)
    steps = run(
        made, 20, Constant(200), decode=lambda running, held: 0.001 + 0.0001 * running, limit=16
    )
    found = summary(steps, servers, 9)
    assert found.tokens_per_second == pytest.approx(servers * 16 / 0.0026, rel=0.02)
    assert found.server_busy == pytest.approx(1.0, abs=0.01)
    assert found.server_running == pytest.approx(16, rel=0.02)


def test_growing_contexts_cost_what_their_sum_says() -> None:
    """One request of n tokens behind a context of c, a decode step of 1 us a token
    held: n c + n^2 / 2 us.
    """
    made = recipe(prompts=1, k=0)
    steps = run(made, 2, Constant(800), decode=lambda running, held: 1e-6 * held / running)
    assert seconds(steps) == pytest.approx(1e-6 * (800 * 1 + 800**2 / 2), rel=1e-3)


class Listed:
    """Lengths in a given order."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._left = list(lengths)

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        drawn = self._left[:count]
        self._left = self._left[count:]
        return np.array(drawn)


def test_the_longest_rollout_of_a_batch_is_waited_for() -> None:
    """k = 0 and a decode step of 10 ms whatever runs: generation takes as long as the
    longest of 4 x 2 rollouts.
    """
    first = [10, 20, 30, 700, 50, 60, 70, 80]
    second = [5, 5, 400, 5, 5, 5, 5, 5]
    costs = Costs(lambda running, held: 0.01, lambda sequences: 1.0, 0.0, 0.0, 1000)
    lengths = Listed(first + second + [1] * 1000)
    work = workload(recipe(k=0), Constant(1), 1.0, 0)
    steps = simulate(recipe(k=0), replace(work, lengths=lengths), costs, 2)
    assert steps[0].ended == pytest.approx(7.0 + 1.0)
    assert steps[1].ended - steps[0].ended == pytest.approx(4.0 + 1.0)


def test_phases_have_one_version() -> None:
    """PPO-off-policy-4: lags 0, 1, 2, 3 by the step of the phase, and nothing is
    generated while it is trained.
    """
    steps = run(recipe(kind="ppo-off-policy", k=4), 12, Constant(100), train=2.0)
    assert [set(step.lags) for step in steps] == [{i % 4} for i in range(12)]
    assert steps[11].ended - steps[7].ended == pytest.approx(1.0 + 4 * 2.0)


def test_refilled_groups_are_replaced_and_dropped_ones_fill_their_slot() -> None:
    made = recipe(k=2)
    refill = made.model_copy(
        update={"batch": made.batch.model_copy(update={"zero_variance": "refill"})}
    )
    dropped = run(made, 6, Constant(50), train=1.0, share=0.5)
    refilled = run(refill, 6, Constant(50), train=1.0, share=0.5)
    assert [t for step in dropped for t in step.tickets] == list(range(24))
    numbers = [t for step in refilled for t in step.tickets]
    assert len(numbers) == 24
    assert max(numbers) > 30  # half are gone


def test_a_held_server_falls_behind_and_others_go_on() -> None:
    """An evaluation of 20 rollouts of 100 tokens, ten at a time on one of two servers:
    steps go on, lag stays within k.
    """
    steps = run(recipe(servers=2, k=2), 12, Constant(100), train=1.0, limit=10, evaluate=True)
    assert len(steps) == 12
    assert max(max(step.lags) for step in steps) <= 2


@settings(max_examples=40, deadline=None)
@given(
    servers=st.integers(1, 4),
    prompts=st.integers(1, 6),
    k=st.integers(0, 4),
    phases=st.booleans(),
    train=st.floats(0, 5),
    transfer=st.floats(0, 1),
    limit=st.integers(1, 12),
    spread=st.floats(0.1, 1.5),
    evaluate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_schedule_keeps_lag_within_k_and_trains_each_ticket_once(
    servers: int,
    prompts: int,
    k: int,
    phases: bool,
    train: float,
    transfer: float,
    limit: int,
    spread: float,
    evaluate: bool,
    seed: int,
) -> None:
    made = recipe(servers, prompts, kind="ppo-off-policy" if phases else "pipeline-rl", k=k)
    lengths = LogNormal(60, spread, 1100)
    steps = run(
        made, 7, lengths, train=train, transfer=transfer, limit=limit, seed=seed, evaluate=evaluate
    )
    assert [t for step in steps for t in step.tickets] == list(range(7 * prompts))
    assert max(max(step.lags) for step in steps) <= made.pipeline.lag_limit
    assert min(min(step.lags) for step in steps) >= 0
    assert all(step.tokens == step.lags.total() > 0 for step in steps)
    ended = [step.ended for step in steps]
    assert ended == sorted(ended)
    for before, step in itertools.pairwise(steps):
        assert step.wait + step.train + step.publish == pytest.approx(
            step.ended - before.ended, abs=1e-6
        )
