"""One rank of test_memory: steps that keep less, or overlap, against the plain one at
the same layout, bit for bit.

`python -m tests.parallel.memory_world DIR`, DIR holding NAME/ (Hugging Face) and
NAME.msgpack (a batch, with routing where the model has experts) of each model.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.packing import sizes_to_try
from megarl.core.base.types import Batch, decode
from megarl.core.learner import microbatch_size, optimizer
from megarl.core.learner.trainer import Trainer
from megarl.core.models import family_of, parallel
from megarl.core.recipe import Recipe
from tests.parallel.learner_world import difference, full_gradients, recipe_of, say, start_at
from tests.sequences import training_sequences

# isort: split
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

SP2 = {"tensor_parallel": 2}
VPP2 = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [SP2, {"pipeline_parallel": 2}, VPP2, {"context_parallel": 2}],
    4: [SP2 | {"pipeline_parallel": 2}],
}
WITH_EXPERTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [SP2 | {"expert_parallel": 2}, {"pipeline_parallel": 2}, VPP2],
    4: [{"pipeline_parallel": 2, "expert_parallel": 2}],
}
OVERLAPPED: dict[int, list[dict[str, Any]]] = {
    1: [],
    2: [{}, {"expert_parallel": 2}, {"context_parallel": 2}],
    4: [{"pipeline_parallel": 2}, VPP2, SP2 | {"expert_parallel": 2}],
}
AGREED: dict[int, list[dict[str, Any]]] = {1: [], 2: [{}], 4: [{"pipeline_parallel": 2}]}
Step = tuple[dict[str, float], dict[str, torch.Tensor]]


def main(directory: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    for model in sorted(p for p in directory.iterdir() if p.is_dir()):
        batch: Batch = decode(model.with_suffix(".msgpack").read_bytes(), Batch)
        experts = family_of(model).architecture.experts > 0
        for layout in (WITH_EXPERTS if experts else LAYOUTS)[world]:
            check_recomputed(model, batch, layout, experts)
            if "expert_parallel" in layout:
                check_shared_experts_beside(model, batch, layout)
        for layout in OVERLAPPED[world]:
            if experts or "expert_parallel" not in layout:
                check_overlapped(of(model, world, **layout), batch, f"{model.name} {layout}")
        for layout in AGREED[world]:
            tree = of(model, world, **layout).model_dump()
            tree["learner"] |= {"microbatch_tokens": "auto"}
            check_agreed(recipes.from_tree(tree), f"{model.name} {layout} auto")
    parallel.stop()


def of(
    model: Path,
    world: int,
    recompute: str = "none",
    moe: dict[str, Any] | None = None,
    **layout: Any,
) -> Recipe:
    tree = recipe_of(model.parent, world, **layout).model_dump()
    tree["model"] |= {"path": str(model), "moe": moe or {}}
    tree["learner"] |= {"recompute": recompute, "microbatch_tokens": 128}
    return recipes.from_tree(tree)


def step(recipe: Recipe, sequences: list[TrainSequence], passes: int = 1) -> Step:
    """Metrics and gradients of the last of several passes. No update: its norm is
    summed by buckets, in another order.
    """
    trainer = start_at(recipe, Path(recipe.model.path))
    for _ in range(passes - 1):
        trainer.policy.forward_backward(sequences)
    random = torch.get_rng_state()
    metrics = trainer.policy.forward_backward(sequences)
    assert torch.equal(torch.get_rng_state(), random)
    return metrics, full_gradients(trainer.policy)


def check_recomputed(model: Path, batch: Batch, layout: dict[str, Any], experts: bool) -> None:
    """Experts: the router's own and the server's, each with a balancing loss, which is
    added where the router is run again.
    """
    world = int(os.environ["WORLD_SIZE"])
    for replay in (False, True) if experts else (False,):
        balanced = {"aux_loss": 0.3, "routing_replay": replay}
        moe = balanced if experts else None
        sequences = training_sequences(batch, of(model, world, moe=moe, **layout))
        if not replay:
            sequences = [dataclasses.replace(s, experts=None) for s in sequences]
        plain = step(of(model, world, moe=moe, **layout), sequences)
        for recompute in ("light", "selective", "full") if experts else ("selective", "full"):
            with counted_recomputations() as counted:
                again = step(of(model, world, recompute, moe, **layout), sequences)
            assert counted[0], "nothing was recomputed"
            check_same(again, plain, f"{model.name} {layout} {recompute} replay={replay}")


def check_shared_experts_beside(model: Path, batch: Batch, layout: dict[str, Any]) -> None:
    """Shared experts that compute while tokens are exchanged give the same: gradients
    add up in another order, within two roundings of float32 (models_world.py).
    """
    world = int(os.environ["WORLD_SIZE"])
    recipe = of(model, world, **layout)
    sequences = [dataclasses.replace(s, experts=None) for s in training_sequences(batch, recipe)]
    plain = step(recipe, sequences)
    with counted_calls(SharedExpertMLP, "linear_fc2_forward") as counted:
        beside = step(of(model, world, moe={"shared_overlap": True}, **layout), sequences)
    assert counted[0], "shared experts were computed on their own"
    worst = max(
        difference(beside[1][name], gradient, plain[1]) for name, gradient in plain[1].items()
    )
    assert worst <= 2e-6, (model.name, layout, worst)
    assert math.isclose(beside[0]["loss"], plain[0]["loss"], rel_tol=1e-6, abs_tol=1e-6), (
        beside[0],
        plain[0],
    )
    say(f"{model.name} {layout} shared experts beside the exchange: gradients {worst:.1e}")


@contextmanager
def counted_calls(owner: type, name: str) -> Iterator[list[int]]:
    counted = [0]
    method = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counting)
    yield counted
    setattr(owner, name, method)


def check_overlapped(recipe: Recipe, batch: Batch, what: str) -> None:
    """The third pass: the first one tells megatron how often each gradient is added to,
    and reduces at its end.
    """
    sequences = [dataclasses.replace(s, experts=None) for s in training_sequences(batch, recipe)]
    plain = step(recipe, sequences, passes=3)
    with overlapping() as started:
        overlapped = step(recipe, sequences, passes=3)
    assert started[0], "no bucket was reduced before the backward pass had ended"
    check_same(overlapped, plain, f"{what} overlapped")


class FakeMemory:
    """A GPU's memory: proportional to the tokens of the largest micro-batch, with more
    taken on higher ranks.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(self, trial: Callable[[], None]) -> float:
        trial()
        tokens = self.trainer.policy.microbatch_tokens
        return (0.003 + 0.001 * dist.get_rank()) * tokens


