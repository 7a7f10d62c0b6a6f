"""A whole run of the warm-started tiny policy, made once by the command a user runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.runs import SMALL, LiveRun, check_nothing_left, megarl

WATCHED = (
    "checkpoint.milestones=[3]",
    "checkpoint.keep_best=true",
    "monitor.prometheus=true",
    "monitor.profile_steps=[3,4]",
)


@pytest.fixture(scope="session")
def finished(workplace: Path) -> Iterator[LiveRun]:
    """It has ended well and left no process and no port."""
    run = runs.start(workplace, "run.name=whole", *SMALL, *WATCHED)
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        run.wait_for(lambda: run.steps() >= 2, "two steps")
        run.scrapes = run.scraped()
        live = megarl("trace", str(run.rundir.path), "--output", "live.json", cwd=workplace)
        assert live.returncode == 0, live.stderr
        assert run.finish() == 0, run.tail()
        check_nothing_left(family, ports)
        yield run
    finally:
        run.kill()


SCORE = (
    "megarl eval --model runs/quickstart --suite arithmetic --samples 4 --limit 100 --out"
    " runs/scored"
)
EXPORT = "megarl export runs/quickstart exported"
"""Commands of README.md, whose output several tests look at."""


@pytest.fixture(scope="session")
def quickstart(finished: LiveRun) -> Path:
    """The folder in which runs/quickstart is the finished run."""
    (finished.cwd / "runs" / "quickstart").symlink_to(
        finished.rundir.path, target_is_directory=True
    )
    return finished.cwd


@pytest.fixture(scope="session")
def scored(quickstart: Path) -> str:
    """What SCORE printed."""
    done = megarl(*SCORE.split()[1:], cwd=quickstart)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def exported(quickstart: Path) -> Path:
    """The directory that EXPORT made."""
    done = megarl(*EXPORT.split()[1:], cwd=quickstart)
    assert done.returncode == 0, done.stderr
    return quickstart / "exported"
