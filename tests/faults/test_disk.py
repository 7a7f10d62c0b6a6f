"""A disk that is full, for real: one message that names the file, no part of a file,
and the run goes on once there is room.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base.rundir import latest_rows, write_jsonl
from megarl.core.recipe import from_tree
from tests.faults.disks import Disk
from tests.parallel.test_learner_loop import LIMIT_S, Run, trained
from tests.tiny import tiny_llama
from tests.unit.conftest import write_model
from tests.unit.run.test_train import Life, nobody

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1500)]

Mount = Callable[[Path, int], Disk]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_llama(tmp_path / "model", vocab_size=131)
    return tmp_path / "model"


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run", model, 5)
    yield made
    made.close()


def test_full_during_a_checkpoint(run: Run, disk: Mount) -> None:
    """Steps 2 and 4 are saved, and the end. The disk is filled by somebody else after
    the first.
    """
    full = disk(run.rundir.checkpoints, 64)
    run.controller.held = 3
    learner = run.learn()
    run.wait_for_checkpoint(2)
    full.fill()
    run.controller.held = None
    assert learner.wait(LIMIT_S) == 2, run.log()
    assert "the checkpoint could not be written (is the disk full?)" in run.log()
    assert "No space left on device" in run.log()
    assert sorted(p.name for p in run.rundir.checkpoints.iterdir()) == [
        "somebody-elses",
        "step-0000002",
    ]
    full.free()
    assert run.learn().wait(LIMIT_S) == 0, run.log()
    assert "continuing from" in run.log()
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3, 4]
    assert sorted(p.name for p in run.rundir.checkpoints.iterdir()) == [
        "step-0000004",
        "step-0000005",
    ]


def test_full_during_metrics(run: Run, disk: Mount) -> None:
    """Only metrics.jsonl is on the full disk."""
    full = disk(run.rundir.path / "small", 1)
    (full.path / "metrics.jsonl").touch()
    run.rundir.metrics.symlink_to(full.path / "metrics.jsonl")
    run.controller.held = 2
    learner = run.learn()
    run.wait_for_step(2)
    full.fill()
    run.controller.held = None
    assert learner.wait(LIMIT_S) == 2, run.log()
    assert (
        "metrics.jsonl: cannot be written: No space left on device; make room and resume"
        in run.log()
    )
    before = run.rows()
    full.free()
    assert run.learn().wait(LIMIT_S) == 0, run.log()
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3, 4]
    assert trained(run.rows()[: len(before)]) == trained(before)


def test_full_under_the_whole_run(tmp_path: Path, disk: Mount) -> None:
    """The supervisor, over stand-in roles, has everything on the full disk: it says so
    and leaves nobody behind.
    """
    full = disk(tmp_path / "runs", 16)
    write_model(tmp_path / "model")
    write_jsonl(
        tmp_path / "sums.jsonl",
        [{"id": f"{n}", "prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(5)],
    )
    tree: dict[str, Any] = {
        "run": {"name": "r", "dir": str(full.path), "steps": 10_000},
        "model": {"path": str(tmp_path / "model"), "dtype": "fp32"},
        "data": {"tasks": {"math": {"train": str(tmp_path / "sums.jsonl"), "heldout": 1}}},
        "serving": {"kv_tokens": 65_536},
        "length": {"interruption": "...</think>"},
    }
    life = Life(from_tree(tree), tmp_path, report=False)
    try:
        life.wait_for_steps(3)
        full.fill()
        status, output = life.end()
    finally:
        life.process.kill()
    assert status != 0, output
    assert "cannot be written: No space left on device; make room and resume" in output
    assert nobody(life.all_pids())
    full.free()
    steps = len(latest_rows(life.rundir.metrics)) + 2
    changed = tree["run"] | {"resume": "auto", "steps": steps}
    again = Life(from_tree(tree | {"run": changed}), tmp_path, report=False)
    status, output = again.end()
    assert status == 0, output
    assert [row["step"] for row in latest_rows(again.rundir.metrics)] == list(range(steps))
    assert json.loads(again.rundir.summary.read_text())["outcome"] == "finished"
