"""Draws: a whole epoch, exclusion, exhaustion, and that a resumed curriculum goes on as if nothing had happened."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.curriculum import Curriculum, Draw

IDS = [f"p{n}" for n in range(12)]


def curriculum(on_exhausted: str = "reset", threshold: float | None = 0.9, seed: int = 3) -> Curriculum:
    return Curriculum(IDS, seed, threshold, 4, on_exhausted)


def draws(c: Curriculum, count: int) -> list[Draw | None]:
    return [c.draw() for _ in range(count)]


def test_an_epoch_is_a_permutation_and_the_next_another_one() -> None:
    c = curriculum()
    first, second = draws(c, 12), draws(c, 12)
    assert sorted(p for p, *_ in first) == sorted(p for p, *_ in second) == sorted(IDS)
    assert [p for p, *_ in first] != [p for p, *_ in second]
    assert {e for _, e, _ in first} == {0}
    assert {e for _, e, _ in second} == {1}


def test_order_depends_on_seed_not_on_the_order_of_the_file() -> None:
    assert draws(curriculum(), 12) == draws(Curriculum(reversed(IDS), 3, 0.9, 4, "reset"), 12)
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
    stop, reset = curriculum("stop", threshold), curriculum("reset", threshold)
    for c in (stop, reset):
        draws(c, 12)
        for prompt_id in IDS[:9]:
            c.observe(prompt_id, 1.0)
    assert (stop.draw() is None) == (threshold is not None) == stop.exhausted
    second = draws(reset, 12)
    assert len({d.prompt_id for d in second}) == 12, "all pass rates were forgotten"
    assert [d.reset for d in second] == [threshold is not None] + [False] * 11
    assert not reset.excluded


@given(
    events=st.lists(st.sampled_from([*IDS, "draw", "draw", "draw", "draw"]), max_size=120),
    rates=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=120, max_size=120),
    on_exhausted=st.sampled_from(["stop", "reset"]),
)
def test_resume_equals_uninterrupted(events: list[str], rates: list[float], on_exhausted: str) -> None:
    """At any moment a curriculum made from the last draw and the pass rates goes on as the one that made them."""
    live, last, pass_rates = curriculum(on_exhausted), None, {}
    for event, rate in zip(events, rates, strict=False):
        if event == "draw":
            drawn = live.draw()
            if drawn is None:
                return
            last = drawn
            if drawn.reset:
                pass_rates.clear()
        else:
            live.observe(event, rate)
            pass_rates[event] = rate
    if last:
        resumed = curriculum(on_exhausted)
        resumed.resume(last, pass_rates)
        assert draws(live, 30) == draws(resumed, 30)
