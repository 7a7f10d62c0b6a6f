"""The update from gradients: AdamW as in its paper (arXiv 1711.05101, algorithm 2), in
float64 by hand.
"""

from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.core.learner import checkpoint, optimizer, trained
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import checkpoint as models_checkpoint
from megarl.core.models import hf
from megarl.core.recipe import from_tree
from tests.tiny import tiny_llama, tiny_qwen3_5
from tests.unit.core.learner.training_step import sequences

LR = 0.01
BETAS = (0.8, 0.9)
EPS = 1e-8
DECAY = 0.3
CLIP = 0.02


def exported(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: t.double().clone()
        for name, t in hf.export(trainer.policy.chunks, trainer.policy.family)
    }


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """By Hugging Face names; the weights stay as they are."""
    parameters = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.main_grad)
        found = exported(trainer)
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)
    return found


@pytest.mark.usefixtures("one_rank")
def test_three_updates_are_those_of_adamw_and_norms_are_not_decayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, with bias correction, decay apart from the gradient. A norm that is
    decayed too is off by LR * DECAY after one update.
    """
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    for module, name, value in (
        (optimizer, "BETAS", BETAS),
        (optimizer, "EPS", EPS),
        (trained, "WEIGHT_DECAY", DECAY),
    ):
        monkeypatch.setattr(module, name, value)
    settings = {"lr": LR, "grad_clip": CLIP}
    tree = {
        "model": {"path": str(tmp_path / "hf"), "dtype": "fp32"},
        "learner": {"optimizer": settings},
    }
    trainer = Trainer(from_tree(tree), tmp_path / "hf")
    weights = exported(trainer)
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in (1, 2, 3):
        trainer.policy.forward_backward(sequences(experts=False))
        found = gradients(trainer)
        norm = torch.sqrt(sum((g**2).sum() for g in found.values()))
        assert norm > CLIP
        assert trainer.policy.gradient_norm() == pytest.approx(float(norm), rel=1e-5)
        trainer.policy.update(LR, float(norm))
        for name, gradient in found.items():
            clipped = gradient * CLIP / norm
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * clipped
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * clipped**2
            mean = first[name] / (1 - BETAS[0] ** step)
            square = second[name] / (1 - BETAS[1] ** step)
            decay = DECAY if weights[name].dim() > 1 else 0.0
            weights[name] = weights[name] * (1 - LR * decay) - LR * mean / (square.sqrt() + EPS)
    now = exported(trainer)
    assert {name for name, w in weights.items() if w.dim() == 1} == {n for n in now if "norm" in n}
    off = {name: float((now[name] - w).abs().max()) for name, w in weights.items()}
    assert max(off.values()) <= 1e-6, off


def state(trainer: Trainer) -> list[torch.Tensor]:
    (part,) = trainer.policy.optimizer.chained_optimizers
    part.state_dict()  # makes what there is only after the first step
    parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
    return [tensor for p in parameters for tensor in (p.data, *part.optimizer.state[p].values())]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("buckets", [1, 4])
def test_a_checkpoint_has_the_state_of_all_buckets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, buckets: int
) -> None:
    """Megatron gathers parameters without the padding between buckets, and finds them
    by places with it.
    """
    if buckets > 1:
        monkeypatch.setattr(optimizer, "overlaps", lambda: True)
        monkeypatch.setattr(optimizer, "BUCKET", 20_000)
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    recipe = from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}})
    before, after = (Trainer(recipe, tmp_path / "hf") for _ in range(2))
    (buffer,) = before.policy.ddp[0].buffers
    assert len(buffer.buckets) >= buckets
    assert any(bucket.numel_unpadded % 128 for bucket in buffer.buckets)
    before.step = 3
    for number, tensor in enumerate(state(before)):
        tensor.copy_(number + torch.rand(tensor.shape) if tensor.dim() else torch.tensor(3.0))
    checkpoints = Checkpoints(tmp_path / "run", 1, before, tmp_path / "hf")
    checkpoints.save()
    checkpoints.finish()
    assert Checkpoints(tmp_path / "run", 1, after, tmp_path / "hf").load_latest()
    assert all(torch.equal(a, b) for a, b in zip(state(before), state(after), strict=True))


@pytest.mark.usefixtures("one_rank")
def test_fp32_parameters_of_a_bf16_model_have_their_own_moments(tmp_path: Path) -> None:
    """A gated delta network has FP32 vectors among vectors of the model's type. In a
    group of both, one would get the other's moments.
    """
    tiny_qwen3_5(tmp_path / "hf", torch.bfloat16)
    settings = {"optimizer": {"lr": LR, "warmup_steps": 0, "grad_clip": CLIP}}
    tree = {"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}, "learner": settings}
    recipe = from_tree(tree)
    trainer = Trainer(recipe, tmp_path / "hf")
    first, second = optimizer.BETAS
    means: dict[str, Any] = {}
    squares: dict[str, Any] = {}
    for _ in range(2):
        trainer.policy.forward_backward(sequences(experts=False))
        found = {name: p.main_grad.clone() for name, p in trained_parameters(trainer)}
        norm = trainer.policy.gradient_norm()
        trainer.policy.update(LR, norm)
        for name, gradient in found.items():
            clipped = gradient.flatten() * CLIP / norm
            means[name] = first * means.get(name, 0) + (1 - first) * clipped
            squares[name] = second * squares.get(name, 0) + (1 - second) * clipped**2
    (part,) = trainer.policy.optimizer.chained_optimizers
    for name, parameter in trained_parameters(trainer):
        moments = part._get_main_param_and_optimizer_states(parameter)
        for kind, expected in (("exp_avg", means[name]), ("exp_avg_sq", squares[name])):
            off = (moments[kind].flatten() - expected).norm() / expected.norm()
            assert off <= 1e-4, (name, kind)
    trainer.step = 2
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, tmp_path / "hf")
    checkpoints.save()
    checkpoints.finish()
    after = Trainer(recipe, tmp_path / "hf")
    assert Checkpoints(tmp_path / "run", 1, after, tmp_path / "hf").load_latest()
    for each in (trainer, after):
        each.policy.forward_backward(sequences(experts=False))
        each.policy.update(LR, each.policy.gradient_norm())
    for (name, ours), (_, theirs) in zip(
        trained_parameters(trainer), trained_parameters(after), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.usefixtures("one_rank")
def test_vectors_of_a_delta_network_do_not_decay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gradient they keep every bit; matrices and the convolution shrink."""
    monkeypatch.setattr(trained, "WEIGHT_DECAY", DECAY)
    tiny_qwen3_5(tmp_path, torch.bfloat16)
    tree = {"model": {"path": str(tmp_path), "dtype": "bf16"}}
    trainer = Trainer(from_tree(tree), tmp_path)
    before = {name: p.detach().clone() for name, p in trained_parameters(trainer)}
    trainer.policy.forward_backward(sequences(experts=False))
    for _, parameter in trained_parameters(trainer):
        parameter.main_grad.zero_()
    assert trainer.policy.gradient_norm() == 0
    trainer.policy.update(10 * LR, 0.0)
    same = {name for name, p in trained_parameters(trainer) if torch.equal(p, before[name])}
    assert same == {name for name, value in before.items() if value.dim() == 1}


