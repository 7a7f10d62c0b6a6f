"""Graders of one task, prompts to ask them about, and small sandboxes."""

from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Prompt, int32
from megarl.core.recipe import Data, Task, from_tree
from megarl.tasks.graders.grader import TaskGraders
from megarl.tasks.graders.sandbox import Limits, Sandbox, SandboxKind

LIMITS = Limits(
    seconds=20, memory=256 << 20, processes=8, file=1 << 20, tmp=4 << 20, output=1 << 16
)
SHORT = Limits(**(vars(LIMITS) | {"seconds": 2}))


def graders_of(
    grader: str, limits: Limits | None = None, limit_s: float = 10.0, task: Any = None, **data: Any
) -> TaskGraders:
    """task, data: further keys of the recipe's sections. A prompt's text is its tokens'
    characters.
    """
    tasks = {
        "task": Task.model_validate({"train": "", "heldout": "", "grader": grader, **(task or {})})
    }
    recipe = from_tree({}).model_copy(
        update={"data": Data.model_validate({"tasks": tasks, **data})}
    )
    return TaskGraders(recipe, decode, workers=1, limit_s=limit_s, limits=limits)


def prompt_of(answer: str, text: str = "") -> Prompt:
    return Prompt(id="p", tokens=int32(map(ord, text)), answer=answer, task="task")


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def why_not(kind: SandboxKind) -> str:
    """Why no program can be run here with it; empty if one can."""
    try:
        sandbox(kind).check()
    except MegarlError as error:
        return str(error)
    return ""


def sandbox(kind: SandboxKind, limits: Limits = LIMITS) -> Sandbox:
    """With rlimits, use the system's Python: the user nobody may not be able to read
    root's own.
    """
    system = Path("/usr/bin/python3")
    return Sandbox(
        kind, 2, limits, python=system if kind == "rlimits" and system.exists() else None
    )
