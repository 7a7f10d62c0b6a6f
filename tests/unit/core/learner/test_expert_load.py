"""The balancing loss of a step is the Switch Transformer's, each micro-batch counting
by its tokens; filler is balanced.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner.microbatch import assemble
from megarl.core.learner.network import Network, loaded_chunks
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel
from tests.tiny import gradients, tiny_qwen3_moe

COEFFICIENT = 0.3
LENGTHS = [40, 9, 23]


def switch_loss(logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """E * sum over experts of (share of choices) * (mean probability), of router logits
    [tokens, E]: arXiv 2101.03961, eq. 4 to 6, with `chosen` choices a token.
    """
    probabilities = logits.softmax(-1)
    choices = torch.zeros_like(logits).scatter(-1, logits.topk(chosen, -1).indices, 1.0)
    return logits.shape[-1] * (choices.mean(0) / chosen * probabilities.mean(0)).sum()


def balancing_by_transformers(
    model: Any, ids: list[np.ndarray], path: Path
) -> dict[str, torch.Tensor]:
    """Gradients of the loss of a step whose micro-batches are one sequence each, in
    float64. The model is spoilt.
    """
    model = model.double()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_pre_hook(
                lambda gate, inputs: seen.append(inputs[0].flatten(0, -2) @ gate.weight.T)
            )
    for tokens in ids:
        seen.clear()
        model(torch.from_numpy(tokens).long()[None])
        share = len(tokens) / sum(map(len, ids))
        sum(COEFFICIENT * share * switch_loss(logits, 2) for logits in seen).backward()
    return gradients(model, path)


def test_balancing_gradient_is_that_of_the_switch_transformer(tmp_path: Path) -> None:
    """Advantages of zero leave nothing else. Micro-batches of one sequence each: theirs
    are the losses of sequences.
    """
    model = tiny_qwen3_moe(tmp_path / "hf", num_hidden_layers=2)
    draw = np.random.default_rng(1)
    ids = [draw.integers(0, 128, n).astype(np.int32) for n in LENGTHS]
    expected = balancing_by_transformers(model, ids, tmp_path / "gradients")

    recipe = recipes.from_tree(
        {
            "model": {
                "path": str(tmp_path / "hf"),
                "dtype": "fp32",
                "moe": {"aux_loss": COEFFICIENT},
            },
            "learner": {"microbatch_tokens": 1},
        }
    )
    parallel.start(recipe.model, seed=0, timeout_s=60)
    try:
        trainer = Trainer(recipe, tmp_path / "hf")
        metrics = trainer.policy.forward_backward(
            [_untrained(i, tokens) for i, tokens in enumerate(ids)]
        )
        parameters = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
        found = dict(hf.export(trainer.policy.chunks, trainer.policy.family))
    finally:
        parallel.stop()
    assert metrics["microbatches"] == len(LENGTHS)
    largest = max(g.abs().max() for g in expected.values())
    assert max((found[name] - expected[name]).abs().max() for name in expected) <= 2e-6 * largest


def test_filler_is_spread_over_the_experts(tmp_path: Path) -> None:
    """Else the rank of one expert would compute a row that is all filler, or a large
    part of all rows' filler, alone.
    """
    tiny_qwen3_moe(tmp_path / "hf", num_hidden_layers=2)
    recipe = recipes.from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "fp32"}})
    chosen: list[torch.Tensor] = []
    parallel.start(recipe.model, seed=0, timeout_s=60)
    try:
        network = Network(*loaded_chunks(recipe, tmp_path / "hf"), recipe)
        (chunk,) = network.chunks
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
            router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[1].sum(0)))
        row = assemble([], 2048, network.layout, network.device)
        with torch.no_grad():
            chunk(row.tokens, None, None, packed_seq_params=row.packed)
    finally:
        parallel.stop()
    assert len(chosen) == 2
    assert all((tokens > 0).all() for tokens in chosen), chosen


def _untrained(index: int, tokens: np.ndarray) -> TrainSequence:
    ones: Any = np.ones(len(tokens), np.float32)
    return TrainSequence(index, 0, tokens, -ones, np.append(0.0, ones[1:]).astype(np.float32), 0.0)
