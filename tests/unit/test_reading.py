"""docs/explanation/reading.md is true: each file exists, none uses a file that comes
after it, and what several use is explained.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/reading.md").read_text()
FILES = re.findall(r"^\d+\. \[(\S+)\]\(\.\./\.\./megarl/\1\)", PAGE, re.MULTILINE)
HELPERS = re.findall(r"^- \[\S+\]\(\.\./\.\./megarl/(\S+)\)", PAGE, re.MULTILINE)


@cache
def imports(module: Path) -> dict[str, Path]:
    """Name in the module ──► the file of megarl it comes from, through the packages
    that pass it on.
    """
    places = {}
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl"):
            folder = ROOT / (node.module or "").replace(".", "/")
            for alias in node.names:
                name = alias.asname or alias.name
                if (folder / alias.name).is_dir():
                    places[name] = folder / alias.name / "__init__.py"
                elif (folder / f"{alias.name}.py").exists():
                    places[name] = folder / f"{alias.name}.py"
                elif folder.is_dir():
                    places[name] = imports(folder / "__init__.py").get(
                        alias.name, folder / "__init__.py"
                    )
                else:
                    places[name] = folder.with_suffix(".py")
    return places


USED = {
    file: {str(p.relative_to(ROOT / "megarl")) for p in imports(ROOT / "megarl" / file).values()}
    for file in FILES
}
"""File of the page ──► the files of megarl that define what it imports."""


def test_the_page_counts_right() -> None:
    files, lines = re.findall(r"^([\d,]+) files, about ([\d,]+) lines", PAGE, re.MULTILINE)[0]
    count = sum(len((ROOT / "megarl" / file).read_text().splitlines()) for file in FILES)
    assert int(files) == len(FILES) == len(re.findall(r"^\d+\. ", PAGE, re.MULTILINE))
    assert abs(int(lines.replace(",", "")) - count) < 500, count


def test_nothing_is_used_before_it_is_explained() -> None:
    wrong = [
        f"{file} uses {later}"
        for at, file in enumerate(FILES)
        for later in FILES[at + 1 :]
        if later in USED[file]
    ]
    assert not wrong


def test_what_three_files_use_is_on_the_page() -> None:
    users = Counter(file for used in USED.values() for file in used)
    often = {file for file, count in users.items() if count >= 3}
    assert (
        "core/recipe/tree.py" in often
    )  # a Recipe is imported from the package, not from this file
    assert often <= {*FILES, *HELPERS}, often - {*FILES, *HELPERS}
    assert all((ROOT / "megarl" / file).exists() for file in HELPERS)
