"""model.fp32_head: what a bf16 policy says of its own hidden states,
against float64.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.network import Network, loaded_chunks
from tests.tiny import tiny_llama

TOKENS = np.arange(48, dtype=np.int32)


@pytest.mark.parametrize(
    ("dtype", "fp32_head", "wide"),
    [
        ("bf16", "both", True),
        ("bf16", "learner", True),
        ("bf16", "server", False),
        ("bf16", "none", False),
        ("fp32", "none", True),
    ],
)
def test_which_side_has_an_fp32_head(
    one_rank: None, tmp_path: Path, dtype: str, fp32_head: str, wide: bool
) -> None:
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    tiny_llama(tmp_path, dtype=types[dtype])
    recipe = recipes.from_tree(
        {"model": {"path": str(tmp_path), "dtype": dtype, "fp32_head": fp32_head}}
    )
    network = Network(*loaded_chunks(recipe, tmp_path), recipe)
    (chunk,) = network.chunks
    hidden: list[torch.Tensor] = []
    chunk.decoder.register_forward_hook(
        lambda _module, _inputs, output: hidden.append(output[:, 0])
    )
    wanted = np.ones(len(TOKENS), np.float32)
    wanted[0] = 0
    sequence = TrainSequence(0, 0, TOKENS, np.zeros_like(wanted), wanted, 0.0)
    head = network.lm_head(1.0)
    (logprobs,) = network.ask([sequence], lambda **given: head(**given)[0])
    assert hidden[0].dtype == types[dtype]
    log_p = (hidden[0].double() @ chunk.output_layer.weight.double().T).log_softmax(-1)
    exact = log_p[:-1].gather(-1, torch.from_numpy(TOKENS).long()[1:, None])[:, 0]
    off = np.abs(logprobs[1:] - exact.detach().numpy()).max()
    assert off < 5e-6 if wide else off > 1e-3, (
        "a server with the other head would say something else"
    )
