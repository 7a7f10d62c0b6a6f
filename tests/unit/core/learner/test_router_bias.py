"""Routers' biases: frozen unless asked for, moved by a step's load, FP32 in any model,
loaded, stored, exported, resumed.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.base.errors import MegarlError
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import build, family_of, hf, parallel
from megarl.core.recipe import Model, Recipe
from tests.tiny import tiny_deepseek_v3, tiny_glm4_moe, tiny_llama, tiny_minimax_m2
from tests.unit.core.learner.test_expert_load import _untrained

# isort: split
from safetensors.torch import load_file

RATE = 1e-3
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
MINIMAX_BIAS = "model.layers.{}.block_sparse_moe.e_score_correction_bias"
IDS = [np.random.default_rng(n).integers(0, 128, n).astype(np.int32) for n in (40, 9, 23)]


def recipe_of(path: Path, rate: float, dtype: str = "fp32") -> Recipe:
    model = {"path": str(path), "dtype": dtype, "moe": {"bias_update_rate": rate}}
    return recipes.from_tree({"model": model, "learner": {"microbatch_tokens": 1}})


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    yield
    parallel.stop()


def started(recipe: Recipe) -> Trainer:
    parallel.start(recipe.model, seed=0, timeout_s=60)
    return Trainer(recipe, Path(recipe.model.path))


def biases_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    exported = hf.export(trainer.policy.chunks, trainer.policy.family)
    return {name: value.clone() for name, value in exported if name.endswith("correction_bias")}


def stepped(trainer: Trainer) -> None:
    """A step in which nothing but biases can change: advantages are zero, and so is the
    rate.
    """
    trainer.policy.forward_backward([_untrained(i, tokens) for i, tokens in enumerate(IDS)])
    trainer.policy.update(0.0, trainer.policy.gradient_norm())


def counted(model: Any, bias: str) -> dict[str, torch.Tensor]:
    """Tokens of each expert of transformers' model [experts], by the name that the
    layer's bias has on disk.
    """
    tokens: dict[str, torch.Tensor] = {}

    def count(name: str) -> Any:
        def add(router: Any, inputs: Any, outputs: Any) -> None:
            tokens[name] = tokens.get(name, 0) + torch.bincount(outputs[-1].flatten(), minlength=8)

        return add

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(count(bias.format(name.split(".")[2])))
    with torch.no_grad():
        for ids in IDS:
            model(torch.from_numpy(ids).long()[None])
    return tokens


@pytest.mark.parametrize(
    ("tiny", "bias", "layers"),
    [
        (tiny_glm4_moe, BIAS, (1, 2, 3)),
        (tiny_deepseek_v3, BIAS, (1, 2, 3)),
        (tiny_minimax_m2, MINIMAX_BIAS, (0, 1, 2, 3)),
    ],
)
def test_biases_move_by_the_load_of_a_step_and_only_if_asked_for(
    tmp_path: Path, tiny: Any, bias: str, layers: tuple[int, ...]
) -> None:
    """Auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1): b += u * sign(mean
    load - load).
    """
    model = tiny(tmp_path / "hf")
    loads = counted(model, bias)
    assert loads.keys() == {bias.format(i) for i in layers}
    stored = load_file(tmp_path / "hf/model.safetensors")
    frozen = started(recipe_of(tmp_path / "hf", 0.0))
    stepped(frozen)
    assert all(torch.equal(value, stored[name]) for name, value in biases_of(frozen).items())
    trainer = started(recipe_of(tmp_path / "hf", RATE))
    stepped(trainer)
    found = biases_of(trainer)
    assert found.keys() == loads.keys()
    for name, load in loads.items():
        expected = stored[name] + RATE * torch.sign(load.float().mean() - load)
        assert torch.equal(found[name], expected), name
        assert not torch.equal(found[name], stored[name])


def test_counts_begin_anew_each_step_and_a_skipped_one_moves_nothing(tmp_path: Path) -> None:
    tiny_glm4_moe(tmp_path / "hf", num_hidden_layers=2)
    trainer = started(recipe_of(tmp_path / "hf", RATE))
    sequences = [_untrained(i, tokens) for i, tokens in enumerate(IDS)]
    for chosen in (
        [0, 1, 2],
        [1],
        [2],
    ):  # computed, and not used: as a step whose loss is not finite
        trainer.policy.forward_backward([sequences[i] for i in chosen])
    before = biases_of(trainer)
    assert torch.equal(
        before[BIAS.format(1)], load_file(tmp_path / "hf/model.safetensors")[BIAS.format(1)]
    )
    stepped(trainer)
    once = started(recipe_of(tmp_path / "hf", RATE))
    stepped(once)
    assert torch.equal(biases_of(trainer)[BIAS.format(1)], biases_of(once)[BIAS.format(1)])


def test_a_checkpoint_has_the_moved_biases(tmp_path: Path) -> None:
    """In FP32 in a bf16 model: bf16 has no number between 0.5 and 0.5 + 1e-3."""
    tiny_glm4_moe(tmp_path / "hf", torch.bfloat16, num_hidden_layers=2)
    recipe = recipe_of(tmp_path / "hf", RATE, "bf16")
    trainer = started(recipe)
    stepped(trainer)
    trainer.step = 1
    moved = biases_of(trainer)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, trainer, tmp_path / "hf")
    checkpoints.save()
    checkpoints.finish()
    again = started(recipe)
    assert not torch.equal(biases_of(again)[BIAS.format(1)], moved[BIAS.format(1)])
    assert Checkpoints(tmp_path / "checkpoints", 1, again, tmp_path / "hf").load_latest()
    assert biases_of(again)[BIAS.format(1)].dtype == torch.float32
    assert torch.equal(biases_of(again)[BIAS.format(1)], moved[BIAS.format(1)])


def test_the_next_step_does_not_change_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights, which lie in one buffer, nor biases, which do not."""
    tiny_glm4_moe(tmp_path / "hf", num_hidden_layers=2)
    recipe = recipe_of(tmp_path / "hf", RATE)
    trainer = started(recipe)
    trainer.step = 1
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, trainer, tmp_path / "hf")
    with monkeypatch.context() as waiting:
        waiting.setattr(threading.Thread, "start", lambda _: None)
        checkpoints.save()
    assert checkpoints._writing is not None
    for chunk in trainer.policy.chunks:
        for _, tensor in hf.stored_tensors(chunk):
            tensor.data.add_(1)
    checkpoints._writing.thread.start()
    checkpoints.finish()
    again = started(recipe)
    as_saved = {
        name: tensor.clone() for name, tensor in hf.export(again.policy.chunks, again.policy.family)
    }
    assert Checkpoints(tmp_path / "checkpoints", 1, again, tmp_path / "hf").load_latest()
    assert all(
        torch.equal(t, as_saved[name])
        for name, t in hf.export(again.policy.chunks, again.policy.family)
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_models_keep_them_in_fp32(tmp_path: Path, dtype: Any) -> None:
    """Loaded, published and saved bit for bit. For servers GLM-4.5's router weights,
    too, are FP32, with the same values.
    """
    tiny_glm4_moe(tmp_path / "hf", build.DTYPES[dtype], num_hidden_layers=2)
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert stored[BIAS.format(1)].dtype == torch.float32
    model = Model(path=str(tmp_path / "hf"), dtype=dtype)
    parallel.start(model, seed=0, timeout_s=60)
    family = family_of(tmp_path / "hf")
    chunks = build.build(model, tmp_path / "hf")
    hf.load(chunks, family, tmp_path / "hf")
    chunks[0](torch.zeros(1, 8, dtype=torch.long), None, None)
    hf.save(chunks, family, tmp_path / "hf", tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(saved[n].dtype == t.dtype and torch.equal(saved[n], t) for n, t in stored.items())
    published = dict(hf.export(chunks, family, stacked=False))
    wide = {name for name, tensor in published.items() if tensor.dtype == torch.float32}
    assert wide == {BIAS.format(1), "model.layers.1.mlp.gate.weight"}
    assert all(torch.equal(published[n].to(t.dtype), t) for n, t in stored.items())


def test_a_model_without_biases_cannot_move_them(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    with pytest.raises(
        MegarlError,
        match=r"model.moe.bias_update_rate: the routers of .* have no bias; set it to 0",
    ):
        build.transformer_config(
            recipe_of(tmp_path / "hf", RATE).model, family_of(tmp_path / "hf").architecture, False
        )
