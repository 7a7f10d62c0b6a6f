"""Draws: a whole epoch, exclusion, exhaustion, and that a resumed curriculum goes on as
if nothing had happened.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.controller.draw import Draw, Pace, PromptOrder, share

IDS = [f"p{n}" for n in range(12)]
DIFFICULTY = {p: int(p[1:]) // 2 for p in IDS}


def curriculum(threshold: float | None = 0.9, seed: int = 3) -> PromptOrder:
    return PromptOrder(dict.fromkeys(IDS, 0), seed, threshold, 4)


def draws(c: PromptOrder, count: int) -> list[Draw]:
    return [c.draw() for _ in range(count)]


def test_an_epoch_is_a_permutation_and_the_next_another_one() -> None:
    c = curriculum()
    first = draws(c, 12)
    second = draws(c, 12)
    assert sorted(p for p, *_ in first) == sorted(p for p, *_ in second) == sorted(IDS)
    assert [p for p, *_ in first] != [p for p, *_ in second]
    assert {e for _, e, *_ in first} == {0}
    assert {e for _, e, *_ in second} == {1}


def test_order_depends_on_seed_not_on_the_order_of_the_file() -> None:
    assert draws(curriculum(), 12) == draws(
        PromptOrder(dict.fromkeys(reversed(IDS), 0), 3, 0.9, 4), 12
    )
    assert draws(curriculum(), 12) != draws(curriculum(seed=4), 12)


def test_prompts_with_a_high_latest_pass_rate_are_passed_over_later() -> None:
    c = curriculum()
    draws(c, 12)
    c.observe("p1", 0.9)
    c.observe("p2", 1.0)
    c.observe("p2", 0.5)
    c.observe("p3", 0.89)
    assert Counter(p for p, *_ in draws(c, 11)) == Counter(set(IDS) - {"p1"})
    assert c.draw()[1] == 2


@pytest.mark.parametrize("threshold", [None, 0.9])
def test_an_epoch_that_would_begin_with_less_than_a_batch(threshold: float | None) -> None:
    c = curriculum(threshold)
    draws(c, 12)
    for prompt_id in IDS[:9]:
        c.observe(prompt_id, 1.0)
    second = draws(c, 12)
    assert len({d.prompt_id for d in second}) == 12, "all pass rates were forgotten"
    assert [d.reset for d in second] == [threshold is not None] + [False] * 11
    assert not c.excluded


@given(
    events=st.lists(st.sampled_from([*IDS, "draw", "draw", "draw", "draw"]), max_size=120),
    rates=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=120, max_size=120),
    pace=st.sampled_from(["none", "linear", "exponential"]),
)
def test_resume_equals_uninterrupted(events: list[str], rates: list[float], pace: Pace) -> None:
    """At any moment a curriculum made from the last draw and the pass rates goes on as
    the one that made them.
    """

    def new() -> PromptOrder:
        return PromptOrder(DIFFICULTY, 3, 0.9, 4, pace)

    live = new()
    last = None
    pass_rates: dict[str, Any] = {}
    count = 0
    for event, rate in zip(events, rates, strict=False):
        if event == "draw":
            drawn = live.draw()
            last = drawn
            count = count + 1
            if drawn.reset:
                pass_rates.clear()
        else:
            live.observe(event, rate)
            pass_rates[event] = rate
    if last:
        resumed = new()
        resumed.resume(last, pass_rates, count)
        assert draws(live, 30) == draws(resumed, 30)


@pytest.mark.parametrize(
    ("kind", "shares"),
    [("none", [1, 1, 1, 1]), ("linear", [0.2, 0.6, 1, 1]), ("exponential", [0.2, 0.2**0.5, 1, 1])],
)
def test_pace(kind: Pace, shares: list[float]) -> None:
    assert [share(kind, drawn, 100) for drawn in (0, 50, 100, 900)] == pytest.approx(shares)


@pytest.mark.parametrize(("kind", "pools"), [("linear", [4, 6, 11]), ("exponential", [4, 5, 9])])
def test_epochs_go_through_the_easiest_and_end_with_all(kind: Pace, pools: list[int]) -> None:
    """ceil(12 (1/5 + 4/5 t/12)) and ceil(12 (1/5)^(1 - t/12)) prompts after t draws, or
    a batch of 4 if that is more.
    """
    c = PromptOrder(DIFFICULTY, 3, 0.9, 4, kind)
    hardest = sorted(IDS, key=lambda p: -DIFFICULTY[p])
    for epoch, pool in enumerate([*pools, 12]):
        drawn = draws(c, pool)
        assert {d.pool for d in drawn} == {pool}
        assert {d.epoch for d in drawn} == {epoch}
        assert len({d.prompt_id for d in drawn}) == pool
        limit = DIFFICULTY[hardest[12 - pool]] if pool < 12 else 99
        assert max(DIFFICULTY[d.prompt_id] for d in drawn) <= limit


def test_a_pool_that_is_solved_grows() -> None:
    c = PromptOrder(DIFFICULTY, 3, 0.9, 4, "linear")
    for d in draws(c, 4):
        c.observe(d.prompt_id, 1.0)
    second = draws(c, 4)
    assert c.pool == 8
    assert {DIFFICULTY[d.prompt_id] for d in second} == {2, 3}
