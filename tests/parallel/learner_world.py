"""One rank of test_learner_layouts: the RL step at every layout of its world size.

`python -m tests.parallel.learner_world DIR`, DIR holding batch.msgpack and for each
model NAME/model/ (Hugging Face), NAME/expected.pt and, for one with experts,
NAME/balancing.pt (transformers'); from the world of one rank on also one_rank.pt and
checkpoints/. Differences are max|d| / max|expected|.
"""

import dataclasses
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.core import recipe as recipes
from megarl.core.algorithm.advantages import Moments
from megarl.core.algorithm.batch import unrewarded
from megarl.core.base.types import Batch, decode
from megarl.core.learner import optimizer
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import family_of, hf, parallel
from megarl.core.recipe import Recipe
from tests.full_disk import files_no_larger_than
from tests.parallel.models_world import forget_models
from tests.sequences import logprobs, training_sequences
from tests.unit.core.learner.test_expert_load import COEFFICIENT

# isort: split
from megatron.core import parallel_state

# AdamW makes whole steps of the rounding of tiny gradients; this keeps that below what
# is looked for. Only in a world's processes: a test that imports from here has the EPS
# of users.
if "WORLD_SIZE" in os.environ:
    optimizer.EPS = 1e-6

PP2_TP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
VPP2 = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [
        {},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        VPP2,
        {"context_parallel": 2},
    ],
    4: [
        PP2_TP2,
        {"pipeline_parallel": 2},
        {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2},
        {"pipeline_parallel": 2, "context_parallel": 2},
        {"tensor_parallel": 2, "context_parallel": 2},
    ],
}
PP2_EP2 = {"pipeline_parallel": 2, "expert_parallel": 2}
TP2_EP2 = {"tensor_parallel": 2, "expert_parallel": 2}
WITH_EXPERTS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"expert_parallel": 2}, TP2_EP2],
    4: [PP2_EP2, TP2_EP2 | {"expert_tensor_parallel": 2}],
}
CHECKPOINTED: list[dict[str, Any]] = [{}, VPP2, PP2_TP2, PP2_EP2]
BALANCED = {"aux_loss": COEFFICIENT}
RESUMED = 2
COUNTED = (5, 2, Moments(24.5, 1 / 3, 0.7))
"""Steps skipped, those in a row, and statistics of advantages: any, for they only have
to come back.
"""


