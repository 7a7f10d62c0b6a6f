"""`megarl train --plan`: the GPUs of the machine divided as the planner does."""

import shutil
from pathlib import Path

import pytest

from megarl.core.base import architecture
from megarl.core.base.errors import MegarlError
from megarl.core.recipe import load
from megarl.predict.planning import command
from megarl.predict.planning.command import ALONE, planned
from megarl.predict.planning.layouts import search


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    shutil.copy(
        Path(architecture.__file__).parent / "configs" / "qwen3-1.7b.json", tmp_path / "config.json"
    )
    return [f"model.path={tmp_path}", *ALONE.split()]


def test_the_best_plan_of_eight_gpus(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    recipe = planned("scalerl-1gpu", overrides, "h100")
    asked = load("scalerl-1gpu", overrides)
    best = search(command.problem(asked, 8, "h100", None, command.work(asked))).plans[0]
    assert (recipe.resources, recipe.model) == (best.recipe.resources, best.recipe.model)
    used = (
        recipe.resources.servers * recipe.resources.server_tensor_parallel
        + recipe.resources.learner_ranks
    )
    assert 1 < used <= 8


@pytest.mark.parametrize(
    ("visible", "words", "gpu", "said"),
    [
        (
            "0,1",
            ["resources.colocate=true"],
            "h100",
            "resources.colocate shares GPUs instead of dividing them",
        ),
        ("0", [], "h100", "divides the GPUs of this machine, and it has 1"),
        ("0,1", [], "h1000", "'h1000' is not known"),
        (
            "0,1",
            ["length.thinking_tokens=[1000000,2000000]"],
            "rtx-4090",
            "no layout of scalerl-1gpu fits 2 rtx-4090",
        ),
    ],
)
def test_what_cannot_be_planned(
    overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    words: list[str],
    gpu: str,
    said: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shared = (
        ["weights.transport=cuda_ipc", "serving.memory_fraction=0.3"]
        if "resources.colocate=true" in words
        else []
    )
    with pytest.raises(MegarlError, match=said):
        planned("scalerl-1gpu", [*overrides, *words, *shared], gpu)
