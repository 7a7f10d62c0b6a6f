"""The recipe: one YAML file, one typed tree, which drives every role.

    load("quickstart", ["run.seed=3"])  ──►  Recipe      (name of a shipped recipe, or a path)

    tree.py     the tree, its defaults and what each key means      rules.py  which combinations are impossible
    loading.py  YAML, bases, overrides ──► Recipe; one clear line per fault
    text.py     Recipe ──► YAML

Unknown keys, wrong types and impossible combinations end in one `MegarlError` that names the key, file, line and, for a
misspelt key, the nearest known one.
"""

from megarl.core.recipe.loading import SHIPPED, from_tree, load, load_suite, shipped, shipped_suites
from megarl.core.recipe.text import describe, differences, dump, flat
from megarl.core.recipe.tree import (
    BatchSection,
    Checkpoint,
    ColumnName,
    Critic,
    Curriculum,
    Data,
    Evaluation,
    JournalSection,
    Learner,
    Length,
    Loss,
    Model,
    Moe,
    Monitor,
    Optimizer,
    PipelineSection,
    Profile,
    Rate,
    Recipe,
    Reference,
    Resources,
    Reward,
    Rows,
    Run,
    Sampling,
    Section,
    Service,
    Serving,
    Sft,
    Stage,
    Suite,
    Task,
    Wandb,
    Weights,
)

__all__ = [
    "SHIPPED", "BatchSection", "Checkpoint", "ColumnName", "Critic", "Curriculum", "Data", "Evaluation",
    "JournalSection", "Learner", "Length", "Loss", "Model", "Moe", "Monitor", "Optimizer", "PipelineSection", "Profile",
    "Rate", "Recipe", "Reference", "Resources", "Reward", "Rows", "Run", "Sampling", "Section", "Service", "Serving",
    "Sft", "Stage", "Suite", "Task", "Wandb", "Weights", "describe", "differences", "dump", "flat", "from_tree", "load",
    "load_suite", "shipped", "shipped_suites",
]  # fmt: skip
