"""The recipe: one YAML file, one typed tree, which drives every role.

    load("quickstart", ["run.seed=3"])  ──►  Recipe    (a shipped name, or a path)

    tree.py     the tree, its defaults and what each key means
    rules.py    which combinations are impossible
    loading.py  YAML, bases, overrides ──► Recipe ──► YAML; one clear line per fault

Unknown keys, wrong types and impossible combinations raise one `MegarlError` that names
the key, file, line and, for a misspelt key, the nearest known one.
"""

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
from megarl.core.recipe.tree import (
    START_LIMIT_RULE,
    BatchSection,
    ColumnName,
    Data,
    Evaluation,
    Length,
    Loss,
    Model,
    Moe,
    Optimizer,
    PipelineSection,
    Recipe,
    Reference,
    Resources,
    Reward,
    Rows,
    Service,
    Suite,
    Task,
    Teacher,
)

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
