"""The assumed cost of a sequence is what a count in a forward pass of transformers'
model gives.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.core.algorithm.packing import HEAD_PASSES, LAYER_PASSES, cost_of
from megarl.core.base import architecture
from tests.tiny import (
    MOONLIGHT,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)

MODELS: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": partial(tiny_qwen3_moe, mlp_only_layers=[1]),
    "llama4": tiny_llama4,
    "glm4_moe": tiny_glm4_moe,
    "deepseek_v3": tiny_deepseek_v3,
    "moonlight": partial(tiny_deepseek_v3, **MOONLIGHT),
    "gpt_oss": tiny_gpt_oss,
}


@pytest.mark.parametrize("name", MODELS)
def test_as_torch_counts_it(name: str, tmp_path: Path) -> None:
    """transformers' eager attention computes the half above the diagonal too, and each
    expert of its Llama 4 every token.
    """
    model = MODELS[name](tmp_path)
    tokens = 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    ours = architecture.in_directory(tmp_path)
    cost = cost_of(ours)
    head = 2 * 64 * 128 * tokens
    layers = cost.token * tokens - HEAD_PASSES * head + 2 * cost.attention(tokens)
    not_chosen = 2 * ours.routed_parameters * 3 // 4 * tokens if name == "llama4" else 0
    assert counter.get_total_flops() == layers / LAYER_PASSES + head + not_chosen


@pytest.mark.parametrize("tiny", [tiny_qwen3_5, tiny_qwen3_5_moe, tiny_qwen3_next])
def test_delta_networks_cost_as_torch_counts_them(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """But for a chunk's triangular system, which torch does not count and is taken to
    cost as much as a product with v; the convolution is not counted here.
    """
    model = tiny(tmp_path)
    tokens = 64  # one chunk
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    ours = architecture.in_directory(tmp_path)
    assert ours.delta is not None
    cost = cost_of(ours)
    head = 2 * 64 * 128 * tokens
    layers = cost.token * tokens - HEAD_PASSES * head + 2 * cost.attention(tokens)
    convolution = counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
    system = 2 * tokens * 64 * ours.delta.value * len(ours.delta_layers)
    counted = counter.get_total_flops() - convolution + system
    assert counted == layers / LAYER_PASSES + head


def test_chunks_bound_what_local_layers_cost(tmp_path: Path) -> None:
    """Twice the chunk costs three layers of four twice as much, and the last, without
    rotation, four times.
    """
    tiny_llama4(tmp_path)
    cost = cost_of(architecture.in_directory(tmp_path))
    assert (cost.local_pair, cost.chunk) == (3 * cost.pair, 16)
    assert cost.attention(32) == (3 * 2 + 4) / 4 * cost.attention(16)


def test_windows_bound_what_local_layers_cost(tmp_path: Path) -> None:
    """In every second layer a token meets 16 positions, its own among them, or as many
    as there are.
    """
    tiny_gpt_oss(tmp_path)
    cost = cost_of(architecture.in_directory(tmp_path))
    assert (cost.local_pair, cost.window) == (cost.pair, 16)
    assert cost.attention(16) == 16**2 * cost.pair
    assert cost.attention(40) == (40**2 + 16 * (40 + 40 - 16)) / 2 * cost.pair
