"""A trainer with a critic, and one with several epochs a step, on one rank."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints_tools.convert import megatron_to_hf, reshard
from checkpoints_tools.layout import Parallelism
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.base.errors import MegarlError
from megarl.core.learner.checkpoint import Checkpoints
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel
from tests import make
from tests.tiny import tiny_llama

# isort: split
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_rank")

CRITIC: dict[str, Any] = {
    "batch": {"centring": "critic", "zero_variance": "keep", "aggregation": "token"}
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critic") / "model"
    tiny_llama(path, num_hidden_layers=2)
    return path


def trainer_of(
    model: Path,
    learner: dict[str, Any] | None = None,
    dtype: str = "fp32",
    **sections: dict[str, Any],
) -> Trainer:
    optimizer = {"optimizer": {"lr": 1e-3, "warmup_steps": 0}}
    tree = {
        "model": {"path": str(model), "dtype": dtype},
        "loss": {"kind": "clip"},
        "learner": {"microbatch_tokens": 64, **optimizer, **(learner or {})},
        "critic": {"optimizer": {"lr": 1e-3}},
    }
    return Trainer(make.recipe(tree, **sections), model)


def batch() -> list[TrainSequence]:
    """Eight rollouts with a masked phrase each, weighted by token."""
    draw = np.random.default_rng(2)
    out = []
    for i in range(8):
        n = int(draw.integers(8, 30))
        trained = np.arange(n) >= 3
        trained[5:7] = False
        weight = trained / np.float32(100)
        behaviour = np.where(trained, -5.0, 0).astype(np.float32)
        reward = 1.0 if i % 3 else -1.0
        tokens = draw.integers(0, 128, n).astype(np.int32)
        out.append(
            TrainSequence(i, 0, tokens, behaviour, weight.astype(np.float32), reward, reward=reward)
        )
    return out


def weights(network: TrainedNetwork) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in network.chunks for p in chunk.parameters()]


def gradients(network: TrainedNetwork) -> list[torch.Tensor]:
    return [p.main_grad.clone() for chunk in network.chunks for p in chunk.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def critic_of(trainer: Trainer) -> TrainedNetwork:
    assert trainer.critic is not None
    return trainer.critic


def test_two_epochs_are_two_updates_by_the_same_batch_in_one_step(model: Path) -> None:
    at_once = trainer_of(model, {"epochs": 2})
    by_hand = trainer_of(model)
    metrics = at_once.train_step(batch())
    first = by_hand.train_step(batch())
    second = by_hand.train_step(batch())
    assert same(weights(at_once.policy), weights(by_hand.policy))
    assert metrics == second
    assert first["ratio_mean"] != second["ratio_mean"]
    assert (at_once.step, by_hand.step) == (1, 2)


def test_epochs_of_a_critic_keep_the_advantages_of_the_step(model: Path) -> None:
    """Values are asked once: an epoch by hand, on what was estimated before the first,
    is the second.
    """
    at_once = trainer_of(model, {"epochs": 2}, **CRITIC)
    metrics = at_once.train_step(batch())
    by_hand = trainer_of(model, **CRITIC)
    assert by_hand.critic is not None
    estimated, _ = by_hand.critic.estimated(batch())
    for _ in range(2):
        by_hand.policy.forward_backward(estimated)
        by_hand.critic.forward_backward(estimated)
        for network in (by_hand.policy, by_hand.critic):
            network.update(1e-3, network.gradient_norm())
    assert same(weights(at_once.policy), weights(by_hand.policy))
    assert same(weights(critic_of(at_once)), weights(critic_of(by_hand)))
    assert metrics["value_mean"] == 0  # of a new critic


def test_a_critic_learns_what_to_expect(model: Path) -> None:
    trainer = trainer_of(model, **CRITIC)
    rows = [trainer.train_step(batch()) for _ in range(25)]
    assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["value_loss"] < rows[0]["value_loss"] / 4
    assert rows[-1]["explained_variance"] > 0.5
    assert rows[-1]["value_mean"] == pytest.approx(rows[-1]["return_mean"], abs=0.2)


def test_the_warm_up_of_a_critic_leaves_the_policy_alone(model: Path) -> None:
    trainer = trainer_of(model, **CRITIC, critic={"warmup_steps": 2})
    before = weights(trainer.policy)
    expected_nothing = weights(critic_of(trainer))
    rows = [trainer.train_step(batch()) for _ in range(2)]
    assert same(weights(trainer.policy), before)
    assert not same(weights(critic_of(trainer)), expected_nothing)
    assert trainer.step == 2
    assert all("lr" not in row and row["skipped"] == 0 for row in rows)
    assert [row["critic_lr"] for row in rows] == [5e-4, 1e-3], "its rate rises within its warm-up"
    assert trainer.train_step(batch())["lr"] == 1e-3
    assert not same(weights(trainer.policy), before)


def test_the_policys_warm_up_begins_after_the_critics(model: Path) -> None:
    """Otherwise the policy's first update, with moments of AdamW that are still 0,
    could be at the full rate.
    """
    optimizer = {"lr": 1e-3, "warmup_steps": 2, "schedule": "linear"}
    given: dict[str, Any] = {
        "run": {"steps": 6},
        "learner": {"microbatch_tokens": 96, "optimizer": optimizer},
    }
    trainer = trainer_of(model, **CRITIC | given, critic={"warmup_steps": 2})
    rows = [trainer.train_step(batch()) for _ in range(6)]
    assert [row.get("lr") for row in rows] == [
        None,
        None,
        *map(pytest.approx, (5e-4, 1e-3, 1e-3, 5e-4)),
    ]
    assert [row["critic_lr"] for row in rows] == [
        5e-4,
        1e-3,
        *map(pytest.approx, (1e-3, 7.5e-4, 5e-4, 2.5e-4)),
    ]


def test_what_was_not_sampled_has_no_gradient(model: Path) -> None:
    """Whatever is said of masked tokens, the gradients of both networks are the same
    bit for bit.
    """
    trainer = trainer_of(model, **CRITIC)
    assert trainer.critic is not None
    with torch.no_grad():
        critic_of(trainer).chunks[-1].output_layer.weight.fill_(
            0.1
        )  # so that the layers below have a gradient
    plain, _ = trainer.critic.estimated(batch())
    masked = [s.loss_weight == 0 for s in plain]

    def with_noise(sequence: TrainSequence, where: np.ndarray) -> dict[str, Any]:
        return {
            name: np.where(where, np.float32(1e6), getattr(sequence, name)).astype(np.float32)
            for name in ("advantage", "value", "value_target", "behaviour_logprobs")
        }

    noisy = [dataclasses.replace(s, **with_noise(s, m)) for s, m in zip(plain, masked, strict=True)]
    found = []
    for sequences in (plain, noisy):
        trainer.policy.forward_backward(sequences)
        trainer.critic.forward_backward(sequences)
        found.append((gradients(trainer.policy), gradients(critic_of(trainer))))
    for a, b in zip(*found, strict=True):
        assert same(a, b)
        assert all(g.any() for g in a)


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_step_is_skipped_for_both(model: Path, broken: str) -> None:
    trainer = trainer_of(model, {"epochs": 2}, **CRITIC)
    before = weights(trainer.policy), weights(critic_of(trainer))
    bad = batch()
    if broken == "critic":
        bad[3] = dataclasses.replace(bad[3], reward=1e30)  # its square is infinite
    else:
        bad[3] = dataclasses.replace(
            bad[3], behaviour_logprobs=np.full(len(bad[3]), np.nan, np.float32)
        )
    assert trainer.train_step(bad)["skipped"] == 1
    assert trainer.offenders == [{"ticket": 3, "sample": 0, "cause": "loss"}]
    assert same(weights(trainer.policy), before[0])
    assert same(weights(critic_of(trainer)), before[1])
    assert trainer.train_step(batch())["skipped"] == 0
    assert (trainer.skipped_steps, trainer.skipped_in_row) == (1, 0)


def test_checkpoints_with_and_without_a_critic(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written in the critic's warm-up, when the policy has no optimiser state yet."""
    trainer = trainer_of(model, **CRITIC, critic={"warmup_steps": 3})
    for _ in range(2):
        trainer.train_step(batch())
    checkpoints = Checkpoints(tmp_path / "with", 1, trainer, model)
    checkpoints.save()
    went_on = [trainer.train_step(batch()) for _ in range(3)]
    checkpoints.finish()

    again = trainer_of(model, **CRITIC, critic={"warmup_steps": 3})
    assert Checkpoints(tmp_path / "with", 1, again, model).load_latest()
    assert [again.train_step(batch()) for _ in range(3)] == went_on
    assert same(weights(critic_of(again)), weights(critic_of(trainer)))
    assert same(weights(again.policy), weights(trainer.policy))

    without = trainer_of(model)
    alone = Checkpoints(tmp_path / "with", 1, without, model)
    assert alone.load_latest()  # what it does not want is left
    without.train_step(batch())
    alone = Checkpoints(tmp_path / "without", 1, without, model)
    alone.save()
    alone.finish()
    monkeypatch.setattr("megarl.core.learner.checkpoint.AGAIN_S", ())
    with pytest.raises(
        MegarlError, match=r"step-0000003: has no critic, which batch.centring=critic asks for"
    ):
        Checkpoints(tmp_path / "without", 1, trainer_of(model, **CRITIC), model).load_latest()


