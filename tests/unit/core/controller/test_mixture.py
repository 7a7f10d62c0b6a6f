"""The draw over several tasks: as the weights say in every window, and the same whether
or not it was interrupted.
"""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.base.admission import Admission
from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Group, Prompt, decode, encode, int32
from megarl.core.controller.draw import (
    Draw,
    Mixture,
    PromptOrder,
    draw_metrics,
    mixture_of,
    next_task,
)
from megarl.core.journal.records import Admitted, Finished, JournalRecord, Removed, Snapshot, State
from megarl.core.recipe import Recipe, from_tree
from tests import make

WEIGHTS = st.dictionaries(
    st.sampled_from("abcde"), st.sampled_from([0.1, 0.3, 1.0, 1.5, 2.0, 7.0]), min_size=1
)


def shares(weights: dict[str, float]) -> dict[str, Fraction]:
    tasks = {name: {"train": "", "heldout": "", "weight": w} for name, w in weights.items()}
    return from_tree({"data": {"tasks": tasks}}).data.shares


@settings(max_examples=40)
@given(WEIGHTS)
def test_as_the_weights_say_at_every_moment_and_in_every_window(weights: dict[str, float]) -> None:
    wanted = shares(weights)
    drawn = dict.fromkeys(weights, 0)
    sequence = []
    for t in range(100):
        for task, count in drawn.items():
            assert abs(count - t * wanted[task]) < 1
        sequence.append(next_task(drawn, wanted))
        drawn[sequence[-1]] += 1
    for start in range(0, 52, 7):
        window = Counter(sequence[start : start + 48])
        assert all(abs(window[task] - 48 * wanted[task]) < 2 for task in weights)


def test_a_tenth_is_a_tenth() -> None:
    assert shares({"a": 0.1, "b": 0.2}) == {"a": Fraction(1, 3), "b": Fraction(2, 3)}


def test_two_to_one() -> None:
    drawn = {"a": 0, "b": 0}
    for _ in range(9):
        drawn[next_task(drawn, shares({"a": 1, "b": 2}))] += 1
    assert drawn == {"a": 3, "b": 6}


def test_one_task_is_its_curriculum() -> None:
    ids = {f"p{n}": 0 for n in range(7)}
    alone = PromptOrder(ids, 3, 0.9, 2)
    mixture = Mixture({"x": PromptOrder(ids, 3, 0.9, 2)}, {"x": Fraction(1)})
    assert [("x", alone.draw()) for _ in range(30)] == [mixture.draw() for _ in range(30)]


def test_a_task_whose_prompts_are_solved_begins_again_and_keeps_its_share() -> None:
    curricula = {t: PromptOrder({f"{t}{n}": 0 for n in range(4)}, 0, 0.9, 2) for t in "abc"}
    mixture = Mixture(curricula, shares({"a": 2, "b": 1, "c": 1}))

    def draws(count: int) -> list[tuple[str, Draw]]:
        return [mixture.draw() for _ in range(count)]

    assert not any(drawn.reset for _, drawn in draws(16))
    for n in range(4):
        mixture.observe("b", f"b{n}", 1.0)
    drawn = draws(16)
    assert Counter(task for task, _ in drawn) == {"a": 8, "b": 4, "c": 4}
    assert [task for task, draw in drawn if draw.reset] == ["b"]


