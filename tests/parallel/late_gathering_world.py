"""One rank of test_late_gathering: weights gathered in the next forward pass against
those gathered in the update.

`python -m tests.parallel.late_gathering_world DIR`, DIR as memory_world's.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.types import Batch, decode
from megarl.core.learner import late_gathering, optimizer
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trainer import Trainer
from megarl.core.models import family_of, hf, parallel
from megarl.core.recipe import Recipe
from tests.parallel.learner_world import recipe_of, say, start_at
from tests.sequences import logprobs, training_sequences

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}],
    4: [
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2},
    ],
}
CRITIC = {"centring": "critic", "zero_variance": "keep", "positive_threshold": None}
PHASES = {"kind": "ppo-off-policy", "k": 8}
Weights = dict[str, torch.Tensor]


def main(directory: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for model in sorted(p for p in directory.iterdir() if p.is_dir()):
        batch: Batch = decode(model.with_suffix(".msgpack").read_bytes(), Batch)
        experts = family_of(model).architecture.experts > 0
        for layout in LAYOUTS[world]:
            if not experts and "expert_parallel" in layout:
                continue
            with gradients_reduced_meanwhile():
                check_same_steps(model, batch, layout)
                check_readers(model, batch, layout)
    parallel.stop()


@contextmanager
def gradients_reduced_meanwhile() -> Iterator[None]:
    """As on GPUs, in buckets so small that the head has one of its own."""
    overlaps = optimizer.overlaps
    size = optimizer.BUCKET
    optimizer.overlaps = lambda: True
    optimizer.BUCKET = 2000
    yield
    optimizer.overlaps = overlaps
    optimizer.BUCKET = size


def of(model: Path, layout: dict[str, Any], late: bool, critic: bool = False) -> Recipe:
    """A run in phases, or one that publishes after each step; the learner's steps are
    the same.
    """
    tree = recipe_of(model.parent, int(os.environ["WORLD_SIZE"]), **layout).model_dump()
    tree["model"] |= {"path": str(model)}
    tree["critic"] |= {"dtype": "fp32"}
    if late:
        tree["pipeline"] |= PHASES
    if critic:
        tree["batch"] |= CRITIC
    return recipes.from_tree(tree)


def waits(trainer: Trainer) -> bool:
    """Whether this rank's weights of the policy may be partly old."""
    return any(True for _ in late_gathering.incomplete(trainer.policy.ddp))


def stored(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of this rank's weights, as they lie there."""
    return [p.detach().clone() for chunk in trainer.policy.chunks for p in chunk.parameters()]


def exported(trainer: Trainer) -> Weights:
    """This stage's whole tensors, as they would be published."""
    return {n: t.clone() for n, t in hf.export(trainer.policy.chunks, trainer.policy.family)}


def check_same_steps(model: Path, batch: Batch, layout: dict[str, Any]) -> None:
    """Three steps of policy and critic, to the bit."""
    rows = []
    for late in (False, True):
        recipe = of(model, layout, late, critic=True)
        trainer = start_at(recipe, model)
        sequences = trainer.sequences(batch)
        steps = [trainer.train_step(sequences) for _ in range(3)]
        trainer.policy.gather_weights()
        rows.append((steps, stored(trainer)))
    (plain, plain_weights), (found, weights) = rows
    assert found == plain, (layout, found, plain)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True)), layout
    say(f"{model.name} {layout}: the same steps")


def check_readers(model: Path, batch: Batch, layout: dict[str, Any]) -> None:
    """What else reads weights has the current ones: a publication, a score, a
    checkpoint.
    """
    what = f"{model.name} {layout}"
    plain = start_at(of(model, layout, late=False), model)
    sequences = training_sequences(batch, plain.recipe)
    plain.train_step(sequences)
    assert not waits(plain), what
    expected = exported(plain)
    scores = logprobs(plain, [s.tokens for s in sequences])

    trainer = start_at(of(model, layout, late=True), model)
    trainer.train_step(sequences)
    assert waits(trainer), what
    old = exported(trainer)
    assert any(not torch.equal(old[name], expected[name]) for name in expected), (
        f"{what}: nothing was old"
    )
    trainer.policy.gather_weights()
    assert not waits(trainer), what
    new = exported(trainer)
    assert all(torch.equal(new[name], expected[name]) for name in expected), what

    trainer = stepped(model, layout, sequences)
    again = logprobs(trainer, [s.tokens for s in sequences])
    assert all((a == b).all() for a, b in zip(again, scores, strict=True)), what
    assert not waits(trainer), what

    trainer = stepped(model, layout, sequences)
    folder = model.parent / "checkpoints" / what
    saved = Checkpoints(folder, 1, trainer, model)
    saved.save()
    saved.finish()
    resumed = start_at(of(model, layout, late=False), model)
    assert Checkpoints(folder, 1, resumed, model).load_latest()
    loaded = exported(resumed)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected), what
    say(f"{what}: the same for readers")


def stepped(model: Path, layout: dict[str, Any], sequences: list[TrainSequence]) -> Trainer:
    trainer = start_at(of(model, layout, late=True), model)
    trainer.train_step(sequences)
    assert waits(trainer)
    return trainer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
