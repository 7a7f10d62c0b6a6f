"""Training steps of every family, on the stand-in for a GPU or on this machine's CPU.

`python -m tests.stand_in_gpu.steps gpu|cpu DIR FILE`: DIR has a Hugging Face directory for each name in MODELS; FILE gets, as
JSON, what each case's two steps measured and how likely the policy then finds some tokens.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests import stand_in_gpu

if __name__ == "__main__" and sys.argv[1] == "gpu":
    stand_in_gpu.install()

from megarl.core import recipe as recipes
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from tests.parallel.test_learner_layouts import make_batch
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe

MODELS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "llama4": tiny_llama4,
}
VOCABULARY = 131
CRITIC = {"centring": "critic", "zero_variance": "keep", "positive_threshold": None}
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in MODELS},
    "llama fp16": {"model": {"dtype": "fp16"}},
    "llama unpacked": {"learner": {"packing": False}},
    "llama recomputed": {"learner": {"recompute": "full"}},
    "llama critic, reference": {"batch": CRITIC, "reference": {"coefficient": 0.1}},
    "llama warm start": {},
    "llama fp32": {"model": {"dtype": "fp32"}},
    "qwen3_moe fp32": {"model": {"dtype": "fp32", "moe": {"aux_loss": 0.1}}, "learner": {"recompute": "selective"}},
    "llama4 fp32": {"model": {"dtype": "fp32", "moe": {"freeze_router": True}}},
    "llama critic, reference fp32": {
        "model": {"dtype": "fp32"}, "batch": CRITIC, "reference": {"coefficient": 0.1, "where": "loss", "estimator": "k3"},
    },
}  # fmt: skip
MEASURED = ("loss", "grad_norm", "entropy", "ratio_max", "value_loss", "critic_grad_norm", "kl_reference")


def measured(directory: Path, case: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Take two steps and score a rollout. The metrics, and where parameters and gradients lie."""
    recipe = recipes.from_tree(
        {
            "model": {"path": str(directory / case.split()[0])} | changes.get("model", {}),
            "batch": {"prompts": 4} | changes.get("batch", {}),
            "reference": changes.get("reference", {}),
            "learner": {"microbatch_tokens": 64, "optimizer": {"lr": 1e-3, "warmup_steps": 0}} | changes.get("learner", {}),
        }
    )  # fmt: skip
    parallel.start(recipe.model, seed=1, timeout_s=60)
    trainer = Trainer(recipe, Path(recipe.model.path), supervised="warm start" in case)
    sequences = trainer.sequences(make_batch())
    rows = [trainer.train_step(sequences) for _ in range(2)]
    tokens = sequences[0].tokens
    score = Score(version=trainer.step, rollouts=(ScoredRollout(tokens=tokens, first=1),), against=0)
    parameters = [p for network in trainer.networks for chunk in network.chunks for p in chunk.parameters()]
    tensors = [*parameters, *(p.main_grad for p in parameters if hasattr(p, "main_grad"))]
    return {
        "steps": [{name: row[name] for name in MEASURED if name in row} for row in rows],
        "logprobs": trainer.score(score, "test").logprobs[0].tolist(),
        "devices": sorted({tensor.device.type for tensor in tensors}),
    }


def main(device: str, directory: Path, file: Path) -> None:
    with stand_in_gpu.on_stand_in_gpu() if device == "gpu" else nullcontext():
        found = {case: measured(directory, case, changes) for case, changes in CASES.items()}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