def check_agreed(recipe: Recipe, what: str) -> None:
    """Each rank has another share of its memory left: the fullest decides for all, and
    pipelines are filled while trying.
    """
    trainer = start_at(recipe, Path(recipe.model.path))
    microbatch_size.gpu_memory = lambda: FakeMemory(trainer)
    microbatch_size.settle(trainer, 40, 40 * 200, None)
    worst = 0.003 + 0.001 * (dist.get_world_size() - 1)
    sizes = sizes_to_try(40, 40 * 200)
    assert trainer.policy.microbatch_tokens == max(n for n in sizes if worst * n <= 1), what
    assert not any(p.main_grad.any() for chunk in trainer.policy.chunks for p in chunk.parameters())
    say(f"{what}: {trainer.policy.microbatch_tokens} tokens")


def check_same(found: Step, expected: Step, what: str) -> None:
    assert found[0] == expected[0], (what, found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    worst = max(float((found[1][n] - g).abs().max()) for n, g in expected[1].items())
    assert worst == 0, (what, worst)
    say(f"{what}: the same")


@contextmanager
def counted_recomputations() -> Iterator[list[int]]:
    from megatron.core.tensor_parallel.random import CheckpointFunction, CheckpointWithoutOutput

    counted = [0]
    backward = CheckpointFunction.backward

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return backward(*args)

    CheckpointFunction.backward = staticmethod(counting)
    with counted_calls(CheckpointWithoutOutput, "_recompute") as outputs:
        yield counted
        counted[0] += outputs[0]
    CheckpointFunction.backward = staticmethod(backward)


@contextmanager
def overlapping() -> Iterator[list[int]]:
    """Gradients are reduced in small buckets while others are computed, as on GPUs.
    Counts buckets whose reduction has begun before the schedule asks for the end of
    all.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    started = [0]
    overlaps = optimizer.overlaps
    size = optimizer.BUCKET
    finish = _ParamAndGradBucketGroup.finish_grad_sync

    def finishing(self: Any, *args: Any, **kwargs: Any) -> None:
        started[0] += self.grad_reduce_handle is not None
        finish(self, *args, **kwargs)

    optimizer.overlaps = lambda: True
    optimizer.BUCKET = 2000
    _ParamAndGradBucketGroup.finish_grad_sync = finishing
    yield started
    optimizer.overlaps = overlaps
    optimizer.BUCKET = size
    _ParamAndGradBucketGroup.finish_grad_sync = finish


if __name__ == "__main__":
    main(Path(sys.argv[1]))
