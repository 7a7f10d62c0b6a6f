"""A fork's weights and optimiser are those that the parent had at that step, bit for
bit, also between two checkpoints.
"""

import gc
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from megarl.core import recipe as recipes
from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.rundir import (
    Endpoints,
    LinkKeys,
    RunDir,
    complete,
    step_folder,
    step_of,
    write_jsonl,
)
from megarl.core.base.types import Batch
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted, Finished
from megarl.core.learner.checkpoint import Checkpoints, replay_parent
from megarl.core.learner.optimizer import learning_rate
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf
from megarl.core.recipe import Recipe
from megarl.core.weights.offload import Offload
from megarl.run import fork
from tests.parallel.test_learner_layouts import make_batch
from tests.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 4


def batch_of(step: int) -> Batch:
    """Other rewards at each step, under the tickets that the journal numbers."""
    groups = []
    for n, group in enumerate(make_batch().groups):
        rollouts = tuple(
            msgspec.structs.replace(r, reward=r.reward * (1 + (step + n) % 3) + (step == r.sample))
            for r in group.rollouts
        )
        groups.append(msgspec.structs.replace(group, ticket=step * 5 + n, rollouts=rollouts))
    return Batch(step=step, groups=tuple(groups))


def recipe_of(folder: Path, model: Path, name: str, **sections: dict[str, object]) -> Recipe:
    tree: dict[str, dict[str, object]] = {
        "run": {"name": name, "dir": str(folder), "steps": 9},
        "model": {"path": str(model), "dtype": "fp32"},
        "batch": {"prompts": 5, "advantage": "running"},
        "checkpoint": {"keep": STEPS},
        "learner": {"microbatch_tokens": 64, "optimizer": {"lr": 1e-2, "warmup_steps": 3}},
    }
    return recipes.from_tree(
        {key: tree.get(key, {}) | sections.get(key, {}) for key in tree | sections}
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in hf.export(trainer.policy.chunks, trainer.policy.family)
    }


def trained(trainer: Trainer, step: int) -> dict[str, torch.Tensor]:
    """The weights after one more step, which show the optimiser's state too."""
    trainer.train_step(trainer.sequences(batch_of(step)))
    return weights(trainer)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def parameters() -> int:
    """How many parameters of models are in memory."""
    return sum(type(each) is torch.nn.Parameter for each in gc.get_objects())


def test_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "model", vocab_size=131)
    source = tmp_path / "model"
    recipe = recipe_of(tmp_path, source, "parent")
    parent = RunDir(recipe.run.path)
    parent.create()
    parent.recipe.write_text(recipes.dump(recipe))
    journal = Journal.open(parent.rollouts, 5, recipe.pipeline.max_lag)
    trainer = Trainer(recipe, source)
    checkpoints = Checkpoints(parent.checkpoints, STEPS, trainer, source)
    at = []
    for step in range(STEPS):
        at.append(weights(trainer))
        batch = batch_of(step)
        for group in batch.groups:
            drawn = Admitted(
                ticket=group.ticket, task="t", prompt_id=group.prompt.id, epoch=0, due=step
            )
            journal.append(drawn, Finished(group=group, time=0.0))
        trainer.train_step(trainer.sequences(batch))
        checkpoints.save()
        checkpoints.finish()
    at.append(weights(trainer))
    journal.close()
    hours = {
        "compute_hours": 1.0,
        "startup_hours": 0.0,
        "evaluation_hours": 0.0,
        "compute_unit": "core",
    }
    rates = [
        learning_rate(step, recipe.learner.optimizer, recipe.run.steps) for step in range(STEPS)
    ]
    write_jsonl(
        parent.metrics, [{"step": step, "lr": rates[step]} | hours for step in range(STEPS)]
    )
    for step in (1, 3):
        shutil.rmtree(step_folder(parent.checkpoints, step))
    assert [step_of(path) for path in complete(parent.checkpoints)] == [2, 4]
    assert not same(at[2], at[3])

    addresses = {
        "session": "s",
        "controller": "",
        "servers": (),
        "api_key": "",
        "admin_key": "",
        "rendezvous_port": 0,
    }
    offload = Offload(recipe, Endpoints(**addresses, link=LinkKeys.new()))
    for step in (1, 2, 3):  # from the model as it came; at a checkpoint; after one
        run = {"run": {"fork": f"{parent.path}@{step}"}}
        for name, other in (
            ("same", {}),
            ("other", {"loss": {"kind": "clip"}, "batch": {"prompts": 3}}),
        ):
            forked = recipe_of(tmp_path, source, f"{name}{step}", **run | other)
            rundir = RunDir(forked.run.path)
            rundir.create()
            fork.begin(forked, rundir)
            gc.collect()
            gc.collect()
            held = parameters()
            replay_parent(forked, rundir, offload)
            assert parameters() == held, "the fork's own trainer may need this memory"
            assert [step_of(path) for path in complete(rundir.checkpoints)] == [step]
            restored = Trainer(forked, source)
            assert Checkpoints(rundir.checkpoints, 1, restored, source).load_latest()
            assert restored.step == step
            assert same(weights(restored), at[step])
            if name == "same":
                assert same(trained(restored, step), at[step + 1])
            else:
                assert not same(trained(restored, step), at[step + 1]), "it has the fork's own loss"

    # Told to stop after one step of three, it keeps that one, and goes on where the
    # model has moved to.
    forked = recipe_of(tmp_path, source, "stopped", run={"fork": f"{parent.path}@3"})
    rundir = RunDir(forked.run.path)
    rundir.create()
    fork.begin(forked, rundir)
    shutil.rmtree(step_folder(rundir.parent.checkpoints, 2))
    with monkeypatch.context() as told:
        told.setattr(rundir, "stop_asked", iter((False, True)).__next__)
        with pytest.raises(Interrupted, match="told to stop at step 1 of the replay up to step 3"):
            replay_parent(forked, rundir, offload)
    assert not complete(rundir.checkpoints)
    assert [step_of(path) for path in complete(rundir.parent.checkpoints)] == [1]
    source = source.rename(tmp_path / "moved")
    replay_parent(
        recipe_of(tmp_path, source, "stopped", run={"fork": forked.run.fork}), rundir, offload
    )
    restored = Trainer(forked, source)
    assert Checkpoints(rundir.checkpoints, 1, restored, source).load_latest()
    assert same(trained(restored, 3), at[4])

    changed = recipe_of(
        tmp_path, source, "parent", learner={"optimizer": {"lr": 2e-2, "warmup_steps": 3}}
    )
    parent.recipe.write_text(recipes.dump(changed))
    forked = recipe_of(tmp_path, source, "later", run={"fork": f"{parent.path}@3"})
    rundir = RunDir(forked.run.path)
    rundir.create()
    fork.begin(forked, rundir)
    with pytest.raises(
        MegarlError,
        match=r"run\.fork: step 2 was trained with a learning rate of 0\.01, .* has 0\.02",
    ):
        replay_parent(forked, rundir, offload)
    assert not complete(rundir.checkpoints)
