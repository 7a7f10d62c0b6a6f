"""Deltas over a history of kills: after each publication all servers hold the learner's
bits. Real servers: tests/stack.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.parallel.worlds import run_world
from tests.tiny import tiny_qwen3_moe

LONG = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("ranks", "publications", "kills"),
    [(1, 60, 8), pytest.param(1, 1000, 50, marks=LONG), pytest.param(2, 1000, 50, marks=LONG)],
)
def test_bits_are_equal_after_every_publication(
    tmp_path: Path, ranks: int, publications: int, kills: int
) -> None:
    tiny_qwen3_moe(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, hidden_size=32)
    arguments = (str(tmp_path), str(ranks), str(publications), str(kills))
    output = run_world(4, "tests.parallel.deltas_world", *arguments, timeout_s=1100)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["kills"] == kills
    assert found["deltas"] + found["full"] == publications
    assert found["deltas"] > publications / 2
    assert found["full"] > kills / 2
    assert found["failed"] > 0
