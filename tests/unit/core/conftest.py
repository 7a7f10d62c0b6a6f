"""One rank in this process: no other rank, no port."""

from collections.abc import Iterator

import pytest

from megarl.core.models import parallel
from megarl.core.recipe import Model


@pytest.fixture
def one_rank() -> Iterator[None]:
    parallel.start(Model(), seed=0, timeout_s=60)
    yield
    parallel.stop()
