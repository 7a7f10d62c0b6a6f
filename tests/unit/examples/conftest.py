"""The folder of the examples, as somebody has it who starts megarl there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """No other test finds the examples' modules, whose names users take, too."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for file in EXAMPLES.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder. What is in it can be imported."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return EXAMPLES
