"""One rank of test_routing_replay: a step with given experts, at every layout of its
world size.

`python -m tests.parallel.replay_world DIR`, DIR holding NAME/ (Hugging Face),
NAME.msgpack (a batch with routing) and NAME.pt (transformers' loss and gradients with
those experts) of each model.
"""

import dataclasses
import itertools
import math
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_data_parallel_rank

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import RankExperts, TrainSequence, sequences_in_loss
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.base.types import Batch, decode
from megarl.core.learner.moe import PartialReplay
from megarl.core.learner.shares import with_shares
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.recipe import Recipe
from tests.parallel.learner_world import difference, full_gradients, recipe_of, say, start_at
from tests.recorded import fetch_from, outlined, recorded_batch
from tests.sequences import training_sequences

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {"expert_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2},
        {"pipeline_parallel": 2},
        {"context_parallel": 2, "expert_parallel": 2},
    ],
    4: [
        {"pipeline_parallel": 2, "expert_parallel": 2},
        {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2},
    ],
}

OTHER = 3
"""The token that is scored in each place too."""


def main(directory: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for model in sorted(p for p in directory.iterdir() if p.is_dir()):
        sequences = None
        for layout in LAYOUTS[world]:
            recipe = of(recipe_of(model.parent, world, **layout), model, replay=True)
            sequences = check_forced(recipe, model, f"{model.name} {layout}")
            if model.name == "qwen3_moe":
                check_memory(start(recipe), f"{layout}")
        if world == 1:
            assert sequences is not None
            check_own(of(recipe_of(model.parent, 1), model, replay=True), model, sequences)
            check_recomputed(of(recipe_of(model.parent, 1), model, replay=True), model, sequences)
    parallel.stop()


def of(recipe: Recipe, model: Path, replay: bool) -> Recipe:
    tree = recipe.model_dump()
    tree["model"] |= {"path": str(model), "moe": {"routing_replay": replay}}
    return recipes.from_tree(tree)


def start(recipe: Recipe) -> Trainer:
    return start_at(recipe, Path(recipe.model.path))


def step(trainer: Trainer, sequences: list[TrainSequence]) -> tuple[float, dict[str, torch.Tensor]]:
    metrics = trainer.policy.forward_backward(sequences)
    return metrics["loss"], full_gradients(trainer.policy)


def check_forced(recipe: Recipe, model: Path, what: str) -> list[TrainSequence]:
    """With the batch's experts, loss and gradients are those of
    transformers with them.
    """
    batch: Batch = decode(model.with_suffix(".msgpack").read_bytes(), Batch)
    sequences = training_sequences(batch, recipe)
    expected = torch.load(model.with_suffix(".pt"), weights_only=False)
    trainer = start(recipe)
    check_scores(trainer, model, expected["scored"], what)
    shared = check_shares(trainer, sequences, batch)
    metrics = trainer.policy.forward_backward(shared)
    loss = metrics["loss"]
    gradients = full_gradients(trainer.policy)
    told = sum(len(s.experts) for s in sequences if isinstance(s.experts, np.ndarray)) / sum(
        map(len, sequences)
    )
    assert math.isclose(metrics["routing_replayed"], told, rel_tol=1e-6), (
        what,
        metrics["routing_replayed"],
        told,
    )
    assert gradients.keys() == expected["gradients"].keys()
    worst = max(
        difference(gradients[n], g, expected["gradients"]) for n, g in expected["gradients"].items()
    )
    off = abs(loss - expected["loss"]) / expected["magnitude"]
    say(f"{what}: gradients {worst:.1e}, loss {off:.1e}")
    # A delta network amplifies roundings (tests/unit/core/models/test_families.py).
    assert worst <= (1e-5 if trainer.policy.family.architecture.delta else 2e-6), what
    assert off <= 1e-6, what
    return sequences


def check_shares(
    trainer: Trainer, sequences: list[TrainSequence], batch: Batch
) -> list[TrainSequence]:
    """Each rank gets the parts of the tables that it replays, and no others. Return the
    sequences with them.
    """
    policy = trainer.policy
    received = trainer.in_loss(outlined(batch), fetch_from(batch))
    own = set(itertools.chain(*policy.plan(sequences).members[get_data_parallel_rank()]))
    for i, (sequence, share) in enumerate(zip(sequences, received, strict=True)):
        if i not in own:
            assert share.experts is None
            continue
        assert isinstance(sequence.experts, np.ndarray)
        assert isinstance(share.experts, RankExperts)
        expected = policy.experts_cut.of(sequence.experts, len(sequence))
        np.testing.assert_array_equal(share.experts.choices, expected.choices)
        assert share.experts.choices.dtype == sequence.experts.dtype
    return trainer.completed(received, outlined(batch))


def check_memory(trainer: Trainer, what: str) -> None:
    """A rank holds its share of a batch's experts, and never much more."""
    model = trainer.recipe.model
    batch = recorded_batch(64, 8192, trainer.policy.family.architecture.moe_layers, 2)
    sequences = sequences_in_loss(outlined(batch), trainer.recipe)
    whole = sequences_in_loss(batch, trainer.recipe)
    total = sum(s.experts.nbytes for s in whole if isinstance(s.experts, np.ndarray))
    members = trainer.policy.plan(sequences).members
    fetch = fetch_from(batch)
    tracemalloc.start()
    shared = with_shares(sequences, outlined(batch), members, trainer.policy.experts_cut, fetch)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    share = 0
    for sequence, unshared in zip(shared, whole, strict=True):
        if isinstance(sequence.experts, RankExperts):
            share += sequence.experts.choices.nbytes
            assert isinstance(unshared.experts, np.ndarray)
            expected = trainer.policy.experts_cut.of(unshared.experts, len(sequence))
            np.testing.assert_array_equal(sequence.experts.choices, expected.choices)
    parts = model.context_parallel * model.pipeline_parallel * trainer.policy.layout.data_parallel
    say(
        f"{what}: of {total / 1e6:.1f} MB of experts, 1/{parts}: {share / total:.3f} on rank 0,"
        f" {held / total:.3f} with Python's objects, {peak / total:.3f} at most"
    )
    assert share / total <= 1 / parts + 0.02, "its sequences, tokens and layers"
    assert peak / total <= 1 / parts + 0.05, what


def check_scores(trainer: Trainer, model: Path, expected: dict[str, Any], what: str) -> None:
    """Scoring takes the learner's own experts: log-probs, and choices that differ, are
    those of a free transformers.
    """
    batch: Batch = decode(model.with_suffix(".msgpack").read_bytes(), Batch)
    rollouts = tuple(
        ScoredRollout(
            tokens=np.concatenate([g.prompt.tokens, r.tokens]),
            first=len(g.prompt.tokens),
            experts=r.routing,
        )
        for g in batch.groups
        for r in g.rollouts
    )
    found = trainer.score(Score(version=0, rollouts=rollouts, against=OTHER), "world")
    for ours, theirs in (
        (found.logprobs, expected["logprobs"]),
        (found.against, expected["against"]),
    ):
        worst = max(float(np.abs(a - b.numpy()).max()) for a, b in zip(ours, theirs, strict=True))
        assert worst <= 1e-5, what
    assert found.choices > 0
    assert found.differing / found.choices == expected["differing"] / expected["choices"], what


def remembered(router: PartialReplay) -> list[torch.Tensor]:
    """The experts that this router chooses from now on, of each call."""
    choose = router.get_replay_topk
    choices = []

    def remember(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, experts = choose(*args)
        choices.append(experts)
        return probabilities, experts

    router.get_replay_topk = remember  # type: ignore[assignment]
    return choices


def check_own(recipe: Recipe, model: Path, sequences: list[TrainSequence]) -> None:
    """Replaying what the learner chose by itself changes no bit, and differs from the
    forced choice.
    """
    free = [dataclasses.replace(s, experts=None) for s in sequences]
    without = step(start(of(recipe, model, replay=False)), free)
    trainer = start(recipe)
    assert trainer.policy.replay is not None
    chosen = [
        remembered(router) for _, router in trainer.policy.replay._columns[0]
    ]  # of each layer, of each micro-batch
    assert same(step(trainer, free), without), (
        "a router that was told nothing does not choose by itself"
    )
    members = trainer.policy.plan(free).members[0]
    own: dict[int, Any] = {}
    for micro, of_micro in enumerate(members):
        table = torch.stack([layer[micro] for layer in chosen], 1).numpy().astype("uint8")
        for i in of_micro:
            own[i], table = table[: len(free[i])], table[len(free[i]) :]
        assert not len(table)
    replayed = step(
        start(recipe), [dataclasses.replace(s, experts=own[i]) for i, s in enumerate(free)]
    )
    assert same(replayed, without), "own choices replayed are not the same"
    assert not same(step(start(recipe), sequences), without)


def check_recomputed(recipe: Recipe, model: Path, sequences: list[TrainSequence]) -> None:
    """Layers, their feed-forward halves or less, recomputed in backward take the same
    experts.
    """
    once = step(start(recipe), sequences)
    again = [
        recipe.model_copy(
            update={"learner": recipe.learner.model_copy(update={"recompute": recompute})}
        )
        for recompute in ("light", "selective", "full")
    ]
    assert all(same(step(start(each), sequences), once) for each in again)
    shares = {
        start(each).policy.forward_backward(sequences)["routing_replayed"]
        for each in (recipe, *again)
    }
    assert len(shares) == 1, "what is computed again was replayed once"


def same(
    a: tuple[float, dict[str, torch.Tensor]], b: tuple[float, dict[str, torch.Tensor]]
) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][n], b[1][n]) for n in b[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    assert not dist.is_initialized()
