"""AdamW on a GPU that is a fake: offloaded, by megatron's hybrid optimiser in the
learner's own steps; or in one kernel.

The fake has no memory of its own: it shows that gradients are clipped and read where
that optimiser looks for them, and that its state is saved and resumed. Copies between
two memories are for a GPU to show (test_memory_gpu.py).
"""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base import device
from megarl.core.base.errors import MegarlError
from megarl.core.learner import optimizer
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.network import OutOfMemory
from megarl.core.learner.trainer import Trainer
from tests.tiny import tiny_llama

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: test_memory_gpu.py"
)


@pytest.fixture
def model(tmp_path: Path, one_rank: None) -> Path:
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    return tmp_path / "hf"


def trainer_of(model: Path, offload: float) -> Trainer:
    settings = {"lr": 1e-3, "warmup_steps": 0, "grad_clip": 0.01}
    learner = {"optimizer_offload": offload, "optimizer": settings}
    return Trainer(recipes.from_tree({"model": {"path": str(model)}, "learner": learner}), model)


def sequences() -> list[TrainSequence]:
    draw = np.random.default_rng(0)
    weight = np.full(40, 1 / 160, np.float32)
    weight[0] = 0
    ids = [draw.integers(0, 128, 40).astype(np.int32) for _ in range(4)]
    behaviour = np.full(40, -4.8, np.float32)
    return [
        TrainSequence(i, 0, t, behaviour, weight, 1.0 - 2.0 * (i % 2)) for i, t in enumerate(ids)
    ]


def test_without_a_gpu_it_is_refused(model: Path) -> None:
    with pytest.raises(
        MegarlError,
        match=r"learner\.optimizer_offload: moves AdamW off a GPU, but this machine has none",
    ):
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
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: FakeStream())


def test_the_hybrid_optimiser_makes_the_same_steps_and_is_resumed(
    model: Path, tmp_path: Path, fake_gpu: None
) -> None:
    plain = trainer_of(model, 0.0)
    expected = [plain.train_step(sequences()) for _ in range(4)]
    trainer = trainer_of(model, 0.5)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, trainer, model)
    found = [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.save()
    found += [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.finish()
    assert found == expected
    for share in (0.5, 0.0):
        again = trainer_of(model, share)
        assert Checkpoints(tmp_path / "checkpoints", 2, again, model).load_latest()
        assert not views(again)
        assert [again.train_step(sequences()) for _ in range(2)] == expected[2:]
    back = Checkpoints(tmp_path / "without", 2, again, model)
    back.save()
    back.finish()
    offloaded = trainer_of(model, 0.5)
    assert Checkpoints(tmp_path / "without", 2, offloaded, model).load_latest()
    assert offloaded.train_step(sequences()) == again.train_step(sequences())


def views(trainer: Trainer) -> list[str]:
    """Tensors of AdamW's state that keep more memory than their own."""
    states = [
        state
        for part in trainer.policy.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    tensors = [
        (name, value)
        for state in states
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    return [name for name, value in tensors if value.untyped_storage().nbytes() > value.nbytes]


def test_parameters_are_copied_once(
    model: Path, fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def counted(self: HybridDeviceOptimizer, share: float) -> Any:
        copied.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        return divide(self, share)

    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", counted)
    (chunk,) = trainer_of(model, 0.5).policy.chunks
    assert copied == [sum(p.numel() for p in chunk.parameters())]


def test_half_of_the_cores_update_what_is_offloaded(
    model: Path, fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all: this rank is bound to four near its GPU, and other ranks to the
    other eight.
    """
    monkeypatch.setattr(device, "CORES", 12)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    trainer = trainer_of(model, 0.5)
    before = torch.get_num_threads()
    seen = []
    for part in trainer.policy.optimizer.chained_optimizers:
        for each in part.optimizer.sub_optimizers:
            each.register_step_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    trainer.train_step(sequences())
    assert set(seen) == {6}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_fused_update_of_what_is_offloaded_gives_the_same_weights(size: int) -> None:
    """Within FP32's rounding of a step: the fused one computes in another order."""
    rate = 1e-3
    start = torch.randn(size, generator=torch.Generator().manual_seed(0))
    optimisers = []
    for _ in range(2):
        weight = start.clone()
        settings = {"betas": optimizer.BETAS, "eps": optimizer.EPS, "weight_decay": 0.01}
        optimisers.append(torch.optim.AdamW([weight], rate, **settings))
    default, fused = optimisers
    optimizer.update_offloaded_in_one_pass(SimpleNamespace(cpu_optimizers=[fused]))
    assert fused.param_groups[0]["fused"] is True
    assert not default.param_groups[0]["fused"]
    gradients = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradient = torch.randn(size, generator=gradients)
        for each in optimisers:
            each.param_groups[0]["params"][0].grad = gradient
            each.step()
    one, other = (each.param_groups[0]["params"][0] for each in optimisers)
    assert float((one - start).abs().mean()) > rate, "they have moved"
    assert float((one - other).abs().max()) < rate / 1000
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [each.state[each.param_groups[0]["params"][0]][name] for each in optimisers]
        torch.testing.assert_close(*moments, rtol=1e-5, atol=1e-12)


def test_what_is_loaded_lies_where_its_parameter_does() -> None:
    """Both parts are torch's AdamW; the one on the GPU, here torch's device without
    contents, keeps its moments there.
    """
    parts = {
        device: torch.optim.AdamW([torch.zeros(2, device=device)]) for device in ("cpu", "meta")
    }
    for part in parts.values():
        (parameter,) = part.param_groups[0]["params"]
        part.state[parameter] = {"exp_avg": torch.zeros(2), "master_param": parameter}
    HybridDeviceOptimizer._move_new_state_to_right_device(
        SimpleNamespace(sub_optimizers=list(parts.values()))
    )
    for kind, part in parts.items():
        assert {value.device.type for state in part.state.values() for value in state.values()} == {
            kind
        }


def test_adamw_in_one_kernel_makes_the_same_steps_and_is_resumed(
    model: Path, tmp_path: Path, fake_gpu: None
) -> None:
    trainer = trainer_of(model, 0.0)
    groups = [
        group
        for part in trainer.policy.optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]
    assert [group["fused"] for group in groups] == [True] * len(groups)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, trainer, model)
    found = [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.save()
    found += [trainer.train_step(sequences()) for _ in range(2)]
    checkpoints.finish()
    again = trainer_of(model, 0.0)
    assert Checkpoints(tmp_path / "checkpoints", 2, again, model).load_latest()
    assert [again.train_step(sequences()) for _ in range(2)] == found[2:]
    by_default = trainer_of(model, 0.0)
    for part in by_default.policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["fused"] = None
    for mine, plain in zip(
        found, [by_default.train_step(sequences()) for _ in range(4)], strict=True
    ):
        assert mine["loss"] == pytest.approx(plain["loss"], abs=1e-3)
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)


def test_memory_that_runs_out_in_a_checkpoint_names_the_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    trainer = trainer_of(model, 0.0)
    trainer.step = 1
    monkeypatch.setattr(DistributedOptimizer, "_get_main_param_and_optimizer_states", full)
    with pytest.raises(
        OutOfMemory,
        match=r"learner\.optimizer_offload: rank 0 ran out .* checkpoint; set it, .* 2\.00 GiB",
    ):
        Checkpoints(tmp_path / "checkpoints", 2, trainer, model).save()
