"""The recipe: one YAML file, one typed tree, which drives every role.

    load("quickstart", ["run.seed=3"])  ──►  Recipe      (name of a shipped recipe, or a path)

    sections.py       the tree, its defaults and what each key means (data_section.py: those of `data`)
    combinations.py   what cannot go together                      files.py     YAML, bases, overrides ──► Recipe
    problems.py       one clear line for each thing that is wrong  text.py      Recipe ──► YAML
    shipped.py        recipes and suites that come with megarl     presets.py   a recipe for a model of some size

Unknown keys, wrong types and impossible combinations end in one `MegarlError` that names the key, file, line and, for a
misspelt key, the nearest known one.
"""

from megarl.core.recipe.data_section import Columns, Curriculum, Data, Reward, Rows, Service, Suite, Task
from megarl.core.recipe.files import from_tree, load, load_suite
from megarl.core.recipe.section import Section
from megarl.core.recipe.sections import (
    BatchSection,
    Checkpoint,
    Critic,
    Evaluation,
    Journal,
    Learner,
    Length,
    Loss,
    Model,
    Moe,
    Monitor,
    Optimizer,
    Pipeline,
    Profile,
    Recipe,
    Reference,
    Resources,
    Run,
    Sampling,
    Serving,
    Sft,
    Stage,
    Wandb,
    Weights,
)
from megarl.core.recipe.shipped import SHIPPED, shipped, shipped_suites
from megarl.core.recipe.text import describe, differences, dump, flat

__all__ = [
    "SHIPPED", "BatchSection", "Checkpoint", "Columns", "Critic", "Curriculum", "Data", "Evaluation", "Journal", "Learner",
    "Length", "Loss", "Model", "Moe", "Monitor", "Optimizer", "Pipeline", "Profile", "Recipe", "Reference", "Resources",
    "Reward", "Rows", "Run", "Sampling", "Section", "Service", "Serving", "Sft", "Stage", "Suite", "Task", "Wandb",
    "Weights", "describe", "differences", "dump", "flat", "from_tree", "load", "load_suite", "shipped", "shipped_suites",
]  # fmt: skip
