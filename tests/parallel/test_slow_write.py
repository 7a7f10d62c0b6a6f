"""A rank that writes its part of a checkpoint slowly: the others wait longer than a
collective may take.

`python -m tests.parallel.test_slow_write DIR` is one rank; DIR has a Hugging Face
directory `hf`.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint, parallel
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama

LIMIT_S = 10.0
SLOW_S = 22.0


@pytest.mark.slow
def test_a_rank_may_write_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    run_world(2, "tests.parallel.test_slow_write", str(tmp_path))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-0000001"]


def main(directory: Path) -> None:
    recipe = recipes.from_tree({"model": {"path": str(directory / "hf"), "dtype": "fp32"}})
    parallel.start(recipe.model, 0, LIMIT_S)
    trainer = Trainer(recipe, directory / "hf")
    trainer.step = 1
    checkpoints = Checkpoints(directory / "run", 1, trainer, directory / "hf")
    checksum = checkpoint.checksum

    def slow(*args: Any) -> int:
        time.sleep(SLOW_S)
        return checksum(*args)

    if dist.get_rank() == 1:
        checkpoint.checksum = slow  # type: ignore[assignment]
    checkpoints.save()
    checkpoints.finish()
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
