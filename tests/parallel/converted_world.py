"""Ranks of tests/parallel/test_converted_checkpoints.py: DIR/NAME/{hf,converted};
writes DIR/NAME/real.

Each model is loaded from a checkpoint converted at another layout, exported and
compared; then saved by megatron.
"""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.recipe import Model
from tests.damage import flip_a_bit

# isort: split
from safetensors.torch import load_file


def main(directory: Path) -> None:
    for path in sorted(p for p in directory.iterdir() if p.is_dir()):
        experts = family_of(path / "hf").architecture.experts
        model = Model(
            path=str(path / "hf"),
            dtype="bf16",
            tensor_parallel=2,
            pipeline_parallel=2,
            expert_parallel=2 if experts else 1,
            expert_tensor_parallel=1 if experts else 2,
        )
        parallel.start(model, seed=0, timeout_s=100)
        chunks = build.build(model, path / "hf")
        checkpoint.load_model(path / "converted", chunks)
        stored = load_file(path / "hf" / "model.safetensors")
        exported = {
            name: tensor.clone() for name, tensor in hf.export(chunks, family_of(path / "hf"))
        }
        assert exported
        for name, tensor in exported.items():
            assert torch.equal(tensor, stored[name]), (path.name, name)
        meta = checkpoint.CheckpointMeta(
            step=1, version=1, hf_source=str(path / "hf"), model=model.model_dump()
        )
        checkpoint.save(path / "real", checkpoint.model_state(chunks), meta)
        check_that_all_ranks_refuse_it_damaged(path / "real", chunks)
    parallel.stop()


def check_that_all_ranks_refuse_it_damaged(path: Path, chunks: list[Any]) -> None:
    """Only one rank reads the file that is damaged. Then it is put right."""
    file = path / f"__{dist.get_world_size() - 1}_0.distcp"
    for damaged in (True, False):
        if dist.get_rank() == 0:
            flip_a_bit(file)
        dist.barrier()
        said = re.escape(f"{file}: its checksum is ")
        with pytest.raises(checkpoint.CorruptCheckpoint, match=said) if damaged else nullcontext():
            checkpoint.load_model(path, chunks)
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
