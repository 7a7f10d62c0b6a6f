"""Recipes for a model of the user's own."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.core.base import architecture
from megarl.core.base.errors import MegarlError
from megarl.core.base.weight_files import INDEX
from megarl.core.recipe import load
from megarl.lab.presets import PPO, ppo_for, suggest
from megarl.run.checks import parameters


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, folder / "model-1.safetensors")
    save_file({"c": np.zeros((2, 2, 2), np.float32)}, folder / "model-2.safetensors")
    return folder


def test_parameters_are_counted_from_the_files(model: Path) -> None:
    assert parameters(model) == 15 + 7 + 8


@pytest.mark.parametrize(("count", "row"), [(1.2e9, 0), (7e9, 0), (8.03e9, 1), (109e9, 1)])
def test_size(count: float, row: int) -> None:
    assert ppo_for(int(count)) is PPO[row]


@pytest.mark.parametrize("preset", ["scalerl", "ppo"])
def test_the_suggestion_is_a_recipe(
    model: Path, preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggest(model, preset) == 0  # type: ignore[arg-type]
    text, numbers = capsys.readouterr()
    assert "0.00B parameters" in numbers
    assert "1B parameters and more" in numbers
    (tmp_path / "mine.yaml").write_text(text)
    recipe = load(str(tmp_path / "mine.yaml"))
    assert recipe.model.path == str(model)
    assert recipe.run.name == "my-model-rl"  # not the directory of the model, should it lie in runs/
    rollouts = recipe.batch.prompts * recipe.sampling.generations
    if preset == "scalerl":
        assert (recipe.learner.optimizer.lr, rollouts, recipe.learner.epochs) == (5e-7, 768, 1)
    else:
        assert (recipe.learner.optimizer.lr, rollouts, recipe.learner.epochs) == (3e-6, 256, 4)


def test_a_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for `megarl plan`. A directory with an index of weights that are missing is not without weights."""
    config = architecture.CONFIGS / "qwen3-8b.json"
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    assert suggest(tmp_path, "scalerl") == 0
    assert "8.19B parameters" in capsys.readouterr().err
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(MegarlError, match="files of weights are missing"):
        suggest(tmp_path, "scalerl")


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=r"is not a Hugging Face directory \(no config"):
        suggest(tmp_path, "scalerl")
