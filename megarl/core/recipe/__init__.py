"""The recipe: one YAML file, one typed tree, which drives every role.

    load("quickstart", ["run.seed=3"])  ──►  Recipe    (a shipped name, or a path)

    tree.py         the tree of sections, and what follows from several of them
    section.py      what all sections share
    run.py          run, checkpoint, journal, monitor
    data.py         data, and the suites of evaluation
    model.py        model
    generation.py   length, sampling, pipeline
    algorithm.py    batch, loss, reference, teacher, critic
    learner.py      learner, sft
    servers.py      resources, weights, serving
    agent.py        agent
    evaluation.py   evaluation
    rules.py        combinations of several sections that are impossible
    loading.py      YAML, bases, overrides ──► Recipe ──► YAML; one clear line per fault

A section has its keys, their defaults and meanings, and says itself what is impossible
in it alone (`Section.problems`).

Unknown keys, wrong types and impossible combinations raise one `MegarlError` that names
the key, file, line and, for a misspelt key, the nearest known one.
"""

from megarl.core.recipe.algorithm import BatchSection, Loss, Reference, Teacher
from megarl.core.recipe.data import ColumnName, Data, Reward, Rows, Service, Suite, Task
from megarl.core.recipe.evaluation import Evaluation
from megarl.core.recipe.generation import Length, PipelineSection
from megarl.core.recipe.learner import Optimizer
from megarl.core.recipe.loading import (
    base_of,
    describe,
    differences,
    dump,
    flat,
    from_tree,
    load,
    load_suite,
    read_mapping,
    shipped,
    shipped_studies,
    shipped_suites,
)
from megarl.core.recipe.model import Model, Moe
from megarl.core.recipe.servers import Resources
from megarl.core.recipe.tree import START_LIMIT_RULE, Recipe

__all__ = [
    "START_LIMIT_RULE",
    "BatchSection",
    "ColumnName",
    "Data",
    "Evaluation",
    "Length",
    "Loss",
    "Model",
    "Moe",
    "Optimizer",
    "PipelineSection",
    "Recipe",
    "Reference",
    "Resources",
    "Reward",
    "Rows",
    "Service",
    "Suite",
    "Task",
    "Teacher",
    "base_of",
    "describe",
    "differences",
    "dump",
    "flat",
    "from_tree",
    "load",
    "load_suite",
    "read_mapping",
    "shipped",
    "shipped_studies",
    "shipped_suites",
]