def prompt(task: str, n: int) -> Prompt:
    return Prompt(id=f"p{n}", tokens=int32([n]), answer="x", task=task, difficulty=n // 2)


PROMPTS = {
    "math": TaskPrompts([prompt("math", n) for n in range(9)], []),
    "code": TaskPrompts([prompt("code", n) for n in range(5)], []),
}


def recipe_of(kind: str) -> Recipe:
    tasks = {
        t: {"train": f"{t}.jsonl", "heldout": "", "weight": w}
        for t, w in (("math", 2), ("code", 1))
    }
    return from_tree(
        {"data": {"tasks": tasks, "curriculum": {"kind": kind}}, "batch": {"prompts": 3}}
    )


class Run:
    """Draws and results, each also a record, as the controller writes them."""

    def __init__(self, recipe: Recipe, state: State) -> None:
        self.mixture = mixture_of(recipe, PROMPTS, state)
        self.unfinished, self.records = dict(state.unfinished), list[JournalRecord]()
        self.next = state.admission.next_ticket

    def draw(self) -> tuple[str, Draw]:
        task, drawn = self.mixture.draw()
        admitted = Admitted(ticket=self.next, task=task, due_step=0, **drawn._asdict())
        self.unfinished[self.next] = admitted
        self.records.append(admitted)
        self.next += 1
        return task, drawn

    def result(self, which: int, right: int, removed: bool) -> None:
        """Two answers to one of the tickets under way; `right` of them are, 3: void."""
        if not self.unfinished:
            return
        admitted = self.unfinished.pop(sorted(self.unfinished)[which % len(self.unfinished)])
        rollouts = tuple(make.rollout(reward=0.0, sample=n, correct=n < right) for n in range(2))
        group = Group(
            ticket=admitted.ticket,
            prompt=prompt(admitted.task, int(admitted.prompt_id[1:])),
            rollouts=() if right == 3 else rollouts,
            void="dead" if right == 3 else "",
        )
        if right != 3:
            self.mixture.observe(admitted.task, admitted.prompt_id, group.pass_rate)
        if removed and right != 3:
            self.records.append(
                Removed(ticket=admitted.ticket, reason="zero variance", pass_rate=group.pass_rate)
            )
        else:
            self.records.append(Finished(group=group, time=0.0))


EVENTS = st.lists(
    st.just("draw") | st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=90,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.data(), st.sampled_from(["none", "linear", "exponential"]))
def test_interrupted_anywhere_and_resumed_from_the_journal_it_draws_the_same(
    events: list[str | tuple[int, int, bool]], data: st.DataObject, kind: str
) -> None:
    recipe = recipe_of(kind)
    cut = data.draw(st.integers(0, len(events)))
    snapshot_at = data.draw(st.integers(0, cut))

    def go(run: Run, events: list[str | tuple[int, int, bool]]) -> list[tuple[str, Draw]]:
        found = []
        for event in events:
            if isinstance(event, str):
                found.append(run.draw())
            else:
                run.result(*event)
        return found

    whole = Run(recipe, State(Admission(3, 1)))
    go(whole, events[:cut])
    state = State(Admission(3, 1))
    for n, record in enumerate(whole.records):
        if n == snapshot_at:
            state = State.restored(decode(encode(state.snapshot()), Snapshot))
        state.apply(decode(encode(record), JournalRecord))
    resumed = Run(recipe, state)
    rest = [*events[cut:], *["draw"] * 20]
    assert go(resumed, rest) == go(whole, rest)
    assert [encode(r) for r in resumed.records] == [
        encode(r) for r in whole.records[-len(resumed.records) :]
    ]


def test_metrics_are_of_each_task_when_there_are_several() -> None:
    mixture = mixture_of(recipe_of("none"), PROMPTS, State(Admission(3, 1)))
    for _ in range(18):
        mixture.draw()
    mixture.observe("code", "p1", 1.0)
    found = draw_metrics(mixture)
    assert (found["epoch"], found["epoch/math"], found["epoch/code"]) == (1, 1, 1)
    assert (found["pool_prompts"], found["pool_prompts/math"], found["excluded_prompts"]) == (
        14,
        9,
        1,
    )
    one = Mixture({"x": PromptOrder({"p": 0}, 0, None, 1)}, {"x": Fraction(1)})
    assert draw_metrics(one) == {"epoch": 0, "pool_prompts": 1, "excluded_prompts": 0}


def test_a_curriculum_needs_difficulties_in_each_task() -> None:
    flat = {
        "code": TaskPrompts([prompt("code", 0), prompt("code", 1)], []),
        "math": PROMPTS["math"],
    }
    with pytest.raises(
        MegarlError, match=r"data\.curriculum: all prompts of code\.jsonl have one difficulty"
    ):
        mixture_of(recipe_of("linear"), flat, State(Admission(3, 1)))
    assert mixture_of(recipe_of("none"), flat, State(Admission(3, 1))).orders["code"].pool == 2
