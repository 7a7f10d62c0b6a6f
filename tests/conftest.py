"""For all tests: property tests have no deadline, for the machine may be busy, and the
same examples each time; one thread per process, because there are many; and the policy
that real runs begin with.
"""

import gc
import os

# Before torch: two tests at once, with two threads each, wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.runs import megarl

gc.disable()  # while tests are imported, as in megarl.core.base.process.importing
# Else pytest rewrites all tests each time, and every process compiles what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("megarl", deadline=None, derandomize=True)
settings.register_profile(
    "explore", deadline=None
)  # pytest --hypothesis-profile=explore: other examples each time
settings.register_profile(
    "long", deadline=None, max_examples=3_000, suppress_health_check=list(HealthCheck)
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "megarl")
)  # HYPOTHESIS_PROFILE=long: by hand, for minutes

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Begun in the background by a shell without job control: whoever is started from
    # here would never hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # Begun under nohup: whoever is started from here would never learn that a terminal
    # or a job has gone.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder in which `megarl train quickstart` can run: data, and a policy.

    Its warm start, though short, is long enough that each batch has groups to train.
    The first worker that needs the folder makes it, and each works in a copy.
    """
    from filelock import FileLock

    own = tmp_path_factory.mktemp("e2e")
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent
    with FileLock(shared / "workplace.lock"):
        if not (shared / "workplace").exists():
            making = shared / "workplace.new"
            making.mkdir()
            made = megarl("data", "arithmetic", "runs/quickstart-data", cwd=making)
            assert made.returncode == 0, made.stderr
            warm = megarl("sft", "quickstart", "sft.steps=250", cwd=making)
            assert warm.returncode == 0, warm.stderr
            making.rename(shared / "workplace")
    shutil.copytree(shared / "workplace", own, dirs_exist_ok=True)
    return own


FINISHED = ("test_run.py", "test_eval.py", "test_documentation.py")
"""Files that look at one run of a minute, the fixture `finished`: one worker has them
all.
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """--dist loadfile, with FINISHED as one file."""
    from xdist.scheduler import LoadFileScheduling

    class LoadRuns(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "finished" if Path(file).name in FINISHED else file

    return LoadRuns(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """While the first worker makes the fixture `workplace` for FINISHED, the others
    have what needs none. Short tests come last, so that all workers end together.
    """

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if item.path.name in FINISHED:
            return 0
        if folder == "parallel":
            return 1
        return 3 if folder == "unit" else 2

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, for benchmarks/faults.md."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}: {name}: {value}")
