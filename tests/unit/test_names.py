"""One name, one thing: no two classes or types share a name, so a reader who has met
one knows which is meant.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    path
    for part in ("megarl", "checkpoints_tools", "benchmarks")
    for path in (ROOT / part).rglob("*.py")
)
PROGRAM_OF_ITS_OWN = ROOT / "benchmarks" / "gpu"
"""Is carried to a machine and run there alone; what it measures has the plainest names.
"""
BY_SGLANG = "EntryClass"
"""SGLang looks for this name in each module with models."""


def named(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Classes and type aliases at the top level, without a leading underscore; of an
    alias what it stands for.
    """
    for node in module.body:
        match node:
            case ast.ClassDef(name):
                yield name.lstrip("_"), f"class at line {node.lineno}"
            case ast.TypeAlias(ast.Name(name), value=value) | ast.Assign([ast.Name(name)], value):
                name = name.lstrip("_")
                if name[:1].isupper() and any(letter.islower() for letter in name):
                    yield name, ast.unparse(value)


def test_no_two_things_have_one_name() -> None:
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in MODULES:
        if PROGRAM_OF_ITS_OWN not in path.parents:
            for name, thing in named(ast.parse(path.read_text())):
                what = f"{path}: {thing}" if thing.startswith("class ") else thing
                places[name][what].append(str(path.relative_to(ROOT)))
    twice = {name: dict(things) for name, things in places.items() if len(things) > 1}
    assert {name: things for name, things in twice.items() if name != BY_SGLANG} == {}
    assert {"Recipe", "Row", "Decision"} <= places.keys()  # a class, `type …`, and `… = …`
