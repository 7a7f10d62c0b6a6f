"""One rank of test_critic_layouts: `python -m tests.parallel.critic_world DIR`, with
batch.msgpack, model/ and expected.pt of transformers in DIR. Differences are max|d| /
max|expected|.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.base.types import Batch, decode
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from tests.parallel.learner_world import difference, full_gradients, say, start
from tests.sequences import training_sequences

# isort: split
from megatron.core import parallel_state

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    {"context_parallel": 2},
]
FP16: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel": 2}, "fp32"),
    ({"pipeline_parallel": 2}, "fp16"),  # only one stage has FP32 parameters
    ({}, "fp16"),
]
"""Layouts of an fp16 policy, and the precision of its critic."""
FP16_ROUNDING = 2000.0
"""By how much limits are wider in fp16. Its steps are 8,000 times those of FP32."""
GAMMA = 1.0
LAMBDA = 0.9


def main(directory: Path) -> None:
    batch: Batch = decode((directory / "batch.msgpack").read_bytes(), Batch)
    for layout in LAYOUTS:
        check_gradients(directory, batch, layout)
        if "context_parallel" not in layout:
            check_resumed(directory, batch, layout)
    for layout, critic in FP16:
        check_gradients(directory, batch, layout | {"dtype": "fp16"}, critic, FP16_ROUNDING)
        check_fp16(directory, batch, layout, critic)
    parallel.stop()


def recipe_of(directory: Path, layout: dict[str, Any], critic: str = "fp32") -> Recipe:
    optimizer = {"lr": 1e-4, "warmup_steps": 0}
    return recipes.from_tree(
        {
            "model": {"path": str(directory / "model"), "dtype": "fp32", **layout},
            "resources": {"learner_ranks": int(os.environ["WORLD_SIZE"])},
            "batch": {
                "prompts": 4,
                "centring": "critic",
                "zero_variance": "keep",
                "aggregation": "token",
            },
            "loss": {"kind": "reinforce"},
            "learner": {"microbatch_tokens": 160, "epochs": 2, "optimizer": optimizer},
            "critic": {
                "dtype": critic,
                "lam": LAMBDA,
                "warmup_steps": 1,
                "optimizer": {"lr": 1e-4},
            },
        }
    )


def check_gradients(
    directory: Path,
    batch: Batch,
    layout: dict[str, Any],
    critic_dtype: str = "fp32",
    wider: float = 1.0,
) -> None:
    """Values, advantages and the gradients of both networks are transformers' in
    float64. wider: factor of the limits.
    """
    expected = torch.load(directory / "expected.pt", weights_only=False)
    trainer = start(directory, recipe_of(directory, layout, critic_dtype))
    assert trainer.critic is not None
    network = trainer.critic
    if parallel_state.is_pipeline_last_stage():
        head = network.chunks[-1].output_layer.weight
        assert not head.any()  # a new critic expects nothing
        with torch.no_grad():
            head.copy_(expected["head"])
    network.optimizer.reload_model_params()
    sequences, _ = trainer.critic.estimated(training_sequences(batch, trainer.recipe))
    for sequence, values, advantages in zip(
        sequences, expected["values"], expected["advantages"], strict=True
    ):
        trained = sequence.loss_weight > 0
        assert isinstance(sequence.value, np.ndarray)
        assert isinstance(sequence.advantage, np.ndarray)
        assert abs(sequence.value[trained] - values).max() <= 1e-5 * wider, layout
        assert abs(sequence.advantage[trained] - advantages).max() <= 2e-5 * wider, layout
        assert not sequence.value[~trained].any()
    metrics = trainer.critic.forward_backward(sequences)
    critic = full_gradients(network)
    critic["head"] = critic.pop("lm_head.weight")[
        :1
    ]  # export takes it for the head that it replaces
    trainer.policy.forward_backward(sequences)
    found = {
        "critic": (critic, network.loss_scale),
        "policy": (full_gradients(trainer.policy), trainer.policy.loss_scale),
    }
    for name, (gradients, scale) in found.items():
        by = scale.value if scale else 1.0
        worst = max(
            difference(gradients[n].double() / by, g, expected[name])
            for n, g in expected[name].items()
        )
        say(f"{name} {layout}: gradients {worst:.1e}")
        assert worst <= 3e-6 * wider, (name, layout)
    for key, value in expected["metrics"].items():
        assert abs(metrics[key] - value) <= 1e-5 * wider * max(1, abs(value)), (
            layout,
            key,
            metrics[key],
            value,
        )


def check_fp16(directory: Path, batch: Batch, layout: dict[str, Any], critic: str) -> None:
    """An overflow skips both networks on all ranks. From a checkpoint both go on bit
    for bit, and the scale with them: saved one update before it grows, it grows.
    """
    recipe = recipe_of(directory, layout | {"dtype": "fp16"}, critic)
    sequences = training_sequences(batch, recipe)
    folder = directory / "checkpoints" / f"fp16 {layout} {critic}"
    trainer = start(directory, recipe)
    assert trainer.critic is not None
    scale = trainer.policy.loss_scale
    what = f"fp16 {layout} critic {critic}"
    assert scale is not None
    for _ in range(2):
        trainer.train_step(sequences)
    before = weights_of(trainer)
    scale.restore({"scale": 2.0**40, "growth": 0, "hysteresis": 2})
    assert trainer.train_step(sequences)["scaler_skipped"] == 2, (
        what
    )  # both epochs; the second halves it
    assert (trainer.skipped_steps, scale.value) == (0, 2.0**39), what
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True)), what
    scale.restore({"scale": 2.0**17, "growth": 998, "hysteresis": 1})
    checkpoints = Checkpoints(folder, 2, trainer, directory / "model")
    checkpoints.save()
    went_on = [trainer.train_step(sequences) for _ in range(2)]
    checkpoints.finish()
    assert scale.value == 2.0**18, what  # the window was full after the first of them
    weights = weights_of(trainer)
    again = start(directory, recipe)
    assert Checkpoints(folder, 2, again, directory / "model").load_latest()
    assert [again.train_step(sequences) for _ in range(2)] == went_on, what
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_of(again), strict=True)), what


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    """Those of policy and critic."""
    assert trainer.critic is not None
    chunks = (*trainer.policy.chunks, *trainer.critic.chunks)
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]


def check_resumed(directory: Path, batch: Batch, layout: dict[str, Any]) -> None:
    """From a checkpoint written after the critic's warm-up, both networks go on as if
    nothing had happened, bit for bit.
    """
    recipe = recipe_of(directory, layout)
    sequences = training_sequences(batch, recipe)
    folder = directory / "checkpoints" / ("first" if not layout else str(layout))
    trainer = start(directory, recipe)
    trainer.train_step(sequences)
    trainer.train_step(sequences)
    checkpoints = Checkpoints(folder, 2, trainer, directory / "model")
    checkpoints.save()
    went_on = [trainer.train_step(sequences) for _ in range(2)]
    checkpoints.finish()
    weights = weights_of(trainer)
    again = start(directory, recipe)
    assert Checkpoints(folder, 2, again, directory / "model").load_latest()
    assert [again.train_step(sequences) for _ in range(2)] == went_on, layout
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_of(again), strict=True))
    if layout:  # written by data-parallel ranks, each with a part of the optimiser
        other = start(directory, recipe)
        assert Checkpoints(
            directory / "checkpoints" / "first", 2, other, directory / "model"
        ).load_latest()
        first = other.train_step(sequences)
        for name in ("value_loss", "value_mean", "critic_grad_norm", "grad_norm"):
            assert abs(first[name] - went_on[0][name]) <= 1e-4 * max(1, abs(went_on[0][name])), (
                layout,
                name,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    assert not dist.is_initialized()
