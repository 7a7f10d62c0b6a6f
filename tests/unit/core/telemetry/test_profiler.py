"""The window of torch's profiler: those steps and no others, read back from what it
writes.
"""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.core.telemetry.profiler import Profiler


def train(profiler: Profiler, steps: range) -> None:
    """The learner's loop, with a step that can be recognised."""
    profiler.step(steps.start)
    for step in steps:
        with torch.profiler.record_function(f"work {step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.step(step + 1)
    profiler.stop()


def worked(folder: Path) -> dict[str, set[int]]:
    """Steps in each file."""
    found = {}
    for path in folder.glob("*.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {e["name"] for e in events if e.get("ph") == "X"}
        assert any("mm" in name for name in names), "operators are there, too"
        found[path.name] = {int(name.split()[1]) for name in names if name.startswith("work ")}
    return found


@pytest.mark.parametrize(
    ("start", "steps", "trained", "expected"),
    [
        (2, 2, range(0, 6), {"step-0000002-rank-1.json.gz": {2, 3}}),
        (0, 1, range(0, 3), {"step-0000000-rank-1.json.gz": {0}}),
        (1, 4, range(3, 9), {"step-0000003-rank-1.json.gz": {3, 4}}),  # resumed within the window
        (2, 5, range(0, 4), {"step-0000002-rank-1.json.gz": {2, 3}}),  # ended within it
        (2, 2, range(5, 9), {}),
        (2, 0, range(0, 6), {}),
    ],
)
def test_window(
    start: int, steps: int, trained: range, expected: dict[str, set[int]], tmp_path: Path
) -> None:
    train(
        Profiler((start, start + steps - 1) if steps else None, tmp_path / "profile", rank=1),
        trained,
    )
    assert worked(tmp_path / "profile") == expected


def test_nothing_runs_outside_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr("megarl.core.telemetry.profiler.profile", lambda **_: made.append(1))
    train(Profiler((10, 12), tmp_path, rank=0), range(0, 8))
    assert made == []
    assert not torch.autograd._profiler_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_kernels_and_memory_of_a_gpu(tmp_path: Path) -> None:
    profiler = Profiler((1, 1), tmp_path, rank=0)
    for step in range(4):
        profiler.step(step)
        torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
        torch.cuda.synchronize()
    profiler.stop()
    events = json.loads(gzip.decompress((tmp_path / "step-0000001-rank-0.json.gz").read_bytes()))[
        "traceEvents"
    ]
    assert any(e.get("cat") == "kernel" for e in events)
    assert (tmp_path / "step-0000001-rank-0.pickle").stat().st_size > 0
