"""Every example is in the index, has a test, and says how it is run."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_style import faults

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.*")
    if path.suffix in (".py", ".yaml") and "__pycache__" not in path.parts
)
INDEX = (ROOT / "examples" / "README.md").read_text()
TESTS = "".join(
    path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)
)
LONGEST = 200


def test_the_index_names_every_file_and_no_other() -> None:
    named = re.findall(r"^\| \[(\S+)\]\(\1\)", INDEX, re.MULTILINE)
    assert sorted(named) == [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_test_names_it(path: Path) -> None:
    assert re.search(rf"\b{path.stem}\b", TESTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_read_at_once(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    if path.suffix == ".py":
        assert faults(text) == []


SHOWN = re.compile(r"^ *(\S+=\S+ )?(python examples/|megarl )|^data: \{", re.MULTILINE)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix == ".py"], ids=lambda path: path.name
)
def test_its_docstring_says_how_to_run_it(path: Path) -> None:
    assert SHOWN.search(ast.get_docstring(ast.parse(path.read_text())) or "")


@pytest.mark.parametrize("page", re.findall(r"\]\((\.\./\S+)\)", INDEX))
def test_its_pages_exist(page: str) -> None:
    assert (ROOT / "examples" / page).is_file()
