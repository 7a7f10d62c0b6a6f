"""Budgets, masked phrases, and segments merge without a token lost."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.base.types import Rollout, Segment, float32, int32
from megarl.core.sampling.length_control import masked, merge, sampled, thinking_budget
from tests import make


def rollout(segments: tuple[Segment, ...] | list[Segment]) -> Rollout:
    return make.rollout(*segments, reward=0.0)


def test_budgets_are_uniform_and_belong_to_the_rollout() -> None:
    drawn = [
        thinking_budget(3, ticket, sample, (10, 19))
        for ticket in range(200)
        for sample in range(10)
    ]
    assert drawn == [
        thinking_budget(3, ticket, sample, (10, 19))
        for ticket in range(200)
        for sample in range(10)
    ]
    counts = np.bincount(drawn, minlength=20)[10:]
    assert counts.sum() == 2000
    chi_squared = ((counts - 200) ** 2 / 200).sum()
    assert chi_squared < 27.9, "9 degrees of freedom, p = 0.001"
    assert drawn != [
        thinking_budget(4, ticket, sample, (10, 19))
        for ticket in range(200)
        for sample in range(10)
    ]
    assert thinking_budget(0, 0, 0, (7, 7)) == 7


def test_the_phrase_is_masked() -> None:
    segment = masked(int32([4, 5, 6]), version=9)
    assert not segment.trained
    assert segment.logprobs.tolist() == [0.0, 0.0, 0.0]
    assert rollout([segment]).trained_tokens == 0


def test_spans_become_segments() -> None:
    tokens = int32(range(6))
    logprobs = float32(-n for n in range(6))
    segments = sampled(tokens, logprobs, [(3, 0, 2), (4, 2, 2), (5, 2, 6)])
    assert [(s.weight_version, s.tokens.tolist()) for s in segments] == [
        (3, [0, 1]),
        (5, [2, 3, 4, 5]),
    ]
    assert rollout(segments).logprobs.tolist() == logprobs.tolist()


ORIGINS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 4)), min_size=1, max_size=12
)


@given(ORIGINS)
def test_joining_keeps_every_token_and_its_origin(origins: list[tuple[int, bool, int]]) -> None:
    counter = iter(range(1000))
    segments = [
        Segment(
            tokens=int32(next(counter) for _ in range(n)),
            logprobs=float32([-1.0] * n),
            weight_version=v,
            trained=t,
        )
        for v, t, n in origins
    ]
    before = rollout(segments)
    after = rollout(merge(segments))
    for name in ("tokens", "logprobs", "trained", "versions"):
        assert getattr(before, name).tolist() == getattr(after, name).tolist()
    kinds = [(s.weight_version, s.trained) for s in after.segments]
    assert all(a != b for a, b in pairwise(kinds))
