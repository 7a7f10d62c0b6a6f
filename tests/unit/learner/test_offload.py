"""An offloaded AdamW: refused without a GPU; and through a fake one, megatron's hybrid optimiser in the learner's own steps.

The fake has no memory of its own: it shows that gradients are clipped and read where that optimiser looks for them, and that
its state is saved and resumed. Copies between two memories are for a GPU to show (test_memory_gpu.py).
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megarl import recipe as recipes
from megarl.batch import TrainSequence
from megarl.errors import MegarlError
from megarl.learner import optimizer
from megarl.learner.checkpoint import Checkpoints
from megarl.learner.trainer import Trainer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_memory_gpu.py")


@pytest.fixture
def model(tmp_path: Path, one_rank: None) -> Path:
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    return tmp_path / "hf"


def trainer_of(model: Path, offload: float) -> Trainer:
    settings = {"lr": 1e-3, "warmup_steps": 0, "grad_clip": 0.01}
    learner = {"optimizer_offload": offload, "optimizer": settings}
    return Trainer(recipes.from_tree({"model": {"path": str(model)}, "learner": learner}), model)


def sequences() -> list[TrainSequence]:
    draw, weight = np.random.default_rng(0), np.full(40, 1 / 160, np.float32)
    weight[0] = 0
    ids = [draw.integers(0, 128, 40).astype(np.int32) for _ in range(4)]
    behaviour = np.full(40, -4.8, np.float32)
    return [TrainSequence(i, 0, t, behaviour, weight, 1.0 - 2.0 * (i % 2), 1) for i, t in enumerate(ids)]


def test_without_a_gpu_it_is_refused(model: Path) -> None:
    with pytest.raises(MegarlError, match=r"learner\.optimizer_offload: takes AdamW off a GPU, and there is none here"):
        trainer_of(model, 0.5)


class FakeStream:
    """Work is done when it is asked for."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self


class FakeTorch:
    """torch with a GPU."""

    class cuda:
        @staticmethod
        def is_available() -> bool:
            return True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def all_on_the_gpu(self: HybridDeviceOptimizer, _: float) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
            return divide(self, 0.0)

    monkeypatch.setattr(optimizer, "torch", FakeTorch())
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", all_on_the_gpu)
    monkeypatch.setattr(HybridDeviceOptimizer, "_move_new_state_to_right_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: FakeStream())


def test_the_hybrid_optimiser_makes_the_same_steps_and_is_resumed(model: Path, tmp_path: Path, fake_gpu: None) -> None:
    plain = trainer_of(model, 0.0)
    expected = [plain.train_step(sequences()) for _ in range(4)]
    trainer = trainer_of(model, 0.5)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, trainer, model)
    found = [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.save()
    found += [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.finish()
    assert found == expected
    again = trainer_of(model, 0.5)
    (part,) = again.policy.optimizer.chained_optimizers
    part.optimizer.dummy_step()  # megatron's loading makes it; the learner's for CPUs (models/cpu.py) comes before
    assert Checkpoints(tmp_path / "checkpoints", 2, again, model).load_latest()
    assert [again.train_step(sequences()) for _ in range(2)] == expected[2:]
