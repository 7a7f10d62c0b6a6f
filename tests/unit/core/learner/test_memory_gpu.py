"""Memory of the learner on a GPU: what recomputation and offloading take off, and the
micro-batch size that is found.
"""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.errors import MegarlError
from megarl.core.learner import microbatch_size
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from tests.tiny import tiny_llama, tiny_llama4, tiny_qwen3_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 65_536,
}
MIB = 2**20


@pytest.fixture
def model(tmp_path: Path, one_rank: None) -> Path:
    tiny_llama(tmp_path / "hf", **SIZES)
    return tmp_path / "hf"


def trainer_of(model: Path, **learner: Any) -> Trainer:
    gc.collect()
    optimizer = {"lr": 1e-4, "warmup_steps": 0}
    tree = {
        "model": {"path": str(model), "dtype": "bf16"},
        "learner": {"optimizer": optimizer, **learner},
    }
    return Trainer(recipes.from_tree(tree), model)


def sequences(count: int, tokens: int) -> list[TrainSequence]:
    draw = np.random.default_rng(0)
    weight = np.full(tokens, 1 / count / tokens, np.float32)
    weight[0] = 0
    ids = [draw.integers(0, 128, tokens).astype(np.int32) for _ in range(count)]
    behaviour = np.full(tokens, -4.8, np.float32)
    return [
        TrainSequence(i, 0, t, behaviour, weight, 1.0 - 2.0 * (i % 2)) for i, t in enumerate(ids)
    ]


def peak_of_a_pass(trainer: Trainer, batch: list[TrainSequence]) -> int:
    """Bytes beyond what is held without one."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    trainer.policy.forward_backward(batch)
    return torch.cuda.max_memory_allocated() - held


def gradients(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [
            p.main_grad.flatten().float()
            for chunk in trainer.policy.chunks
            for p in chunk.parameters()
        ]
    )


def test_recomputation_takes_less_memory_and_makes_the_same_gradients(model: Path) -> None:
    """Up to the order in which kernels add: bf16 has 8 bits."""
    batch = sequences(4, 4096)
    found = {}
    peaks = {}
    for recompute in ("none", "selective", "full"):
        trainer = trainer_of(model, recompute=recompute)
        peaks[recompute] = peak_of_a_pass(trainer, batch)
        found[recompute] = gradients(trainer)
        del trainer
    largest = found["none"].abs().max()
    for recompute in ("selective", "full"):
        assert (found[recompute] - found["none"]).abs().max() <= 2**-5 * largest
    # Three of four layers' MLPs: gate, up and product of 16,384 tokens in bf16; those
    # of attention as well.
    assert peaks["none"] - peaks["selective"] > 2 * 16_384 * 3 * 4096 * 2
    assert peaks["selective"] - peaks["full"] > 2 * 16_384 * 2 * 1024 * 2


def test_light_recomputation_of_experts(tmp_path: Path, one_rank: None) -> None:
    """Transformer Engine's experts recompute their activation functions, and the norm
    before them is computed again.
    """
    pytest.importorskip("transformer_engine")
    sizes = SIZES | {"moe_intermediate_size": 2048, "num_experts": 8, "num_experts_per_tok": 4}
    tiny_qwen3_moe(tmp_path / "hf", **sizes)
    batch = sequences(4, 4096)
    found = {}
    peaks = {}
    for recompute in ("none", "light"):
        trainer = trainer_of(tmp_path / "hf", recompute=recompute)
        peaks[recompute] = peak_of_a_pass(trainer, batch)
        found[recompute] = gradients(trainer)
        del trainer
    largest = found["none"].abs().max()
    assert (found["light"] - found["none"]).abs().max() <= 2**-5 * largest
    # Two of four layers: of 16,384 tokens the norm's output and four experts' products,
    # in bf16.
    assert peaks["none"] - peaks["light"] > 2 * 16_384 * (1024 + 4 * 2048) * 2


def test_shared_experts_on_a_stream_of_their_own(tmp_path: Path, one_rank: None) -> None:
    """One rank exchanges nothing, but everything is in the order that it has with
    several.
    """
    tiny_llama4(tmp_path / "hf")
    batch = sequences(4, 512)
    found = {}
    for overlap in (False, True):
        recipe = recipes.from_tree(
            {"model": {"path": str(tmp_path / "hf")}, "learner": {"microbatch_tokens": 1024}}
        )
        moe = recipe.model.moe.model_copy(update={"shared_overlap": overlap})
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"moe": moe})})
        trainer = Trainer(recipe, tmp_path / "hf")
        assert trainer.policy.chunks[0].config.moe_shared_expert_overlap == overlap
        trainer.policy.forward_backward(batch)
        found[overlap] = gradients(trainer)
        del trainer
    largest = found[False].abs().max()
    assert (found[True] - found[False]).abs().max() <= 2**-5 * largest


def test_auto_finds_what_fits_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more of the GPU may be used than a pass over 12,288 tokens takes, moments and
    all.
    """
    trainer = trainer_of(model, microbatch_tokens=65_536)
    record = tmp_path / "microbatch.json"
    moments = trainer.policy.moments_to_come()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.policy.forward_backward(sequences(3, 4096))
    allowed = torch.cuda.max_memory_reserved()
    del moments, trainer

    trainer = trainer_of(model, microbatch_tokens="auto")
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    monkeypatch.setattr(microbatch_size, "SHARE", allowed / room)
    weights = [p.detach().clone() for chunk in trainer.policy.chunks for p in chunk.parameters()]
    random = torch.cuda.get_rng_state()
    microbatch_size.settle(trainer, 4096, 40 * 4096, record)
    assert 8192 <= trainer.policy.microbatch_tokens <= 16_384
    assert json.loads(record.read_text())["microbatch_tokens"] == trainer.policy.microbatch_tokens
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert not gradients(trainer).any()
    after = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
    torch.cuda.reset_peak_memory_stats()
    assert trainer.train_step(sequences(8, 4096))["skipped"] == 0
    assert torch.cuda.max_memory_allocated() <= allowed


