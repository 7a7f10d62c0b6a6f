"""The frozen reference beside a policy in training, on one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.core import recipe as recipes
from megarl.core.base.types import Batch, Group, Prompt
from megarl.core.learner.trainer import Trainer
from tests import make
from tests.tiny import tiny_llama


def trainer(policy: Path, **reference: Any) -> Trainer:
    recipe = recipes.from_tree(
        {
            "model": {"path": str(policy), "dtype": "fp32"},
            "reference": {"coefficient": 0.1, **reference},
            "learner": {"optimizer": {"lr": 1e-2, "warmup_steps": 0}},
        }
    )
    return Trainer(recipe, policy)


def batch() -> Batch:
    draw = np.random.default_rng(0)
    rollouts = []
    for sample, reward in enumerate((1.0, -1.0)):
        tokens = draw.integers(0, 128, 9).astype(np.int32)
        segment = make.segment(tokens, logprob=-5.0)
        rollouts.append(make.rollout(segment, reward=reward, sample=sample))
    prompt = Prompt(id="p", tokens=np.array([1, 2], np.int32), answer="")
    return Batch(step=0, groups=(Group(ticket=0, prompt=prompt, rollouts=tuple(rollouts)),))


def test_the_policy_moves_away_and_the_reference_stays(one_rank: None, tmp_path: Path) -> None:
    tiny_llama(tmp_path, num_hidden_layers=1)
    found = trainer(tmp_path, estimator="k2")
    assert found.reference is not None
    frozen = [p for chunk in found.reference.chunks for p in chunk.parameters()]
    before = [p.clone() for p in frozen]
    steps = [found.train_step(found.sequences(batch())) for _ in range(3)]
    assert steps[0]["kl_reference"] == 0
    assert 0 < steps[1]["kl_reference"] < steps[2]["kl_reference"]
    assert not any(p.requires_grad for p in frozen)
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True))


def test_none_is_held_without_a_coefficient(one_rank: None, tmp_path: Path) -> None:
    tiny_llama(tmp_path, num_hidden_layers=1)
    found = trainer(tmp_path, coefficient=0.0)
    assert found.reference is None
    assert "kl_reference" not in found.train_step(found.sequences(batch()))
