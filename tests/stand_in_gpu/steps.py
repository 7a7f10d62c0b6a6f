"""Training steps of every family, on the stand-in for a GPU or on this machine's CPU.

`python -m tests.stand_in_gpu.steps gpu|cpu DIR FILE`: DIR has a Hugging Face directory
for each name in MODELS; FILE gets, as JSON, what each case's two steps measured, how
likely the policy then finds some tokens, and what it published before.
"""

import hashlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests import stand_in_gpu

if __name__ == "__main__" and sys.argv[1] == "gpu":
    stand_in_gpu.install()

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.microbatch import assemble
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel
from megarl.core.sync.transport import buckets
from tests.parallel.test_learner_layouts import make_batch
from tests.parallel.test_routing_replay import with_routing
from tests.tiny import (
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_moe,
)

MODELS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "llama4": tiny_llama4,
    "deepseek_v3": tiny_deepseek_v3,
    "glm4_moe": tiny_glm4_moe,
    "minimax_m2": tiny_minimax_m2,
    "gpt_oss": tiny_gpt_oss,
}
VOCABULARY = 131
BUCKET = 1 << 15
CRITIC = {"centring": "critic", "zero_variance": "keep", "positive_threshold": None}
CASES: dict[str, dict[str, Any]] = {
    # In bf16 a rounding may turn a choice of four experts of eight: only fp32 would
    # show a fault.
    **{name: {} for name in MODELS if name not in ("deepseek_v3", "glm4_moe", "minimax_m2")},
    "llama fp16": {"model": {"dtype": "fp16"}},
    "llama recomputed": {"learner": {"recompute": "full"}},
    "llama critic, reference": {"batch": CRITIC, "reference": {"coefficient": 0.1}},
    "llama warm start": {},
    "llama fp32": {"model": {"dtype": "fp32"}},
    "qwen3_moe fp32": {
        "model": {"dtype": "fp32", "moe": {"aux_loss": 0.1}},
        "learner": {"recompute": "selective"},
    },
    "qwen3_moe replay fp32": {"model": {"dtype": "fp32", "moe": {"routing_replay": True}}},
    "deepseek_v3 fp32": {"model": {"dtype": "fp32", "moe": {"bias_update_rate": 0.01}}},
    "glm4_moe fp32": {"model": {"dtype": "fp32"}},
    "minimax_m2 fp32": {"model": {"dtype": "fp32"}},
    "gpt_oss fp32": {"model": {"dtype": "fp32"}},
    "llama4 fp32": {"model": {"dtype": "fp32", "moe": {"freeze_router": True}}},
    "llama critic, reference fp32": {
        "model": {"dtype": "fp32"},
        "batch": CRITIC,
        "reference": {"coefficient": 0.1, "estimator": "k3"},
    },
}
RESUMED = ("llama fp32", "qwen3_moe replay fp32", "deepseek_v3 fp32")
"""Cases whose second step is taken by a trainer that has loaded the checkpoint after
the first.
"""
MEASURED = (
    "loss",
    "grad_norm",
    "entropy",
    "ratio_max",
    "value_loss",
    "critic_grad_norm",
    "kl_reference",
)


def measured(directory: Path, case: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Take two steps and score a rollout. The metrics, a hash of the buckets, and where
    parameters, gradients, buckets lie.
    """
    recipe = recipes.from_tree(
        {
            "model": {"path": str(directory / case.split()[0])} | changes.get("model", {}),
            "batch": {"prompts": 4} | changes.get("batch", {}),
            "reference": changes.get("reference", {}),
            "learner": (
                {"microbatch_tokens": 256, "optimizer": {"lr": 1e-3, "warmup_steps": 0}}
                | changes.get("learner", {})
            ),
        }
    )
    parallel.start(recipe.model, seed=1, timeout_s=60)
    trainer = Trainer(recipe, Path(recipe.model.path), supervised="warm start" in case)
    published = list(buckets(hf.export(trainer.policy.chunks, trainer.policy.family), BUCKET))
    # Now, for large tensors are the parameters themselves.
    digest = hashlib.sha256(b"".join(bytes(bucket.flat.tolist()) for bucket in published))
    batch = (
        with_routing(make_batch(), layers=4, chosen=2)
        if recipe.model.moe.routing_replay
        else make_batch()
    )
    sequences = trainer.sequences(batch)
    rows = [trainer.train_step(sequences)]
    if case in RESUMED:
        trainer = resumed(trainer, directory / f"{case} on {trainer.policy.device.type}")
    rows.append(trainer.train_step(sequences))
    tokens = sequences[0].tokens
    score = Score(
        version=trainer.step, rollouts=(ScoredRollout(tokens=tokens, first=1),), against=0
    )
    parameters = [
        p for network in trainer.networks for chunk in network.chunks for p in chunk.parameters()
    ]
    gradients = [p.main_grad for p in parameters if hasattr(p, "main_grad")]
    tensors = [*parameters, *gradients, *(bucket.flat for bucket in published)]
    return {
        "published": [[bucket.names for bucket in published], digest.hexdigest()],
        "steps": [{name: row[name] for name in MEASURED if name in row} for row in rows],
        "logprobs": trainer.score(score, "test").logprobs[0].tolist(),
        "devices": sorted({tensor.device.type for tensor in tensors}),
        "experts on": where_experts_lie(trainer.policy, sequences),
    }


def where_experts_lie(policy: TrainedNetwork, sequences: list[TrainSequence]) -> list[str]:
    """Return the devices of the recorded experts of a step."""
    rows = policy.plan(sequences)
    cut = None if policy.replay is None else policy.experts_cut
    found = [
        assemble([sequences[i] for i in m], rows.length, policy.layout, policy.device, cut)
        for m in rows.members[0]
    ]
    tables = [micro.experts.table([0]) for micro in found if micro.experts is not None]
    return sorted({table.device.type for table in tables})


def resumed(trainer: Trainer, folder: Path) -> Trainer:
    """The trainer as a run that goes on makes it from the checkpoint that this one
    writes.
    """
    source = Path(trainer.recipe.model.path)
    checkpoints = Checkpoints(folder, 1, trainer, source)
    checkpoints.save()
    checkpoints.finish()
    again = Trainer(trainer.recipe, source)
    assert Checkpoints(folder, 1, again, source).load_latest()
    return again


def main(device: str, directory: Path, file: Path) -> None:
    with stand_in_gpu.on_stand_in_gpu() if device == "gpu" else nullcontext():
        found = {case: measured(directory, case, changes) for case, changes in CASES.items()}
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
