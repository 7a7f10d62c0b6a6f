"""The table in docs/reference/models.md of what is tested for each architecture, read
from the parameters of the tests.

    python -m tests.support_matrix     # prints it
"""

import inspect
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.core.base.architecture import READERS, Architecture, in_directory
from megarl.core.recipe import load
from tests import recipe_twins, twin_models
from tests.e2e import test_recipe_twins
from tests.parallel import models_world, test_models_layouts, test_routing_replay
from tests.stack import test_server_experts, test_server_families, test_server_tensor_parallel
from tests.unit.checkpoints_tools import test_round_trips

ALWAYS = "yes"
SLOW = "slow"
"""The test is marked slow: in `make test-families` and `make test-slow`, not in the
gate.
"""
KINDS = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "VPP": "virtual_pipeline_parallel",
    "CP": "context_parallel",
    "EP": "expert_parallel",
    "ETP": "expert_tensor_parallel",
    "recompute": "recompute",
}
"""Columns of the learner's layouts: the key of a layout."""
COLUMNS = (*KINDS, "replay", "export", "server", "server TP", "whole experts", "a run")

type Row = dict[str, str]


def made_by(entry: Any) -> str:
    """The architecture that an entry's function of tests/tiny.py makes, whose
    annotations are texts.
    """
    make = maker_of(entry)
    return str(inspect.signature(getattr(make, "func", make)).return_annotation)


def maker_of(entry: Any) -> Any:
    """The function of a test's entry, which may be a tuple or a case that has it."""
    first = entry[0] if isinstance(entry, tuple) else entry
    return getattr(first, "make", first)


def note(row: Row, column: str, is_slow: bool) -> None:
    """Note that a test covers a column; one of the gate counts more than a slow one."""
    if row.get(column) != ALWAYS:
        row[column] = SLOW if is_slow else ALWAYS


def rows() -> dict[str, Row]:
    """By architecture, what is tested."""
    table: dict[str, Row] = {name: {} for name in READERS}
    table["LlamaForCausalLM"]["server"] = ALWAYS  # of most tests in tests/stack
    for name, model in test_models_layouts.MODELS.items():
        row = table[made_by(model)]
        for column, is_slow in layouts(shape_of(model), name in test_models_layouts.SLOW):
            note(row, column, is_slow)
    for routed in test_routing_replay.MODELS.values():
        note(table[made_by(routed)], "replay", False)
    for name, exported in test_round_trips.FAMILIES.items():
        note(table[made_by(exported)], "export", name in test_round_trips.SLOW)
    families = test_server_families
    for name, case in families.CASES.items():
        note(table[made_by(case)], "server", name in families.SLOW)
    for name, served in test_server_tensor_parallel.MODELS.items():
        note(table[made_by(served)], "server TP", name != "llama4")
    for name in ("deepseek_v3", *test_server_experts.SLOW):
        note(table[made_by(families.CASES[name])], "whole experts", name != "deepseek_v3")
    for recipe, family in twins():
        made = made_by(twin_models.FAMILIES[family])
        note(table[made], "a run", recipe not in test_recipe_twins.GATE)
    return table


def shape_of(entry: Any) -> Architecture:
    """The architecture of the tiny model that an entry makes."""
    with tempfile.TemporaryDirectory() as directory:
        maker_of(entry)(Path(directory))
        return in_directory(directory)


def layouts(shape: Architecture, is_slow: bool) -> Iterator[tuple[str, bool]]:
    """Yield the columns that layouts of two and four ranks cover; those of two ranks
    are slow.
    """
    for world in (2, 4):
        for layout in models_world.layouts_of(shape, world):
            for column, key in KINDS.items():
                if key in layout:
                    yield column, is_slow or world == 2


def twins() -> Iterable[tuple[str, str]]:
    """Each recipe with the family of its twin's model."""
    for recipe in (*test_recipe_twins.GATE, *test_recipe_twins.OTHERS):
        yield recipe, recipe_twins.family_of(load(recipe))


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, row in rows().items():
        cells = [row.get(column, "") for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