def main(directory: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    batch: Batch = decode((directory / "batch.msgpack").read_bytes(), Batch)
    for path in sorted(p for p in directory.iterdir() if p.is_dir()):
        check_model(path, batch, world)
    parallel.stop()


def check_model(directory: Path, batch: Batch, world: int) -> None:
    experts = family_of(directory / "model").architecture.experts
    for layout in (WITH_EXPERTS if experts else LAYOUTS)[world]:
        what = f"{directory.name} {layout}"
        check_step(directory, batch, recipe_of(directory, world, **layout), what)
        if (directory / "balancing.pt").exists():
            check_balancing(directory, recipe_of(directory, world, moe=BALANCED, **layout), what)
        if layout in CHECKPOINTED and directory.name != "qwen3_moe":  # stored as llama4's
            recipe = recipe_of(directory, world, **layout)
            if not experts:
                check_skipped(directory, batch, recipe)
            check_checkpoint(directory, batch, recipe, what)


def recipe_of(directory: Path, world: int, **layout: Any) -> Recipe:
    """Micro-batches of 64 tokens: several on every rank, and one sequence that is
    longer.
    """
    return recipes.from_tree(
        {
            "model": {"path": str(directory / "model"), "dtype": "fp32", **layout},
            "resources": {"learner_ranks": world},
            "batch": {"prompts": 4},
            "sampling": {"temperature": 0.7},
            "loss": {"cap": 1.5},
            "learner": {
                "microbatch_tokens": 64,
                "optimizer": {"lr": 1e-4, "warmup_steps": 0, "grad_clip": 0.5},
            },
        }
    )


def start(directory: Path, recipe: Recipe) -> Trainer:
    return start_at(recipe, directory / "model")


def start_at(recipe: Recipe, model: Path) -> Trainer:
    """A trainer with the weights of that directory. Earlier ones are of no use after
    it.
    """
    forget_models()
    parallel.start(recipe.model, seed=1, timeout_s=60)
    return Trainer(recipe, model)


def check_step(directory: Path, batch: Batch, recipe: Recipe, what: str) -> None:
    """Loss, gradients and log-probs against transformers' in float64 and against one
    rank's.
    """
    trainer = start(directory, recipe)
    metrics = trainer.policy.forward_backward(training_sequences(batch, recipe))
    result: dict[str, Any] = {"loss": metrics["loss"], "gradients": full_gradients(trainer.policy)}
    one_rank = directory / "one_rank.pt"
    if dist.get_world_size() == 1 and not one_rank.exists():
        torch.save(result, one_rank)
    expected = torch.load(directory / "expected.pt", weights_only=False)
    for name, limit in (("transformers", expected), ("one rank", torch.load(one_rank))):
        worst = max(
            difference(result["gradients"][n], g, limit["gradients"])
            for n, g in limit["gradients"].items()
        )
        off = abs(result["loss"] - limit["loss"]) / expected["magnitude"]
        say(f"{what}: against {name}: gradients {worst:.1e}, loss {off:.1e}")
        # Two roundings of float32, each within 1e-6 of float64, are at most so far
        # apart. Of transformers' own float32, Qwen3-MoE's is 1.5e-6 off and Llama 4's
        # 0.9e-6; CPUs differ, too.
        assert worst <= 2e-6, what
        assert off <= 1e-6, what
    for name in ("entropy", "surprise", "ratio_max", "capped_share", "tokens_trained"):
        assert abs(metrics[name] - expected[name]) <= 1e-5 * abs(expected[name]), (
            what,
            name,
            metrics[name],
            expected[name],
        )
    for mine, theirs in zip(
        logprobs(trainer, expected["sequences"]), expected["logprobs"], strict=True
    ):
        assert abs(mine - theirs).max() <= 1e-5, what
    imbalance = {
        name: value for name, value in metrics.items() if name.startswith("expert_imbalance_layer")
    }
    assert imbalance.keys() == expected["imbalance"].keys(), what
    assert all(
        math.isclose(imbalance[n], expected["imbalance"][n], rel_tol=1e-6) for n in imbalance
    ), (what, imbalance)
    assert math.isclose(
        metrics.get("expert_unused_share", 0.0), expected["unused"], abs_tol=1e-9
    ), what


def check_balancing(directory: Path, recipe: Recipe, what: str) -> None:
    """The gradient of the balancing loss, beside which advantages of zero leave none,
    against transformers'. A sequence fills a micro-batch, so that a layout changes
    nothing but who computes it.
    """
    expected = torch.load(directory / "balancing.pt", weights_only=False)
    trainer = start(directory, recipe)
    metrics = trainer.policy.forward_backward(
        [unrewarded(i, tokens) for i, tokens in enumerate(expected["ids"])]
    )
    assert metrics["microbatches"] == len(expected["ids"]) / recipe.data_parallel, what
    found = full_gradients(trainer.policy)
    worst = max(
        difference(found[n], g, expected["gradients"]) for n, g in expected["gradients"].items()
    )
    say(f"{what}: balancing loss against transformers: gradients {worst:.1e}")
    assert worst <= 3e-6, what


def check_checkpoint(directory: Path, batch: Batch, recipe: Recipe, what: str) -> None:
    """Resumed here the next steps are the same bit for bit; resumed from one rank's
    checkpoint they are one rank's to 1e-6.
    """
    sequences = training_sequences(batch, recipe)
    alone = dist.get_world_size() == 1
    folder = (
        directory
        / "checkpoints"
        / ("one_rank" if alone else f"{dist.get_world_size()} ranks {what}")
    )
    trainer = start(directory, recipe)
    for _ in range(RESUMED):
        trainer.train_step(sequences)
    trainer.skipped_steps, trainer.skipped_in_row, trainer.moments = COUNTED
    checkpoints = Checkpoints(folder, 2, trainer, directory / "model")
    checkpoints.save()
    went_on = [trainer.train_step(sequences) for _ in range(3)]
    checkpoints.finish()
    check_failed_write(directory, folder.with_name(f"{folder.name} on a full disk"), trainer)
    assert resume(directory, folder, recipe) == went_on, what
    writers = {int(file.name.split("_")[2]) for file in folder.glob("*/*.distcp")}
    assert writers == set(range(dist.get_world_size())), (what, writers)
    if alone:
        torch.save(went_on, directory / "went_on.pt")
    expected = torch.load(directory / "went_on.pt")
    again = resume(directory, directory / "checkpoints" / "one_rank", recipe)
    scale = {
        "loss": torch.load(directory / "expected.pt", weights_only=False)["magnitude"],
        "grad_norm": expected[0]["grad_norm"],
    }
    worst = max(
        abs(a[n] - b[n]) / scale[n] for a, b in zip(again, expected, strict=True) for n in scale
    )
    say(f"{what}: resumed from one rank's checkpoint: {worst:.1e}")
    assert worst <= 1e-6, (what, again, expected)


def check_failed_write(directory: Path, folder: Path, trainer: Trainer) -> None:
    """One rank, which is not the first where others write, cannot write its part: all
    ranks know that, nothing is left, and the next write is like any other.
    """
    checkpoints = Checkpoints(folder, 2, trainer, directory / "model")
    unable = dist.get_rank() == parallel_state.get_pipeline_model_parallel_world_size() - 1
    with files_no_larger_than(100) if unable else nullcontext():
        checkpoints.save()
        checkpoints.poll(blocking=True)
    dist.barrier()  # after rank 0 has removed the rest
    assert checkpoints.failures == 1
    assert list(folder.iterdir()) == []
    trainer.step += 1
    checkpoints.save()
    checkpoints.finish()
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == [f"step-{trainer.step:07}"]


def check_skipped(directory: Path, batch: Batch, recipe: Recipe) -> None:
    """A step without sequences, or without a finite loss, changes no weight, is
    counted, and is a step all the same.
    """
    trainer = start(directory, recipe)
    sequences = training_sequences(batch, recipe)
    before = [p.detach().clone() for chunk in trainer.policy.chunks for p in chunk.parameters()]
    empty = trainer.train_step([])
    broken = trainer.train_step([dataclasses.replace(s, advantage=float("nan")) for s in sequences])
    after = [p for chunk in trainer.policy.chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (empty["empty"], broken["skipped"], broken["skipped_steps"], trainer.step) == (
        1,
        1,
        1,
        2,
    )
    assert [(r["ticket"], r["sample"]) for r in trainer.offenders] == [
        (s.ticket, s.sample) for s in sequences
    ]
    assert {r["cause"] for r in trainer.offenders} == {"loss"}
    for bad in (2, 7):  # one rollout in one micro-batch of one rank
        one = [
            dataclasses.replace(s, advantage=math.inf) if i == bad else s
            for i, s in enumerate(sequences)
        ]
        assert trainer.train_step(one)["skipped"] == 1
        found = {"ticket": sequences[bad].ticket, "sample": sequences[bad].sample, "cause": "loss"}
        assert trainer.offenders == [found]
    trainer.train_step(
        [dataclasses.replace(s, advantage=1e30) for s in sequences]
    )  # finite: its gradient's norm is not
    assert {r["cause"] for r in trainer.offenders} == {"step"}
    assert len(trainer.offenders) == len(sequences)
    assert (trainer.skipped_in_row, trainer.skipped_steps) == (4, 4)
    trained = trainer.train_step(sequences)
    assert trained["skipped"] == trainer.skipped_in_row == 0
    assert trainer.offenders == []
    assert math.isfinite(trained["loss"])
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def resume(directory: Path, folder: Path, recipe: Recipe) -> list[dict[str, float]]:
    """The metrics of the three steps after the checkpoint in `folder`."""
    trainer = start(directory, recipe)
    assert Checkpoints(folder, 2, trainer, directory / "model").load_latest()
    assert trainer.step == RESUMED
    assert (trainer.skipped_steps, trainer.skipped_in_row, trainer.moments) == COUNTED
    batch: Batch = decode((directory.parent / "batch.msgpack").read_bytes(), Batch)
    return [trainer.train_step(training_sequences(batch, recipe)) for _ in range(3)]


def full_gradients(network: TrainedNetwork) -> dict[str, torch.Tensor]:
    """Gradients under Hugging Face names, of the whole model, on every rank."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in network.ddp:
        buffers = [(b, dense) for b in chunk.buffers] + [
            (b, experts) for b in chunk.expert_parallel_buffers
        ]
        for buffer, group in buffers:  # each data-parallel rank has the sum of its part of a bucket
            for bucket in buffer.buckets:
                part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    with torch.no_grad():
        for chunk in network.chunks:
            kept = [p.detach().clone() for p in chunk.parameters()]
            for p in chunk.parameters():
                p.copy_(p.main_grad)
            chunk.kept = kept
        mine = {name: tensor.clone() for name, tensor in hf.export(network.chunks, network.family)}
        for chunk in network.chunks:
            for p, value in zip(chunk.parameters(), chunk.kept, strict=True):
                p.copy_(value)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: tensor for part in parts for name, tensor in part.items()}


def difference(
    value: torch.Tensor, expected: torch.Tensor, everything: dict[str, torch.Tensor]
) -> float:
    """max|d| relative to the largest gradient of all."""
    largest = max(g.abs().max() for g in everything.values())
    return float((value.double() - expected.double()).abs().max() / largest)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
