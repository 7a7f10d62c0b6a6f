"""The packages' descriptions, which docs/explanation/architecture.md sends its
readers to.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent
    for top in ("megarl", "checkpoints_tools")
    for path in (ROOT / top).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_module_is_named(package: Path) -> None:
    description = (package / "__init__.py").read_text().split('"""')[1]
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    parts = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    missing = sorted(name for name in modules | parts if name not in description)
    assert missing == []
