"""A learner's checkpoints when they are damaged, or when storage fails."""

from pathlib import Path

import pytest

from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.recipe import from_tree
from tests.damage import flip_a_bit
from tests.tiny import tiny_llama


@pytest.fixture
def checkpoints(tmp_path: Path, one_rank: None) -> Checkpoints:
    """Those of steps 1 and 2."""
    tiny_llama(tmp_path / "hf", num_hidden_layers=1)
    recipe = from_tree({"model": {"path": str(tmp_path / "hf"), "dtype": "fp32"}})
    made = Checkpoints(tmp_path / "run", 3, Trainer(recipe, tmp_path / "hf"), tmp_path / "hf")
    for step in (1, 2):
        save(made, step)
    return made


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.trainer.step = step
    checkpoints.save()
    checkpoints.finish()


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def damage(checkpoints: Checkpoints, step: int) -> None:
    (file,) = (checkpoints.folder / f"step-{step:07}").glob("*.distcp")
    flip_a_bit(file)


def test_a_step_that_is_damaged_again_takes_the_place_of_the_one_put_aside(checkpoints: Checkpoints) -> None:
    for _ in range(2):
        damage(checkpoints, 2)
        assert checkpoints.load_latest()
        assert checkpoints.trainer.step == 1
        assert names(checkpoints) == ["step-0000001", "step-0000002.unreadable"]
        save(checkpoints, 2)
