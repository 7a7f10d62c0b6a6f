"""pass@k, maj@k and best@k against all k-subsets, and the intervals against scipy and
against repeated experiments.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from megarl.core.evaluation.metrics import (
    best_at_k,
    maj_at_k,
    over_prompts,
    pass_at_k,
    powers_up_to,
)

ANSWERS = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=7
)


def over_subsets(n: int, k: int, chance: Callable[[tuple[int, ...]], float]) -> float:
    return float(np.mean([chance(subset) for subset in itertools.combinations(range(n), k)]))


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    expected = over_subsets(len(correct), k, lambda s: float(any(correct[n] for n in s)))
    assert pass_at_k(sum(correct), len(correct), k) == pytest.approx(expected)


@given(ANSWERS, st.data())
def test_maj_at_k(answers: list[tuple[str, bool]], data: st.DataObject) -> None:
    votes = [v for v, _ in answers]
    correct = [c for _, c in answers]
    k = data.draw(st.integers(1, len(votes)))
    shares = {v: np.mean([c for w, c in answers if w == v]) for v in votes}

    def chance(subset: tuple[int, ...]) -> float:
        counts = Counter(votes[n] for n in subset if votes[n])
        top = [v for v, count in counts.items() if count == max(counts.values())]
        return float(np.mean([shares[v] for v in top])) if top else 0.0

    assert maj_at_k(votes, correct, k) == pytest.approx(over_subsets(len(votes), k, chance))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=7), st.data())
def test_best_at_k(answers: list[tuple[int, bool]], data: st.DataObject) -> None:
    rewards = [float(r) for r, _ in answers]
    correct = [c for _, c in answers]
    k = data.draw(st.integers(1, len(rewards)))

    def chance(subset: tuple[int, ...]) -> float:
        top = max(rewards[n] for n in subset)
        return float(np.mean([correct[n] for n in subset if rewards[n] == top]))

    assert best_at_k(rewards, correct, k) == pytest.approx(over_subsets(len(rewards), k, chance))


def test_of_one_answer_all_are_its_mean() -> None:
    votes = ["x", "y", "y", ""]
    correct = [True, False, False, False]
    rewards = [1.0, 3.0, 2.0, 0.0]
    assert (
        pass_at_k(1, 4, 1) == maj_at_k(votes, correct, 1) == best_at_k(rewards, correct, 1) == 0.25
    )


def test_many_answers_are_counted_quickly() -> None:
    """64 answers, 20 votes: exact, and the same as by drawing subsets."""
    rng = random.Random(0)
    votes = [str(min(int(rng.expovariate(0.25)), 19)) for _ in range(64)]
    correct = [vote == "1" for vote in votes]
    drawn = []
    for _ in range(20_000):
        counts = Counter(votes[n] for n in rng.sample(range(64), 16))
        top = [v for v, count in counts.items() if count == max(counts.values())]
        drawn.append(("1" in top) / len(top))
    assert maj_at_k(votes, correct, 16) == pytest.approx(
        np.mean(drawn), abs=4 * np.std(drawn) / np.sqrt(len(drawn))
    )


@pytest.mark.parametrize(("right", "of"), [(0, 30), (1, 30), (17, 30), (30, 30), (250, 500)])
def test_one_answer_a_prompt_is_wilsons_interval(right: int, of: int) -> None:
    found = over_prompts([1.0] * right + [0.0] * (of - right), of)
    theirs = binomtest(right, of).proportion_ci(method="wilson")
    assert found.mean == right / of
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("prompts", [30, 300])
@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (2.0, 2.0), (0.3, 2.0)])
def test_the_interval_holds_the_truth_as_often_as_it_says(
    samples: int, prompts: int, a: float, b: float
) -> None:
    """Prompts of difficulties from Beta(a, b), whose mean is the truth, drawn anew 1000
    times: 95 % of them, and not less than 92 % where thirty prompts are nearly all
    hard.
    """
    rng = np.random.default_rng(0)
    held = []
    for _ in range(1000):
        rates = rng.binomial(samples, rng.beta(a, b, prompts)) / samples
        found = over_prompts(list(rates), samples * prompts)
        held.append(found.low <= a / (a + b) <= found.high)
    assert 0.92 <= np.mean(held) <= 0.98


@pytest.mark.parametrize(
    ("a", "b", "prompts", "samples"),
    [(0.3, 2.0, 100, 8), (1.0, 1.0, 5, 16), (5.0, 5.0, 30, 16), (5.0, 2.0, 164, 16)],
)
def test_a_pass_at_k_has_such_an_interval_too(
    a: float, b: float, prompts: int, samples: int
) -> None:
    """As above, of pass@k of 2k answers, also where nearly all prompts pass: its truth
    is 1 - E[(1 - p)^k].
    """
    rng = np.random.default_rng(1)
    k = samples // 2
    truth = 1 - float(np.mean((1 - rng.beta(a, b, 1_000_000)) ** k))
    held = []
    for _ in range(1000):
        right = rng.binomial(samples, rng.beta(a, b, prompts))
        found = over_prompts([pass_at_k(int(c), samples, k) for c in right], samples * prompts, k)
        held.append(found.low <= truth <= found.high)
    assert 0.92 <= np.mean(held) <= 0.99


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 16))
def test_the_interval_lies_around_the_mean(values: list[float], samples: int) -> None:
    found = over_prompts(values, samples * len(values))
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= 1
    assert found.low < found.high


def test_the_ks_of_a_table() -> None:
    assert [powers_up_to(n) for n in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]
