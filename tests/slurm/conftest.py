"""The cluster, and a folder to submit from: the launch scripts, data, a warm policy,
and the megarl under test.
"""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, DaemonDied
from tests.slurm.jobs import Jobs

ROOT = Path(__file__).parents[2]
NODES = 3


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Whatever failed, if a daemon has died, that is why."""
    try:
        return (yield)
    except Exception as error:
        fixtures = getattr(item, "funcargs", {})
        dead = fixtures["cluster"].dead() if "cluster" in fixtures else []
        if dead and not isinstance(error, DaemonDied):
            raise DaemonDied(f"{', '.join(dead)} died meanwhile") from error
        raise


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    installed = subprocess.run(
        [Path(__file__).with_name("install.sh")], capture_output=True, text=True
    )
    if installed.returncode == 3:
        pytest.skip(f"no Slurm: {installed.stderr.strip()}")
    assert installed.returncode == 0, installed.stderr
    running = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture
def cluster(slurm: Cluster) -> Cluster:
    """With all its daemons."""
    slurm.revive()
    return slurm


@pytest.fixture
def down(cluster: Cluster) -> Iterator[list[str]]:
    """Names of nodes that a test has set down; they are up again after it."""
    names: list[str] = []
    yield names
    for name in names:
        cluster.says("scontrol", "update", f"nodename={name}", "state=resume")
    cluster.wait_for_idle()


@pytest.fixture
def stand_in_jobs(cluster: Cluster, down: list[str], tmp_path: Path) -> Iterator[Jobs]:
    """Runs whose roles are small stand-in processes."""
    (tmp_path / "launch").symlink_to(ROOT / "launch", target_is_directory=True)
    megarl = tmp_path / "megarl"
    megarl.write_text(
        f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in_megarl.py")} "$@"\n'
    )
    megarl.chmod(0o755)
    made = Jobs(cluster, tmp_path, {"MEGARL": str(megarl), "PYTHONPATH": str(ROOT)})
    yield made
    made.cancel()


@pytest.fixture
def jobs(cluster: Cluster, down: list[str], workplace: Path) -> Iterator[Jobs]:
    """Submits from `workplace`; what is left of its jobs is cancelled."""
    launch = workplace / "launch"
    if not launch.exists():
        launch.symlink_to(ROOT / "launch", target_is_directory=True)
    made = Jobs(
        cluster,
        workplace,
        {"MEGARL": str(Path(sys.executable).with_name("megarl")), "PYTHONPATH": str(ROOT)},
    )
    yield made
    made.cancel()
