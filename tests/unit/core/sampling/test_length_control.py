"""Interruption, overlong penalty, neither: what is asked of a server, and what the
answer is worth.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from megarl.core.base.contracts import Grade
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import Prompt, float32, int32
from megarl.core.client.client import Generation, VersionSpan
from megarl.core.client.membership import Membership
from megarl.core.recipe import Length, from_tree
from megarl.core.sampling import length_control
from megarl.core.sampling.places import Places
from megarl.core.sampling.sampler import Completion, Job, Sampler, Void
from megarl.tasks.environments.registry import TaskEnvironments
from tests.server_pool import Pool

END = 0
CLOSE = 1
PHRASE = [8, 8, CLOSE]


class Letters:
    """A tokenizer of ten tokens; 1 is `</think>`."""

    end = END
    ends = (END, 9)

    def ids(self, text: str) -> np.ndarray:
        return int32(PHRASE)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("</think>" if t == CLOSE else str(t) for t in tokens)

    continued = decode


class EndlessServer:
    """Thinks until it is stopped; `asked`: the tokens each request was allowed."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def generate(
        self, ids: np.ndarray, limit: int, *, stop_token_ids: tuple[int, ...], **_: Any
    ) -> Generation:
        assert stop_token_ids == Letters.ends, "all at which the model stops"
        self.asked.append(limit)
        return Generation(
            int32([5] * limit), float32([-1.0] * limit), (VersionSpan(3, 0, limit),), "length"
        )


def complete(
    control: str, answer_tokens: int = 4, positions: int = 2048
) -> tuple[Completion, list[int]]:
    recipe = from_tree(
        {"length": {"control": control, "thinking_tokens": [6, 20], "answer_tokens": answer_tokens}}
    )
    server = EndlessServer()
    members = Membership([ServerAddress(id=0, url="")])
    members.answered(0)
    members.publish([0], 3, "a")
    members.published(0, 3, "a", "")

    async def run() -> Completion:
        places = Places(members, 1)
        environments = TaskEnvironments(recipe, Letters())  # type: ignore[arg-type]
        sampler = Sampler(
            recipe,
            cast(Any, Letters()),
            Pool({0: server}, places, lossless=True),
            environments,
            positions=positions,
        )
        prompt = Prompt(id="", tokens=int32([7, 7]), answer="")
        job = Job(
            prompt,
            (1, 0, 0),
            partial(places.take, (1, 0, 0), lambda *_: True),
            "",
            recipe.length.thinking_tokens[1],
            1.0,
            1.0,
        )
        return await sampler.complete(job)

    return asyncio.run(run()), server.asked


def test_interruption_is_two_legs_with_a_masked_phrase_between() -> None:
    done, asked = complete("interruption")
    assert asked == [20, 4]
    assert done.interrupted
    assert [(len(s.tokens), s.trained) for s in done.segments] == [
        (20, True),
        (3, False),
        (4, True),
    ]


@pytest.mark.parametrize("control", ["overlong_penalty", "none"])
def test_without_it_one_leg_has_both_budgets(control: str) -> None:
    done, asked = complete(control)
    assert asked == [24]
    assert not done.interrupted
    assert done.finish == "length"
    assert [(len(s.tokens), s.trained) for s in done.segments] == [(24, True)]


@pytest.mark.parametrize(
    ("control", "legs"), [("interruption", [20, 2]), ("overlong_penalty", [25]), ("none", [25])]
)
def test_a_prompt_that_fills_the_models_context_leaves_less_to_sample(
    control: str, legs: list[int]
) -> None:
    """The prompt has 2 tokens, thinking 20, the answer 12, and the model no position
    more, of which 7 are kept.
    """
    done, asked = complete(control, answer_tokens=12, positions=2 + 20 + 12)
    assert asked == legs
    assert done.finish == "length"


@pytest.mark.parametrize("control", ["interruption", "none"])
def test_a_prompt_that_leaves_no_position_is_void(control: str) -> None:
    assert complete(control, positions=2 + 1 + 7)[1] == [1]
    with pytest.raises(Void, match="its prompt has 2 tokens, but a server takes at most 1"):
        complete(control, positions=2 + 7)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(1, 0.0), (12_288, 0.0), (12_289, -1 / 2048), (13_312, -0.5), (14_336, -1.0), (15_000, -1.0)],
)
def test_penalty_is_a_straight_line_over_the_last_tokens(tokens: int, penalty: float) -> None:
    assert length_control.overlong_penalty(tokens, 14_336, 2048) == pytest.approx(penalty)
    assert length_control.overlong_penalty(tokens, 14_336, 2048) == np.clip(
        (14_336 - tokens) / 2048 - 1, -1, 0
    )


def test_only_right_answers_lose_and_only_if_the_recipe_says_so() -> None:
    right = Grade(1.0, True, True)
    wrong = Grade(-1.0, False, True)
    sizes: dict[str, Any] = {"thinking_tokens": (10, 16), "answer_tokens": 8}
    length = Length(control="overlong_penalty", **sizes)
    assert length.completion_tokens == 24
    assert [length_control.reward(right, n, length) for n in (16, 20, 24)] == [1.0, 0.5, 0.0]
    assert [length_control.reward(wrong, n, length) for n in (16, 20, 24)] == [-1.0, -1.0, -1.0]
    for control in ("interruption", "none"):
        assert length_control.reward(right, 24, Length(control=control, **sizes)) == 1.0
