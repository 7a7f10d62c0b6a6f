"""Weight gradients are summed over micro-batches in FP32, none of them rounded to the
weight's type before.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.network import Network
from megarl.core.learner.trainer import Trainer
from tests.tiny import tiny_llama, tiny_qwen3_moe

MICROBATCHES = 64
TOKENS = 48
LAYERS = 2


def linears(network: Network) -> dict[str, torch.Tensor]:
    """The FP32 sums of the weights of linear maps, experts' too."""
    return {
        f"{name}.{key}": parameter.main_grad.clone()
        for chunk in network.chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "gradient_accumulation_fusion")
        for key, parameter in module.named_parameters(recurse=False)
        if key.startswith("weight")
    }


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen3_moe])
def test_a_micro_batch_64_times_is_64_times_its_gradient(
    tmp_path: Path, one_rank: None, tiny: Any
) -> None:
    tiny(tmp_path / "hf", torch.bfloat16, num_hidden_layers=LAYERS)
    tree = {
        "model": {"path": str(tmp_path / "hf"), "dtype": "bf16"},
        "learner": {"microbatch_tokens": TOKENS},
    }
    network = Trainer(recipes.from_tree(tree), tmp_path / "hf").policy
    weight = np.full(TOKENS, 1 / (TOKENS - 1), np.float32)
    weight[0] = 0
    tokens = np.random.default_rng(0).integers(0, 128, TOKENS).astype(np.int32)
    sequence = TrainSequence(0, 0, tokens, np.full(TOKENS, -5.0, np.float32), weight, 1.0)
    found = []
    for count in (1, MICROBATCHES):
        network.clear()
        network.forward_backward([sequence] * count)
        found.append(linears(network))
    one, all_of_them = found
    learning = {
        name: gradient for name, gradient in one.items() if gradient.any()
    }  # not an expert without a token
    assert len(learning) >= 4 * LAYERS
    for name, gradient in learning.items():
        expected = MICROBATCHES * gradient
        total = all_of_them[name]
        assert (total - expected).abs().max() <= MICROBATCHES * 2**-24 * expected.abs().max(), (
            name  # additions round to FP32
        )
        assert not torch.equal(gradient, gradient.bfloat16().float()), name
