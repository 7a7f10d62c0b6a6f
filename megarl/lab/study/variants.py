"""What a study compares: recipes by name.

Leave-one-out takes one part of ScaleRL at a time back to what was usual before it (arXiv 2510.13786, section 4 and its
comparison of losses). A variant that the recipe is already, or that makes no difference to it, is left out.
"""

from collections.abc import Sequence
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Recipe, load

PENALTY_SHARE = 2 / 14
"""The length penalty falls on the last 2k of 14k tokens."""


def leave_one_out(recipe: str, overrides: Sequence[str]) -> dict[str, Recipe]:
    """The recipe as it is (under its own name), then its variants."""
    base = load(recipe, overrides)
    penalised = max(1, round(base.length.completion_tokens * PENALTY_SHARE))
    reverted = {
        "prompt-level-advantage": ["batch.advantage=group"],
        "length-penalty": ["length.control=overlong_penalty", f"length.overlong_tokens={penalised}"],
        "zero-variance-kept": ["batch.zero_variance=keep"],
        "ppo-off-policy-8": ["pipeline.kind=ppo-off-policy", "pipeline.k=8"],
        "no-fp32-head": ["model.fp32_head=none"],
        "sample-average": ["batch.aggregation=sample"],
        "positives-resampled": ["batch.positive_threshold=null"],
        "dapo-loss": ["loss.kind=clip", "loss.clip_low=0.2", "loss.clip_high=0.26"],
    }
    if base.model.dtype == "fp32":  # all of the model is, and so its head
        del reverted["no-fp32-head"]
    variants = {name: load(recipe, [*overrides, *changes]) for name, changes in reverted.items()}
    return {short_name(recipe): base} | {name: variant for name, variant in variants.items() if variant != base}


def side_by_side(recipes: Sequence[str], overrides: Sequence[str]) -> dict[str, Recipe]:
    """Recipes with the same overrides; MegarlError if two have one name."""
    names = [short_name(recipe) for recipe in recipes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise MegarlError(f"two recipes of the study are called {twice!r}; give each another name")
    return {name: load(recipe, overrides) for name, recipe in zip(names, recipes, strict=True)}


def short_name(recipe: str) -> str:
    """Of a shipped recipe or a file."""
    return Path(recipe).stem
