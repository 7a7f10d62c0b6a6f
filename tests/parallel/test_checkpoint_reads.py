"""What data-parallel ranks read of a checkpoint: each its share, which it passes on;
and what happens if one cannot read it.

`python -m tests.parallel.test_checkpoint_reads DIR` is one rank; DIR has a Hugging Face
directory `hf`.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.base.ranks import gathered
from megarl.core.base.rundir import step_folder
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint, parallel
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama

# isort: split
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

RANKS = 4


def test_each_rank_reads_its_share(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", hidden_size=256)
    run_world(RANKS, "tests.parallel.test_checkpoint_reads", str(tmp_path))


def bytes_read() -> int:
    """By this process so far, from files or the cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main(directory: Path) -> None:
    recipe = recipes.from_tree(
        {
            "model": {"path": str(directory / "hf"), "dtype": "fp32"},
            "resources": {"learner_ranks": RANKS},
        }
    )
    parallel.start(recipe.model, 0, 60.0)
    trainer = Trainer(recipe, directory / "hf")
    trainer.step = 1
    checkpoints = Checkpoints(directory / "run", 1, trainer, directory / "hf")
    path = step_folder(directory / "run", 1)
    checkpoints.save()
    checkpoints.finish()
    checkpoints.load_latest()  # also imports
    begin = bytes_read()
    checkpoints.load(path)
    read = sum(gathered(bytes_read() - begin))
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    print(f"{size:,} bytes of parameters and AdamW, {read:,} read", flush=True)
    assert size > 4 << 20
    assert read < 3 * size, (
        "once for the checksums, once to load, and a little for what describes it"
    )

    load = TorchDistLoadShardedStrategy.load

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    if dist.get_rank() == 3:
        TorchDistLoadShardedStrategy.load = fail
    with pytest.raises(
        MegarlError, match=r"its files are intact, but cannot be loaded: .*the disk is gone"
    ):
        checkpoint.load_model(path, trainer.policy.chunks)
    TorchDistLoadShardedStrategy.load = load
    checkpoints.load(path)
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