def trained_parameters(trainer: Trainer) -> list[tuple[str, torch.nn.Parameter]]:
    return [named for chunk in trainer.policy.chunks for named in chunk.named_parameters()]


class AsTransformerEngine(torch.optim.AdamW):
    """Loads its state as Transformer Engine's AdamW: into new tensors, while those that
    it is given still exist.
    """

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for moments in self.state.values():
            moments.update({name: tensor.clone() for name, tensor in moments.items()})


@pytest.mark.usefixtures("one_rank")
def test_moments_are_loaded_into_the_memory_that_they_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second copy of them, 8 bytes a parameter, may be more than a GPU has left that
    a run filled before.
    """
    monkeypatch.setattr(torch.optim, "AdamW", AsTransformerEngine)
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    trainer = Trainer(
        from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}}), tmp_path / "hf"
    )
    (part,) = trainer.policy.optimizer.chained_optimizers
    assert isinstance(part.optimizer, AsTransformerEngine)
    before = [tensor.data_ptr() for tensor in state(trainer) if tensor.dim()]
    trainer.step = 1
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, tmp_path / "hf")
    checkpoints.save()
    checkpoints.finish()
    assert checkpoints.load_latest()
    assert [tensor.data_ptr() for tensor in state(trainer) if tensor.dim()] == before


class Made(TorchDispatchMode):
    """Counts the bytes of tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in MAKING:
            self.bytes += made.nbytes
        return made


MAKING = {
    getattr(torch.ops.aten, name)
    for name in ("zeros", "empty", "cat", "clone", "_to_copy", "empty_like")
}