def test_what_runs_out_of_memory_names_the_keys_and_can_be_tried_smaller(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(model, microbatch_tokens=65_536)
    trainer.policy.forward_backward(sequences(1, 1024))
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300 * MIB) / total)
    try:
        with pytest.raises(
            MegarlError, match=r"learner\.microbatch_tokens: .* learner\.recompute=full"
        ):
            trainer.policy.forward_backward(sequences(16, 4096))
        trainer.policy.clear()
        torch.cuda.empty_cache()
        trainer.policy.forward_backward(sequences(1, 1024))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_update_and_a_checkpoint_hold_nothing_of_the_models_size(
    model: Path, tmp_path: Path
) -> None:
    """Not a byte a parameter more than is held anyhow, where one number of each would
    be four.
    """
    trainer = trainer_of(model)
    batch = sequences(4, 1024)
    trainer.train_step(batch)
    trainer.policy.forward_backward(batch)
    norm = trainer.policy.gradient_norm()
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, trainer, model)
    parameters = sum(p.numel() for chunk in trainer.policy.chunks for p in chunk.parameters())
    held = torch.cuda.memory_allocated()
    for work in (lambda: trainer.policy.update(1e-4, norm), checkpoints.save):
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - held < parameters
    checkpoints.finish()


def test_an_offloaded_optimiser_makes_the_same_steps_and_is_resumed(
    model: Path, tmp_path: Path
) -> None:
    batch = sequences(4, 1024)
    plain = trainer_of(model)
    expected = [plain.train_step(batch) for _ in range(4)]
    held = torch.cuda.memory_allocated()
    del plain
    for share in (1.0, 0.5):
        trainer = trainer_of(model, optimizer_offload=share)
        folder = tmp_path / f"checkpoints-{share}"
        found = [trainer.train_step(batch) for _ in range(2)]
        if share == 1:
            parameters = sum(
                p.numel() for chunk in trainer.policy.chunks for p in chunk.parameters()
            )
            assert (
                held - torch.cuda.memory_allocated() > 11 * parameters
            )  # 12 bytes each, were there no blocks
        checkpoints = Checkpoints(folder, 2, trainer, model)
        checkpoints.save()
        found += [trainer.train_step(batch) for _ in range(2)]
        checkpoints.finish()
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.01, abs=1e-4)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
        del trainer, checkpoints
        again = trainer_of(model, optimizer_offload=share)
        assert Checkpoints(folder, 2, again, model).load_latest()
        for mine, theirs in zip(
            [again.train_step(batch) for _ in range(2)], found[2:], strict=True
        ):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        del again
