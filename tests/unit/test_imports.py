"""Who may import whom: arrows between the parts of megarl go one way."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import megarl

ROOT = Path(megarl.__file__).parent
CORE = [
    ["base"],
    ["recipe"],
    ["telemetry"],
    ["algorithm", "models", "journal"],
    ["client"],
    ["sync", "sampling"],
    ["evaluation"],
    ["learner", "engine"],
    ["controller"],
]
"""Each part may import those of earlier rows."""
BELOW = {
    f"core.{part}": [f"core.{p}" for row in CORE[:n] for p in row]
    for n, row in enumerate(CORE)
    for part in row
}
AROUND = ["core", "run", "checks", "predict", "tools", "cli"]
"""The same of what is around core: each may import those before it, and tasks."""
MAY = BELOW | {
    "shims": [],
    "tasks": ["core.base", "core.recipe", "core.client", "core.sampling", "core.evaluation"],
    "run": ["core"],
}
MAY |= {part: ["tasks", *AROUND[:n]] for n, part in enumerate(AROUND) if n > 1}
MAY = {
    part: [*others, *(["shims"] if part.startswith("core") else [])] for part, others in MAY.items()
}
"""A role's main applies shims by name."""


def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name without `megarl.`; packages by theirs."""
    files = {file.relative_to(ROOT).with_suffix(""): file for file in ROOT.rglob("*.py")}
    return {
        ".".join(path.parts).removesuffix(".__init__"): ast.parse(file.read_text())
        for path, file in files.items()
    }


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules of megarl that this one imports, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl"):
            base = (node.module or "").removeprefix("megarl").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".removeprefix(".")
                yield name if name in known else base
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("megarl.") for a in node.names if a.name.startswith("megarl.")
            )


def part(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("core.") else 1])


def test_arrows_go_one_way() -> None:
    trees = modules()
    wrong = sorted(
        f"{module} imports {other}"
        for module, tree in trees.items()
        for other in imported(tree, set(trees))
        if part(module) in MAY
        and part(other) != part(module)
        and not any(part(other) == p or part(other).startswith(p + ".") for p in MAY[part(module)])
        and other
    )
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    """Neither of imports at the top of modules nor of those in functions."""
    trees = modules()
    graph = {
        module: set(imported(tree, set(trees))) & set(trees) - {module}
        for module, tree in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None
