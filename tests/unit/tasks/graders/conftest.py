"""Sandboxes that can be had here; tests of the others are skipped, and say why."""

import pytest

from megarl.tasks.graders.sandbox import SandboxKind
from tests.unit.tasks.graders.asking import why_not


@pytest.fixture(scope="module", params=["bubblewrap", "rlimits"])
def kind(request: pytest.FixtureRequest) -> SandboxKind:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def bubblewrap() -> SandboxKind:
    if reason := why_not("bubblewrap"):
        pytest.skip(reason)
    return "bubblewrap"