@pytest.mark.usefixtures("one_rank")
def test_a_lone_rank_gathers_adamw_in_the_memory_that_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a GPU: FP32 weights and both moments: 12 bytes a parameter. Megatron's way
    makes 48, of which 32 are held together.
    """
    monkeypatch.setattr(optimizer, "in_host_memory", lambda: False)
    tiny_llama(tmp_path / "hf", num_hidden_layers=2, hidden_size=128, intermediate_size=512)
    trainer = Trainer(
        from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}}), tmp_path / "hf"
    )
    trainer.step = 1
    (buffer,) = trainer.policy.ddp[0].buffers
    with Made() as made:
        checkpoint._state(trainer, is_loading=False)
    assert made.bytes == pytest.approx(12 * buffer.numel_unpadded, rel=0.05)
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, tmp_path / "hf")
    with Made() as made:
        checkpoints.save()
    checkpoints.finish()
    # Weights are copied here. What was gathered is not, but megatron copies what it
    # cuts out of a larger tensor.
    assert made.bytes == pytest.approx((12 + 12 + 2) * buffer.numel_unpadded, rel=0.05)


@pytest.mark.usefixtures("one_rank")
def test_on_a_cpu_a_lone_rank_writes_adamw_from_where_it_is(tmp_path: Path) -> None:
    """But the two halves of an MLP's first matrix, which are stored apart, and the
    weights are copied: both are cut out.
    """
    tiny_llama(tmp_path / "hf", num_hidden_layers=2, hidden_size=128, intermediate_size=512)
    trainer = Trainer(
        from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}}), tmp_path / "hf"
    )
    trainer.step = 1
    (buffer,) = trainer.policy.ddp[0].buffers
    trainer.policy.optimizer.state_dict()  # makes the moments
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, tmp_path / "hf")
    with Made() as made:
        checkpoints.save()
    checkpoints.finish()
    halves = 2 * 2 * 512 * 128  # layers, gate and up
    assert made.bytes == pytest.approx(12 * halves + 2 * buffer.numel_unpadded, rel=0.05)


class Copied(TorchDispatchMode):
    """Keeps the most numbers that one operation has copied."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone):
            self.most = max(self.most, args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_rank")
def test_a_lone_rank_copies_neither_all_gradients_nor_all_weights(tmp_path: Path) -> None:
    """As gloo does to reduce and to gather them, also if there is nobody else."""
    tiny_llama(tmp_path / "hf", num_hidden_layers=2)
    trainer = Trainer(
        from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}}), tmp_path / "hf"
    )
    (buffer,) = trainer.policy.ddp[0].buffers
    with Copied() as copied:
        trainer.train_step(sequences(experts=False))
    assert 0 < copied.most < buffer.numel_unpadded


@pytest.mark.usefixtures("one_rank")
def test_on_a_cpu_moments_are_there_before_activations(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    trainer = Trainer(
        from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}}), tmp_path / "hf"
    )
    assert trainer.policy.moments_to_come().numel() == 0
    (part,) = trainer.policy.optimizer.chained_optimizers
    moments = [kinds["exp_avg"] for kinds in part.optimizer.state.values()]
    assert (
        sum(tensor.numel() for tensor in moments) == trainer.policy.ddp[0].buffers[0].numel_unpadded
    )


@pytest.mark.usefixtures("one_rank")
def test_an_update_waits_until_what_it_changes_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the next step are computed meanwhile."""
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    recipe = from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "bf16"}})
    trainer = Trainer(recipe, tmp_path / "hf")
    trainer.train_step(sequences(experts=False))
    kept = [tensor.clone() for tensor in state(trainer)]
    may_write = Event()
    begin = models_checkpoint.start_save
    norm = trainer.policy.gradient_norm

    def begun(*args: Any) -> Any:
        request = begin(*args)
        return request._replace(
            async_fn=lambda *parts: may_write.wait(60) and request.async_fn(*parts)
        )

    def let_it_write_soon() -> float:
        assert not may_write.is_set()
        Timer(0.5, may_write.set).start()
        return norm()

    monkeypatch.setattr(models_checkpoint, "start_save", begun)
    monkeypatch.setattr(trainer.policy, "gradient_norm", let_it_write_soon)
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, tmp_path / "hf")
    checkpoints.save()
    trainer.train_step(sequences(experts=False))
    assert may_write.is_set()
    checkpoints.finish()
    assert not all(torch.equal(a, b) for a, b in zip(state(trainer), kept, strict=True))
    after = Trainer(recipe, tmp_path / "hf")
    assert Checkpoints(tmp_path / "run", 1, after, tmp_path / "hf").load_latest()
    assert all(torch.equal(a, b) for a, b in zip(state(after), kept, strict=True))
