"""Weights gathered in the next forward pass on a GPU: one rank gathers from itself,
over NCCL, in the order of several.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.learner import late_gathering, optimizer
from megarl.core.learner.trainer import Trainer
from tests.tiny import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

PHASES = {"kind": "ppo-off-policy", "k": 8}
TOKENS = 256


def sequences() -> list[TrainSequence]:
    draw = np.random.default_rng(0)
    weight = np.full(TOKENS, 1 / TOKENS, np.float32)
    weight[0] = 0
    behaviour = np.full(TOKENS, -4.8, np.float32)
    made = []
    for i in range(4):
        ids = draw.integers(0, 128, TOKENS).astype(np.int32)
        made.append(TrainSequence(i, 0, ids, behaviour, weight, 1.0 - 2.0 * (i % 2)))
    return made


def test_weights_are_those_of_an_update_that_gathers(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the order in which kernels add: AdamW's steps of a rate of 1e-4 have the
    size of that rate.
    """
    tiny_llama(tmp_path / "hf")
    monkeypatch.setattr(optimizer, "overlaps", lambda: True)
    monkeypatch.setattr(optimizer, "BUCKET", 20_000)
    found = []
    for pipeline in ({}, PHASES):
        tree = {
            "model": {"path": str(tmp_path / "hf"), "dtype": "fp32"},
            "learner": {"microbatch_tokens": TOKENS, "optimizer": {"lr": 1e-4, "warmup_steps": 0}},
            "pipeline": pipeline,
        }
        trainer = Trainer(recipes.from_tree(tree), tmp_path / "hf")
        batch = sequences()
        for _ in range(3):
            assert trainer.train_step(batch)["skipped"] == 0
        waits = any(True for _ in late_gathering.incomplete(trainer.policy.ddp))
        assert waits == bool(pipeline)
        trainer.policy.gather_weights()
        parameters = [
            p.detach().float().flatten()
            for chunk in trainer.policy.chunks
            for p in chunk.parameters()
        ]
        found.append(torch.cat(parameters))
    assert (found[0] - found[1]).abs().max() <= 2 * 3 * 1e-4
