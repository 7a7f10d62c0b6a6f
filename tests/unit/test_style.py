"""The text of megarl: one thought a line. CONTRIBUTING.md says why; ruff and the
formatter hold the rest.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megarl", "checkpoints_tools")
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))

VAGUE_NAMES = frozenset(
    "said told found made here there whole apart more held left known given taken far behind "
    "beside put upto one other wanted asked coming gone kept shown begun begin near each most "
    "wide before after now then what why who where which how way rest out over under again "
    "alone joined lost seen served own sums ready due come meanwhile".split()
)
"""Adverbs, participles and question words: they do not say what a variable holds."""

LONGEST_FUNCTION = 60
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def parallel_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield `a, b = x, y`. A swap (`a, b = b, a`) is allowed:
    it has no other spelling.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) < 2:
            continue
        targets = {ast.unparse(element) for element in target.elts}
        values = {ast.unparse(element) for element in node.value.elts}
        if targets != values:
            yield node.lineno, "several assignments in one: write one a line"


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, list[ast.AST]]]:
    """Yield each statement with the expressions in it, without those of the statements
    inside.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        inside: list[ast.AST] = []
        queue = list(ast.iter_child_nodes(node))
        while queue:
            child = queue.pop()
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                continue
            inside.append(child)
            queue.extend(ast.iter_child_nodes(child))
        yield node, inside


def crowded_statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield statements with more than one ternary, and `:=` outside the head of an if
    or a while.
    """
    for statement, inside in statements(tree):
        ternaries = sum(isinstance(node, ast.IfExp) for node in inside)
        if ternaries > 1:
            yield statement.lineno, f"{ternaries} ternaries in one statement: name the values"
        if isinstance(statement, (ast.If, ast.While)):
            continue
        for node in inside:
            if isinstance(node, ast.NamedExpr):
                yield node.lineno, ":= outside the head of an if or a while: assign first"


def nested_comprehensions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield comprehensions within comprehensions."""
    for node in ast.walk(tree):
        if not isinstance(node, COMPREHENSIONS):
            continue
        children = [inner for child in ast.iter_child_nodes(node) for inner in ast.walk(child)]
        if any(isinstance(inner, COMPREHENSIONS) for inner in children):
            yield node.lineno, "a comprehension in a comprehension: name the inner one, or loop"


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield variables, parameters and functions whose name does not say
    what they are.
    """
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name.lstrip("_")
        if name in VAGUE_NAMES:
            assert isinstance(node, (ast.expr, ast.stmt, ast.arg))
            yield node.lineno, f"`{name}` does not say what it is"


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield functions that do not fit on a screen."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > LONGEST_FUNCTION:
            yield node.lineno, f"`{node.name}` has {length} lines, more than {LONGEST_FUNCTION}"


RULES = (
    parallel_assignments,
    crowded_statements,
    nested_comprehensions,
    vague_names,
    long_functions,
)


def faults(source: str) -> list[str]:
    """Return what this source breaks, as `line: what`."""
    tree = ast.parse(source)
    broken = [fault for rule in RULES for fault in rule(tree)]
    return [f"{line}: {text}" for line, text in sorted(broken)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a, b = 1, 2", "1: several assignments in one: write one a line"),
        ("x = a if b else c if d else e", "1: 2 ternaries in one statement: name the values"),
        ("y = [z := 1]", "1: := outside the head of an if or a while: assign first"),
        (
            "x = [[b for b in a] for a in c]",
            "1: a comprehension in a comprehension: name the inner one, or loop",
        ),
        ("def f(held): ...", "1: `held` does not say what it is"),
        ("def f():\n" + "    x = 1\n" * 60, "1: `f` has 61 lines, more than 60"),
    ],
)
def test_each_rule_catches_its_case(source: str, expected: str) -> None:
    assert faults(source) == [expected]


@pytest.mark.parametrize(
    "source",
    [
        "a, b = b, a",
        "a, b = pair",
        "if (match := find(x)) is not None:\n    y = a if match else b\nelse:\n    y = c if d else e",
        "names = [a.name for a in b if a.name]",
        "def holds(tokens): ...",
        "def f():\n" + "    x = 1\n" * 59,
    ],
)
def test_each_rule_passes_what_is_read_once(source: str) -> None:
    assert faults(source) == []


def test_every_file_of_the_packages() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{fault}" for path in FILES for fault in faults(path.read_text())
    ]
    assert len(FILES) > 100
    assert broken == []


if __name__ == "__main__":  # python tests/unit/test_style.py FILE_OR_FOLDER ...
    import sys

    for argument in sys.argv[1:]:
        paths = sorted(Path(argument).rglob("*.py")) or [Path(argument)]
        for path in paths:
            for fault in faults(path.read_text()):
                print(f"{path}:{fault}")
