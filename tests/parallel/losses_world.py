"""One rank of test_losses_layouts: `python -m tests.parallel.losses_world DIR`, DIR
holding batch.msgpack, model/, reference/ and for each setting NAME.pt, transformers'
result. Differences are max|d| / max|expected|.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.types import Batch, decode
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from tests.parallel.learner_world import difference, full_gradients, say, start

# isort: split

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"context_parallel": 2},
]
LONGEST = 100
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {
        "loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.15, "entropy_bonus": 0.05},
        "batch": {"aggregation": "sample", "advantage": "group"},
    },
    "dr-dapo": {
        "loss": {
            "kind": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "correction": "truncate",
            "cap": 1.5,
        },
        "batch": {"aggregation": "constant", "advantage": "none", "centring": "leave_one_out"},
    },
    "gmpo": {
        "loss": {"kind": "gmpo", "clip_low": 0.2, "clip_high": 0.2},
        "batch": {"aggregation": "sample", "advantage": "group"},
    },
    "dppo": {
        "loss": {
            "kind": "dppo",
            "divergence": "kl",
            "clip_low": 1e-3,
            "clip_high": 1e-3,
            "log_ratio_penalty": 0.1,
            "sequence_mask": [0.5, 1.5],
        },
        "batch": {"aggregation": "token", "advantage": "none"},
    },
    "kl-in-loss": {
        "loss": {"kind": "reinforce"},
        "batch": {"aggregation": "token", "advantage": "none"},
        "reference": {"coefficient": 0.3, "estimator": "k3"},
    },
    "kl-in-reward": {
        "loss": {"kind": "reinforce"},
        "batch": {"aggregation": "prompt", "advantage": "running"},
        "reference": {"coefficient": 0.05, "estimator": "k1"},
    },
}


def main(directory: Path) -> None:
    batch: Batch = decode((directory / "batch.msgpack").read_bytes(), Batch)
    for layout in LAYOUTS:
        for name, setting in SETTINGS.items():
            check(directory, batch, name, setting, layout)
        check_start(directory, batch, layout)
    parallel.stop()


def recipe_of(
    directory: Path, setting: dict[str, Any], layout: dict[str, Any], of: str = "model"
) -> Recipe:
    """of: the directory of model.path, where the reference is."""
    return recipes.from_tree(
        {
            "model": {"path": str(directory / of), "dtype": "fp32", **layout},
            "resources": {"learner_ranks": int(os.environ["WORLD_SIZE"])},
            "batch": {"prompts": 4, **setting["batch"]},
            "sampling": {"temperature": 0.7},
            "length": {"thinking_tokens": [1, LONGEST - 1], "answer_tokens": 1},
            "loss": setting["loss"],
            "reference": setting.get("reference", {}),
            "learner": {"microbatch_tokens": 64},
        }
    )


def check(
    directory: Path, batch: Batch, name: str, setting: dict[str, Any], layout: dict[str, Any]
) -> None:
    recipe = recipe_of(directory, setting, layout, "reference")
    trainer = start(directory, recipe)
    sequences = trainer.sequences(batch)
    metrics = trainer.policy.forward_backward(sequences)
    gradients = full_gradients(trainer.policy)
    expected = torch.load(directory / f"{name}.pt", weights_only=False)
    worst = max(
        difference(gradients[n], g, expected["gradients"]) for n, g in expected["gradients"].items()
    )
    off = abs(metrics["loss"] - expected["loss"]) / expected["magnitude"]
    say(f"{name} {layout}: gradients {worst:.1e}, loss {off:.1e}")
    assert worst <= 2e-6, (name, layout)
    assert off <= 1e-6, (name, layout)
    for key, value in expected["metrics"].items():
        assert abs(metrics[key] - value) <= 1e-5 * abs(value), (
            name,
            layout,
            key,
            metrics[key],
            value,
        )
    if recipe.reference.coefficient:
        check_reference(sequences, expected["reference"], recipe)


def check_reference(
    sequences: list[TrainSequence], expected: dict[tuple[int, int], torch.Tensor], recipe: Recipe
) -> None:
    """Its log-probs are transformers'; what is not trained has none and
    pays nothing.
    """
    for s in sequences:
        trained = s.loss_weight > 0
        assert isinstance(s.reference_logprobs, np.ndarray)
        assert (
            abs(s.reference_logprobs[trained] - expected[s.ticket, s.sample].numpy()).max() <= 1e-5
        )
        assert not s.reference_logprobs[~trained].any()
        if not recipe.reference.in_loss:
            assert isinstance(s.kl_penalty, np.ndarray)
            paid = recipe.reference.coefficient * (s.behaviour_logprobs - s.reference_logprobs)
            assert abs(s.kl_penalty - paid).max() <= 1e-6
            assert not s.kl_penalty[~trained].any()


def check_start(directory: Path, batch: Batch, layout: dict[str, Any]) -> None:
    """At its start the policy is the reference, to the last bit."""
    recipe = recipe_of(directory, SETTINGS["kl-in-loss"], layout)
    trainer = start(directory, recipe)
    metrics = trainer.policy.forward_backward(trainer.sequences(batch))
    assert metrics["kl_reference"] == metrics["kl_reference_max"] == 0, (layout, metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    assert not dist.is_initialized()
