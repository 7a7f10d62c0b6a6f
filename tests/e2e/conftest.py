"""A warm-started tiny policy and a whole run of it, made once by the commands a user runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.runs import SMALL, LiveRun, check_nothing_left, megarl


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `megarl train quickstart` can run: data, and a policy that has seen half the warm start."""
    folder = tmp_path_factory.mktemp("e2e")
    made = megarl("data", "arithmetic", "runs/quickstart-data", cwd=folder)
    assert made.returncode == 0, made.stderr
    warm = megarl("sft", "quickstart", "sft.steps=150", cwd=folder)
    assert warm.returncode == 0, warm.stderr
    return folder


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
