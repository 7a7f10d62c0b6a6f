"""Every shipped recipe has a twin that differs from it only in the keys of RULES."""

from fnmatch import fnmatchcase
from typing import Any

import pytest

from megarl.core import recipe as recipes
from megarl.core.recipe import Recipe, flat
from tests.recipe_twins import RULES, kind_of, twin
from tests.twin_models import FAMILIES, SIGNS

KEPT = (
    "model.dtype",
    "model.fp32_head",
    "model.fp8",
    "model.virtual_pipeline_parallel",
    "model.context_parallel",
    "model.moe.*",
    "data.sandbox",
    "data.curriculum.*",
    "data.tasks.*.grader",
    "data.tasks.*.template",
    "data.tasks.*.system",
    "data.tasks.*.environment",
    "data.tasks.*.weight",
    "data.tasks.*.turns",
    "length.control",
    "length.end_of_thinking",
    "length.interruption",
    "sampling.temperature",
    "pipeline.*",
    "batch.zero_variance",
    "batch.truncated",
    "batch.positive_threshold",
    "batch.centring",
    "batch.advantage",
    "batch.aggregation",
    "loss.*",
    "reference.*",
    "teacher.weight",
    "learner.recompute",
    "learner.epochs",
    "learner.optimizer.schedule",
    "learner.optimizer.grad_clip",
    "critic.lam",
)
"""What makes a recipe what it is: no rule may replace it."""


def keys(recipe: Recipe) -> dict[str, Any]:
    return flat(recipe.model_dump(mode="json"))


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_twin_differs_by_the_rules_alone(name: str) -> None:
    recipe = recipes.load(name)
    small = recipes.load(name, twin(name))
    before = keys(recipe)
    after = keys(small)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert before.keys() == after.keys()
    assert changed == {override.partition("=")[0] for override in twin(name)}
    assert all(any(fnmatchcase(key, rule.pattern) for rule in RULES) for key in changed)


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_twin_keeps_the_layout_and_what_it_trains(name: str) -> None:
    recipe = recipes.load(name)
    small = recipes.load(name, twin(name))
    for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        assert (getattr(recipe.model, key) > 1) == (getattr(small.model, key) > 1)
    assert small.run.steps >= 4
    assert small.run.steps > small.pipeline.phase_steps, "no trained weights would be published"
    assert small.model.path.removeprefix("models/") in FAMILIES
    assert {kind_of(small, task) for task in small.data.tasks} <= SIGNS.keys()


def test_no_rule_replaces_what_makes_a_recipe_what_it_is() -> None:
    known = {key for name in recipes.shipped() for key in keys(recipes.load(name))}
    kept = {key for key in known if any(fnmatchcase(key, pattern) for pattern in KEPT)}
    assert not [pattern for pattern in KEPT if not any(fnmatchcase(key, pattern) for key in known)]
    assert not {key for key in kept for rule in RULES if fnmatchcase(key, rule.pattern)}


def test_every_rule_is_of_use() -> None:
    changed = {override.partition("=")[0] for name in recipes.shipped() for override in twin(name)}
    assert not [
        rule.pattern for rule in RULES if not any(fnmatchcase(key, rule.pattern) for key in changed)
    ]
