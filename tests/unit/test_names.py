"""One name, one thing: no two classes of megarl share a name, so a reader who has met one knows which is meant."""

import ast
from collections import defaultdict
from pathlib import Path

import megarl

ROOT = Path(megarl.__file__).parent


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_docstring_begins_with_of() -> None:
    begun = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in ROOT.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.lstrip().startswith(('"""Of ', 'r"""Of '))
    ]
    assert begun == []
