"""One of the learner's ranks is killed where it matters: all ranks end, and what is
trained later is the same, bit for bit.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.injection import signal_at, with_faults
from tests.parallel.test_learner_loop import LIMIT_S, Run, trained
from tests.tiny import tiny_llama

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 5
PLACES = {
    "forward": ("TrainedNetwork.forward_backward", 4),
    "optimiser": ("TrainedNetwork.update", 4),
    "checkpoint": ("_with_checksums", 2),
}
"""Function, and the call in which it happens: the step behind the first checkpoint, and
the second checkpoint.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "model"
    tiny_llama(path, vocab_size=131)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[dict[str, Any]]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), model, STEPS, resources={"learner_ranks": 2})
    try:
        assert run.learn().wait(LIMIT_S) == 0, run.log()
    finally:
        run.close()
    return run.rows()


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    made = Run(tmp_path, model, STEPS, resources={"learner_ranks": 2})
    yield made
    made.close()


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(
    run: Run, undisturbed: list[dict[str, Any]], place: str, tmp_path: Path, record_property: Any
) -> None:
    marker = tmp_path / "done"
    function, call = PLACES[place]
    learner = run.learn(with_faults(INJECT_AT=signal_at(function, call, "KILL", marker, rank=1)))
    _until(marker, learner, run)
    killed = time.monotonic()
    assert learner.wait(LIMIT_S) not in (0, None), run.log()
    record_property("seconds to the end of all ranks", round(time.monotonic() - killed, 1))
    names = {path.name for path in run.rundir.checkpoints.iterdir()}
    assert "step-0000002" in names
    assert "step-0000004" not in names
    assert run.learn().wait(LIMIT_S) == 0, run.log()
    record_property("seconds until it had trained all", round(time.monotonic() - killed, 1))
    assert "continuing from" in run.log()
    assert trained(run.rows()) == trained(undisturbed)
    assert sorted(p.name for p in run.rundir.checkpoints.iterdir()) == [
        "step-0000004",
        "step-0000005",
    ]


def _until(marker: Path, learner: Any, run: Run) -> None:
    limit = time.monotonic() + LIMIT_S
    while not marker.exists():
        assert time.monotonic() < limit, run.log()
        assert learner.poll() is None, run.log()
        time.sleep(0.02)
