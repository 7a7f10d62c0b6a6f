"""Routers keep the choices that they replay no longer than the backward pass may need
them.
"""

from pathlib import Path

import numpy as np
import pytest

from megarl.core.algorithm.batch import unrewarded
from megarl.core.learner.trainer import Trainer
from megarl.core.recipe import from_tree
from tests.tiny import tiny_qwen3_moe

MICROBATCHES = 3


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recompute", ["none", "light", "full"])
def test_choices_do_not_pile_up_during_a_step(tmp_path: Path, recompute: str) -> None:
    """They take 8 bytes each on a GPU: 0.3 GB for 100,000 tokens with 8 experts in each
    of 48 layers.
    """
    tiny_qwen3_moe(tmp_path / "hf", num_hidden_layers=2)
    model = {"path": str(tmp_path / "hf"), "dtype": "fp32", "moe": {"routing_replay": True}}
    learner = {"microbatch_tokens": 1, "recompute": recompute}
    trainer = Trainer(from_tree({"model": model, "learner": learner}), tmp_path / "hf")
    replay = trainer.policy.replay
    tokens = np.arange(20, dtype=np.int32)
    assert replay is not None
    kept: list[int] = []
    end = replay.close

    def count_and_end() -> None:
        kept.extend(len(router.replay_backward_list) for _, router in replay._columns[0])
        end()

    replay.close = count_and_end
    chosen = np.tile(np.array([1, 0], np.int16), (19, 2, 1))
    metrics = trainer.policy.forward_backward(
        [unrewarded(i, tokens, 1, chosen) for i in range(MICROBATCHES)]
    )
    assert kept == [0, 0]
    assert metrics["routing_replayed"] == pytest.approx(19 / 20)
