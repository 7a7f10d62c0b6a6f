"""A whole run of the warm-started tiny policy, made once by the command a user runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.runs import SMALL, LiveRun, check_nothing_left


@pytest.fixture(scope="session")
def finished(workplace: Path) -> Iterator[LiveRun]:
    """It has ended well and left no process and no port."""
    run = runs.start(workplace, "run.name=whole", *SMALL)
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family, ports = run.family(), run.ports()
        assert run.finish() == 0, run.tail()
        check_nothing_left(family, ports)
        yield run
    finally:
        run.kill()
