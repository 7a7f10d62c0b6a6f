"""Loss and gradients of one training step, by Hugging Face names.

`python -m tests.unit.core.learner.training_step MODEL DTYPE FILE`: a process of its
own; where it sees no GPU, it computes the reference for a step on a GPU.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.architecture import in_directory
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel

LENGTHS = [40, 7, 23, 64, 31, 12]


def sequences(experts: bool) -> list[TrainSequence]:
    """Behaviour log-probs lie about those of random weights over 128 tokens; every
    other advantage is negative. Experts are given, 2 of 4 in each of 4 layers: a token
    that bf16 sends to others would have another gradient.
    """
    draw = np.random.default_rng(0)
    trained = sum(LENGTHS) - len(LENGTHS)
    found = []
    for i, n in enumerate(LENGTHS):
        weight = np.full(n, 1 / trained, np.float32)
        weight[0] = 0
        tokens = draw.integers(0, 128, n).astype(np.int32)
        behaviour = np.full(n, -5.0, np.float32)
        chosen = (
            draw.permuted(np.tile(np.arange(4, dtype=np.uint8), (n, 4, 1)), axis=-1)[..., :2]
            if experts
            else None
        )
        found.append(TrainSequence(i, 0, tokens, behaviour, weight, 1.0 - 2.0 * (i % 2), chosen))
    return found


def step(model: Path, dtype: str) -> dict[str, torch.Tensor]:
    """ "loss", and the gradient of each weight in float64 on the CPU. Ends with the
    gradients in the weights' place.
    """
    experts = in_directory(model).experts > 0
    tree = {
        "model": {"path": str(model), "dtype": dtype, "moe": {"routing_replay": experts}},
        "learner": {"microbatch_tokens": 96, "optimizer": {"lr": 1e-3, "warmup_steps": 0}},
    }
    trainer = Trainer(recipes.from_tree(tree), model)
    loss = trainer.policy.forward_backward(sequences(experts))["loss"]
    with torch.no_grad():
        for chunk in trainer.policy.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    gradients = {
        name: t.double().cpu()
        for name, t in hf.export(trainer.policy.chunks, trainer.policy.family)
    }
    return {"loss": torch.tensor(loss, dtype=torch.float64)} | gradients


if __name__ == "__main__":
    model, dtype, file = sys.argv[1:]
    parallel.start(recipes.Model(), seed=0, timeout_s=60)
    torch.save(step(Path(model), dtype), file)
