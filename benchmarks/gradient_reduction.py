"""How far are a bf16 step's gradients off if data-parallel ranks reduce them in bf16
and not in FP32?

    python -m benchmarks.gradient_reduction [--ranks 2] [--microbatches 64] [--tokens
    256] [--json]

The model and the batch are those of benchmarks/gradients.py, the latter divided among
the ranks. megarl adds a rank's micro-batches in FP32 and reduces the sums in FP32,
which is the reference. Three ways of megatron's reduce in bf16:

    all in bf16                    a rank's micro-batches are added in bf16, too: 2
                                   bytes a parameter less, half of the bytes sent
    sent in bf16                   added in FP32, rounded, reduced in bf16: 2 bytes a
                                   parameter more, half of the bytes sent
    sent in bf16, summed in FP32   the same, but the ranks' parts are added in FP32 and
                                   the sum is rounded

A difference is the norm of the difference of all gradients, relative to the reference's
norm.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gradients import SIZES, VOCABULARY
from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner import optimizer
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from tests.parallel.worlds import run_world

IN_FP32 = {"param_name_patterns_for_fp32_local_accumulation": ("all",)}
WAYS: dict[str, dict[str, Any]] = {
    "all in FP32": {},
    "all in bf16": {"grad_reduce_in_fp32": False},
    "sent in bf16": {"grad_reduce_in_fp32": False, **IN_FP32},
    "sent in bf16, summed in FP32": {
        "grad_reduce_in_fp32": False,
        "reduce_scatter_with_fp32_accumulation": True,
        **IN_FP32,
    },
}
"""Changes to megatron's DistributedDataParallelConfig; the first is the reference."""
RESULT = "result.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=64, help="of all ranks together")
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    row = measured(options.ranks, options.microbatches, options.tokens)
    if options.json:
        print(json.dumps(row))
        return
    print(f"{options.ranks} ranks, {options.microbatches} micro-batches of {options.tokens} tokens")
    print(f"{'':28} gradients off by    norm off by")
    for way, found in row["ways"].items():
        print(f"{way:28} {found['gradients']:16.3%} {found['norm']:+14.4%}")


def measured(ranks: int, microbatches: int, tokens: int) -> dict[str, Any]:
    """Return how far each way is off, as fractions: of the gradients, and of their
    norm.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
        run_world(ranks, "benchmarks.gradient_reduction", folder, str(microbatches), str(tokens))
        ways = json.loads(Path(folder, RESULT).read_text())
    return {"ranks": ranks, "microbatches": microbatches, "tokens": tokens, "ways": ways}


def measure(model: Path, microbatches: int, tokens: int) -> None:
    """Act as one rank; rank 0 writes the result into the model's folder."""
    parallel.start(recipes.Model(), seed=0, timeout_s=60)
    batch = sequences(microbatches, tokens)
    reference = None
    ways = {}
    for way, changes in WAYS.items():
        found = reduced_gradients(model, batch, changes)
        if reference is None:
            reference = found
        length = norm(reference)
        ways[way] = {
            "gradients": norm([a - b for a, b in zip(found, reference, strict=True)]) / length,
            "norm": norm(found) / length - 1,
        }
    if dist.get_rank() == 0:
        (model / RESULT).write_text(json.dumps(ways))
    parallel.stop()


def sequences(count: int, tokens: int) -> list[TrainSequence]:
    """Make random sequences, each a micro-batch,
    half of which are to become likelier.
    """
    draw = np.random.default_rng(0)
    weight = np.full(tokens, 1 / (count * (tokens - 1)), np.float32)
    weight[0] = 0
    behaviour = np.full(tokens, -np.log(VOCABULARY), np.float32)
    made = []
    for i in range(count):
        ids = draw.integers(0, VOCABULARY, tokens).astype(np.int32)
        advantage = 1.0 - 2.0 * (i % 2)
        made.append(TrainSequence(i, 0, ids, behaviour, weight, advantage))
    return made


def reduced_gradients(
    model: Path, batch: list[TrainSequence], changes: dict[str, Any]
) -> list[Tensor]:
    """Return this rank's part of each bucket of reduced gradients, in float64."""
    tree = {
        "model": {"path": str(model), "dtype": "bf16"},
        "learner": {"microbatch_tokens": len(batch[0])},
        "resources": {"learner_ranks": dist.get_world_size()},
        "batch": {"prompts": dist.get_world_size()},
    }
    with reduced_as(changes):
        network = Trainer(recipes.from_tree(tree), model).policy
        network.forward_backward(batch)
    parts = []
    for chunk in network.ddp:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                shards = bucket.grad_data.chunk(dist.get_world_size())
                parts.append(shards[dist.get_rank()].double())
    return parts


@contextmanager
def reduced_as(changes: dict[str, Any]) -> Iterator[None]:
    """Let megatron reduce gradients with these changes to its settings."""
    config = optimizer.DistributedDataParallelConfig
    scatter = param_and_grad_buffer.dist_reduce_scatter_func
    add = optimizer.add_gradients_in_fp32

    def add_in_either_type(chunk: torch.nn.Module) -> None:
        add(chunk)
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16 = add_rounded

    def settings(**given: Any) -> Any:
        return config(**(given | changes))

    optimizer.DistributedDataParallelConfig = settings
    optimizer.add_gradients_in_fp32 = add_in_either_type
    yield
    optimizer.DistributedDataParallelConfig = config
    optimizer.add_gradients_in_fp32 = add
    param_and_grad_buffer.dist_reduce_scatter_func = scatter


def add_rounded(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Act as the GPU's product into a bf16 sum: added in FP32, then rounded."""
    total.copy_(total.float() + gradient.T.float() @ inputs.float())


def norm(parts: list[Tensor]) -> float:
    """Return the norm of what all ranks have together."""
    squares = torch.stack([part.square().sum() for part in parts]).sum()
    dist.all_reduce(squares)
    return math.sqrt(float(squares))


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
