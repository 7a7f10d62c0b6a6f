"""Transformer Engine's layers on a CPU, as far as they go there: built, loaded,
exported, stored and restored, bit for bit.
"""

import importlib.metadata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.models import build
from tests.parallel.worlds import run_world
from tests.tiny import (
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)

pytestmark = [pytest.mark.te, pytest.mark.timeout(1000)]

MODELS: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": partial(tiny_qwen3, tie_word_embeddings=True),
    "qwen3_moe": partial(tiny_qwen3_moe, mlp_only_layers=[1]),
    "llama4": tiny_llama4,
    "glm4_moe": tiny_glm4_moe,
    "glm4_moe_lite": tiny_glm4_moe_lite,
    "deepseek_v3": tiny_deepseek_v3,
    "minimax_m2": tiny_minimax_m2,
    "gpt_oss": tiny_gpt_oss,
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layouts_hold_what_was_loaded(tmp_path: Path, ranks: int) -> None:
    for name, tiny in MODELS.items():
        tiny(tmp_path / "models" / name, torch.bfloat16, vocab_size=131)  # which no TP divides
    print(run_world(ranks, "tests.parallel.te_world", str(tmp_path), timeout_s=900, fresh=True))


def test_a_run_on_a_cpu_does_without_it() -> None:
    """As in the GPU image where no GPU is seen: its AdamW and its norm of gradients
    need one.
    """
    from megatron.core import optimizer

    assert importlib.metadata.version("transformer-engine-torch")
    assert (build.HAVE_TE, optimizer.USING_PYTORCH_OPTIMIZER) == (False, True)
