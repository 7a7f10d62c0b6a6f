"""Metrics of a task come only from its groups, and exist only if there are several
tasks.
"""

import math
from typing import Any

import pytest

from megarl.core.algorithm.batch import batch_statistics
from megarl.core.base.types import Batch, Group, Prompt, int32
from megarl.core.controller.metrics import OF_EACH_TASK, task_statistics
from megarl.core.recipe import Recipe, from_tree
from megarl.core.telemetry.names import tag
from tests import make


def group(ticket: int, task: str, right: int, tokens: int) -> Group:
    rollouts = tuple(
        make.rollout(
            make.segment([3] * tokens, 2),
            reward=1.0 if n < right else -1.0,
            sample=n,
            finish="length" if n < right - 1 else "stop",
        )
        for n in range(4)
    )
    return Group(
        ticket=ticket,
        prompt=Prompt(id="p", tokens=int32([1]), answer="x", task=task),
        rollouts=rollouts,
    )


def recipe_of(*tasks: str) -> Recipe:
    return from_tree({"data": {"tasks": {t: {"train": "", "heldout": ""} for t in tasks}}})


BATCH = Batch(
    step=3, groups=(group(0, "math", 1, 5), group(1, "code", 4, 9), group(2, "math", 3, 7))
)


def test_of_each_task() -> None:
    found = task_statistics(BATCH, recipe_of("math", "code", "law"))
    assert (found["pass_rate_train/math"], found["pass_rate_train/code"]) == (0.5, 1.0)
    assert (found["zero_variance_share/math"], found["zero_variance_share/code"]) == (0.0, 1.0)
    assert (found["completion_tokens_mean/math"], found["completion_tokens_mean/code"]) == (
        6.0,
        9.0,
    )
    assert found["completion_tokens_right_mean/math"] == pytest.approx((5 + 3 * 7) / 4)
    assert (found["truncation_rate/math"], found["truncation_rate/code"]) == (2 / 8, 3 / 4)
    assert math.isnan(found["pass_rate_train/law"])
    whole = batch_statistics(BATCH)
    assert whole["groups_in_loss"] == sum(
        found[f"groups_in_loss/{t}"] for t in ("math", "code", "law")
    )
    assert all(tag(name).split("/")[0] in ("reward", "length") for name in found)
    assert {name.partition("/")[0] for name in found} == set(OF_EACH_TASK) <= set(whole)


@pytest.mark.parametrize(
    ("tree", "of_code"),
    [
        ({"batch": {"zero_variance": "keep"}}, 0),
        ({"batch": {"zero_variance": "keep", "centring": "none"}}, 1),
        ({"batch": {"zero_variance": "drop", "centring": "none"}}, 0),
        ({"batch": {"zero_variance": "keep", "centring": "critic"}}, 1),
        ({"batch": {"zero_variance": "keep"}, "teacher": {"url": "http://t", "weight": 1.0}}, 1),
    ],
)
def test_a_group_of_equal_rewards_counts_where_it_has_a_gradient(
    tree: dict[str, Any], of_code: int
) -> None:
    recipe = from_tree(
        tree | {"data": {"tasks": {t: {"train": "", "heldout": ""} for t in ("math", "code")}}}
    )
    assert task_statistics(BATCH, recipe)["groups_in_loss/code"] == of_code
    assert batch_statistics(BATCH, recipe)["groups_in_loss"] == 2 + of_code


def test_one_task_has_none() -> None:
    assert task_statistics(BATCH, recipe_of("math")) == {}