def test_conversion_takes_the_policy(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model, **CRITIC)
    trainer.train_step(batch())
    checkpoints = Checkpoints(tmp_path / "run", 1, trainer, model)
    checkpoints.save()
    checkpoints.finish()
    expected = {
        name: tensor.clone()
        for name, tensor in hf.export(trainer.policy.chunks, trainer.policy.family)
    }
    parallel.stop()  # the tools have ranks of their own
    (step,) = (tmp_path / "run").iterdir()
    megatron_to_hf(step, tmp_path / "policy")
    stored = load_file(tmp_path / "policy" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    with pytest.raises(MegarlError, match=r"has a critic, whose shards reshard cannot convert"):
        reshard(step, tmp_path / "resharded", Parallelism(tensor=2))


def test_a_float32_head_on_a_bf16_model_whose_embedding_is_its_head(tmp_path: Path) -> None:
    """megatron has parameters of two types to keep apart; the critic's embedding is not
    shared with anything.
    """
    tied = tmp_path / "tied"
    tiny_llama(tied, torch.bfloat16, num_hidden_layers=1, tie_word_embeddings=True)
    trainers = [
        trainer_of(tied, dtype="bf16", **CRITIC, critic={"dtype": "bf16"}) for _ in range(2)
    ]
    for trainer in trainers:
        assert sorted(str(w.dtype) for w in weights(critic_of(trainer)))[-1] == "torch.float32"
    trainers[0].train_step(batch())
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, trainers[0], tied)
    checkpoints.save()
    checkpoints.finish()
    assert Checkpoints(tmp_path / "checkpoints", 1, trainers[1], tied).load_latest()
    assert trainers[0].train_step(batch()) == trainers[1].train_step(batch())
    assert same(weights(critic_of(trainers[0])), weights(critic_of(trainers[1])))
