"""A world of ranks loads what one process converted; and what that world saves is,
shard for shard, what one process writes.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from checkpoints_tools.__main__ import main
from checkpoints_tools.shards import Box, Shards
from tests.parallel.worlds import run_world
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen3_5_moe, tiny_qwen3_moe


def run(*arguments: object) -> None:
    assert main([str(a) for a in arguments]) == 0


def test_real_worlds_read_and_write_the_same_shards(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "llama/hf", torch.bfloat16, vocab_size=131, tie_word_embeddings=True)
    tiny_qwen3_moe(tmp_path / "moe/hf", torch.bfloat16, mlp_only_layers=[1])
    tiny_llama4(tmp_path / "llama4/hf", torch.bfloat16, num_key_value_heads=2)
    tiny_qwen3_5_moe(tmp_path / "delta/hf", torch.bfloat16)
    run("convert", "hf-to-megatron", tmp_path / "delta/hf", tmp_path / "delta/converted", "--ep", 4)
    run("convert", "hf-to-megatron", tmp_path / "llama/hf", tmp_path / "llama/converted", "--tp", 4)
    run("convert", "hf-to-megatron", tmp_path / "moe/hf", tmp_path / "moe/converted", "--ep", 4)
    run(
        "convert",
        "hf-to-megatron",
        tmp_path / "llama4/hf",
        tmp_path / "llama4/converted",
        "--tp",
        2,
    )
    run_world(4, "tests.parallel.converted_world", str(tmp_path))

    with_experts = ["--ep", 2]
    models = {"llama": [], "moe": with_experts, "llama4": with_experts, "delta": with_experts}
    for name, experts in models.items():
        folder = tmp_path / name
        run(
            "convert",
            "hf-to-megatron",
            folder / "hf",
            folder / "like-it",
            "--tp",
            2,
            "--pp",
            2,
            *experts,
        )
        real = Shards(folder / "real")
        ours = Shards(folder / "like-it")
        real_files, our_files = (
            FileSystemReader(shards.path).read_metadata().storage_data for shards in (real, ours)
        )
        assert real.tensors.keys() == ours.tensors.keys()
        for key, tensor in real.tensors.items():
            assert sorted(tensor.boxes) == sorted(ours.tensors[key].boxes), key
            assert (tensor.shape, tensor.dtype) == (
                ours.tensors[key].shape,
                ours.tensors[key].dtype,
            )
            assert {box: owner(real_files, key, box) for box in tensor.boxes} == {
                box: owner(our_files, key, box) for box in tensor.boxes
            }
            for box in tensor.boxes:
                assert torch.equal(real.read(key, box), ours.read(key, box)), (key, box)
        run("convert", "megatron-to-hf", folder / "real", folder / "back")
        run("verify", folder / "hf", folder / "back")


def owner(files: Any, key: str, box: Box) -> str:
    """The rank that wrote it, as its file's name says: `__RANK_N.distcp`."""
    return str(files[MetadataIndex(key, torch.Size(box[0]))].relative_path).split("_")[2]
