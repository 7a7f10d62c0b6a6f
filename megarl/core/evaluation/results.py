"""What goes beside the answers: with which settings they were made, and what they come to."""

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from typing import Any

import megarl
from megarl.core.evaluation.answers import Result
from megarl.core.evaluation.metrics import Outcome, summarise
from megarl.core.recipe import Recipe, Rows

VERSIONS = ("sglang", "torch", "transformers", "math-verify")
LENGTH = {"control", "prompt_tokens", "thinking_tokens", "answer_tokens", "end_of_thinking", "interruption"}


def settings_of(recipe: Recipe, rows: Rows) -> dict[str, Any]:
    """All of the recipe that an answer depends on. How many are asked for, of how many prompts, is not of it."""
    suite = rows.model_dump(mode="json", exclude={"samples", "prompts", "train", "weight"})
    return {
        "suite": {key: value for key, value in suite.items() if (key, value) != ("heldout", None)},
        "length": recipe.length.model_dump(mode="json", include=LENGTH),
        "temperature": recipe.evaluation.temperature,
        "top_p": recipe.evaluation.top_p,
        "dtype": recipe.model.dtype,
        "fp32_head": recipe.model.fp32_head,
    }


def result_of(suite: str, model: str, samples: int, settings: dict[str, Any], outcomes: Sequence[Outcome]) -> Result:
    """As of now."""
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    return Result(
        suite=suite,
        model=model,
        samples=samples,
        settings=settings,
        metrics=summarise(outcomes),
        time=time.time(),
        versions={"megarl": megarl.__version__, "python": platform.python_version()} | versions,
    )
