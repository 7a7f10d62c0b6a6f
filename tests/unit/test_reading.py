"""docs/reading.md is true: each file exists, and none uses a file that comes after it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reading.md").read_text()
FILES = re.findall(r"^\d+\. \[(\S+)\]\(\.\./megarl/\1\)", PAGE, re.MULTILINE)
NAMES = ["megarl." + file.removesuffix(".py").replace("/", ".") for file in FILES]


def test_the_page_counts_right() -> None:
    files, lines = re.findall(r"^([\d,]+) files, about ([\d,]+) lines", PAGE, re.MULTILINE)[0]
    count = sum(len((ROOT / "megarl" / file).read_text().splitlines()) for file in FILES)
    assert int(files) == len(FILES) == len(re.findall(r"^\d+\. ", PAGE, re.MULTILINE))
    assert abs(int(lines.replace(",", "")) - count) < 500, count


def test_nothing_is_used_before_it_is_explained() -> None:
    wrong = []
    for at, file in enumerate(FILES):
        for node in ast.walk(ast.parse((ROOT / "megarl" / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                used = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                wrong += [f"{file} uses {name}" for name in NAMES[at + 1 :] if name in used]
    assert not wrong
