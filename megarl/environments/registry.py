"""The environments of a recipe: what makes one for a rollout of each task or suite that has any."""

import importlib
import os
import sys
from collections.abc import Callable

from megarl.data.tokenizer import Tokenizer
from megarl.environments.bounded import Bounded
from megarl.environments.calculator import Calculator
from megarl.environments.framing import Framing
from megarl.environments.guessing import Guessing
from megarl.environments.protocol import Environment, Setting
from megarl.environments.python import LIMITS, Python
from megarl.errors import MegarlError
from megarl.grading.sandbox import Sandbox, places
from megarl.recipe import Recipe, Rows

Factory = Callable[[Setting], Environment]
BUILT_IN: dict[str, Factory] = {"python": Python, "calculator": Calculator, "guessing": Guessing}


class Environments:
    """By task or suite. MegarlError if one that the recipe names cannot be had here: made once, to see that it can be."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        rows: dict[str, Rows] = {**recipe.data.tasks, **recipe.evaluation.sampled}
        self._keys = {name: f"data.tasks.{name}.environment" for name in recipe.data.tasks}
        self._keys |= {name: f"evaluation.suites.{name}.environment" for name in recipe.evaluation.sampled}
        self._tasks = {name: task for name, task in rows.items() if task.environment}
        self._settings: dict[str, Setting] = {}
        self._factories: dict[str, Factory] = {}
        if self._tasks:
            sandbox = Sandbox(recipe.data.sandbox, places(), LIMITS)
            if any(task.environment == "python" for task in self._tasks.values()):
                sandbox.check()
            for name, task in self._tasks.items():
                framing = Framing(tokenizer, task.template, task.reply_tokens, name)
                self._settings[name] = Setting(
                    name, tokenizer, framing, sandbox, recipe.length.end_of_thinking, task.reply_tokens
                )
                self._factories[name] = _found(self._keys[name], task)
                if not isinstance(self._made(name), Environment):
                    raise MegarlError(
                        f"{self._keys[name]}: {task.environment} is no Environment; derive it from "
                        "megarl.environments.Environment"
                    )

    def of(self, task: str) -> Bounded | None:
        """A new one for an episode of this task; None: its rollouts are one turn."""
        return Bounded(self._made(task), task, self._tasks[task]) if task in self._tasks else None

    def _made(self, task: str) -> Environment:
        try:
            return self._factories[task](self._settings[task])
        except MegarlError:
            raise
        except Exception as error:  # of a user's class: anything
            raise MegarlError(
                f"{self._keys[task]}: {self._tasks[task].environment} cannot be made: "
                f"{type(error).__name__}: {error}"
            ) from error


def _found(key: str, task: Rows) -> Factory:
    """What the recipe means: one of ours, or the user's class in a module on PYTHONPATH or in the working directory."""
    if task.environment in BUILT_IN:
        return BUILT_IN[task.environment]
    module, _, attribute = task.environment.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing may do anything
        raise MegarlError(
            f"{key}: {task.environment} cannot be used: {type(error).__name__}: {error}; it must be "
            f"a class in a module on PYTHONPATH or in {os.getcwd()}"
        ) from None
    return factory
