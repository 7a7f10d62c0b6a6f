"""What the learner takes a sequence to cost is what the planner makes of config.json, and what is counted in a forward pass."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.core.base import architecture
from megarl.core.learner.network import HEAD_PASSES, LAYER_PASSES, cost_of
from megarl.core.models import family_of
from megarl.lab.planning import formulas
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen3, tiny_qwen3_moe

MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": partial(tiny_qwen3_moe, mlp_only_layers=[1]),
    "llama4": tiny_llama4,
}


@pytest.mark.parametrize("name", MODELS)
def test_as_the_planner_has_it(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    ours, planned = cost_of(family_of(tmp_path)), formulas.sequence_cost(architecture.read(str(tmp_path)))
    assert (ours.pair, ours.local_pair, ours.chunk) == (planned.pair, planned.local_pair, planned.chunk)
    assert ours.token == pytest.approx(
        planned.token, rel=0.02
    )  # the planner counts norms, which tiny models have more of
    assert (LAYER_PASSES, HEAD_PASSES) == (formulas.BACKWARD, formulas.HEAD_BACKWARD)


def test_as_torch_counts_it(tmp_path: Path) -> None:
    """transformers' eager attention computes the half above the diagonal too."""
    model, tokens = tiny_llama(tmp_path), 48
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64))
    cost, head = cost_of(family_of(tmp_path)), 2 * 64 * 128 * tokens
    layers = cost.token * tokens - HEAD_PASSES * head + 2 * cost.attention(tokens)
    assert counter.get_total_flops() == layers / LAYER_PASSES + head
