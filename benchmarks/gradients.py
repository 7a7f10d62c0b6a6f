"""How far are weight gradients of a bf16 step from FP32's, if summed over micro-batches
in FP32, or after rounding to bf16?

    python -m benchmarks.gradients [--microbatches 64] [--tokens 256] [--json]

Micro-batches go one by one through a Qwen3 of 8 layers with random weights, under the
policy's loss. The reference has the same weights and batch in FP32 throughout. A
difference is the norm of the difference of all layers' weight gradients, relative to
the reference's norm. On a CPU bf16 products are summed in FP32, as on a GPU.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
FUSED = "gradient_accumulation_fusion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
        row = measured(Path(folder), options.microbatches, options.tokens)
    if options.json:
        print(json.dumps(row))
        return
    print(
        f"{row['layers']} layers, {options.microbatches} micro-batches of {options.tokens} tokens"
    )
    for name in ("bf16, summed in FP32", "bf16, each rounded", "of which rounding"):
        print(f"{name:22} {row[name]:.3%}")


def measured(model: Path, microbatches: int, tokens: int) -> dict[str, float]:
    """Return the relative differences of both sums from FP32, and between the two."""
    parallel.start(recipes.Model(), seed=0, timeout_s=60)
    draw = np.random.default_rng(0)
    weight = np.full(tokens, 1 / (microbatches * (tokens - 1)), np.float32)
    weight[0] = 0
    behaviour = np.full(tokens, -np.log(VOCABULARY), np.float32)
    batch = [
        TrainSequence(
            i,
            0,
            draw.integers(0, VOCABULARY, tokens).astype(np.int32),
            behaviour,
            weight,
            1.0 - 2.0 * (i % 2),
        )
        for i in range(microbatches)
    ]
    exact, summed, rounded = (
        gradient(model, batch, *way) for way in (("fp32", True), ("bf16", True), ("bf16", False))
    )
    length = exact.norm()
    return {
        "layers": SIZES["num_hidden_layers"],
        "microbatches": microbatches,
        "tokens": tokens,
        "bf16, summed in FP32": float((summed - exact).norm() / length),
        "bf16, each rounded": float((rounded - exact).norm() / length),
        "of which rounding": float((rounded - summed).norm() / length),
    }


def gradient(model: Path, batch: list[TrainSequence], dtype: str, in_fp32: bool) -> Tensor:
    """Return the gradients of all layers' linear maps, concatenated, in float64.
    in_fp32: summed in FP32, as megarl does.
    """
    tree = {
        "model": {"path": str(model), "dtype": dtype},
        "learner": {"microbatch_tokens": len(batch[0])},
    }
    network = Trainer(recipes.from_tree(tree), model).policy
    linear = [
        module
        for chunk in network.chunks
        for module in chunk.decoder.modules()
        if hasattr(module, FUSED)
    ]
    for module in linear:
        assert getattr(module, FUSED)
        setattr(module, FUSED, in_fp32)
    network.forward_backward(batch)
    return torch.cat([module.weight.main_grad.flatten().double() for module in linear])


if __name__ == "__main__":
    main()
