"""One step of the whole learner world.

    Batch ──► sequences, asked of a reference if there is one
                    ├─► critic, if there is one: values ──► advantages (GAE)
                    └─► epochs: policy and critic: forward, backward ──► all gradients finite? ──► AdamW of each
                                                     │                     └── no: the step ends, is skipped and counted
                                                     └── fp16, and a scaled gradient overflowed: no AdamW in this epoch, a lower
                                                         scale for the next (optimizer.py), counted apart

An epoch trains on the whole batch; what the server recorded stays every epoch's behaviour policy (PPO, arXiv 1707.06347,
algorithm 1). Metrics of a step are its last epoch's, in which the policy is farthest from the one that sampled. All methods are
collective: every rank calls them with the same sequences.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.core.algorithm.advantages import NOTHING_SEEN
from megarl.core.algorithm.batch import (
    TrainSequence,
    advantage_statistics,
    sequences_in_loss,
    unrewarded,
    with_advantages,
)
from megarl.core.algorithm.losses import Loss, policy_loss
from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.base.messages import Score, Scored
from megarl.core.base.types import Batch
from megarl.core.learner.critic_and_reference import Critic, Reference
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.moe import Replay
from megarl.core.learner.network import Network, loaded_chunks
from megarl.core.learner.optimizer import learning_rate
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.recipe import Optimizer, Recipe

log = logging.getLogger(__name__)

Within = Callable[[str], AbstractContextManager[Any]]


class Trainer:
    """The policy in training, its critic if there is one, and the step count.

    step: the next to train, and also the version of the weights.
    skipped_in_row: steps up to the latest whose loss or gradient was not finite; offenders: the rollouts of the latest.
    scaler_skipped_steps: updates so far that an overflow of scaled gradients prevented.
    moments: of the advantages of all batches so far before they were divided (batch.advantage: running).
    within: told by name which part of a step the time goes to.
    """

    def __init__(
        self,
        recipe: Recipe,
        hf_dir: Path,
        *,
        optimizer: Optimizer | None = None,
        loss: Loss | None = None,
        temperature: float | None = None,
        steps: int | None = None,
    ) -> None:
        """What is not given is the recipe's for reinforcement learning; with a loss of its own, training is supervised, with no
        critic and one epoch a step. steps: of the whole run, for the schedules."""
        supervised = loss is not None
        self.recipe = recipe
        self.steps = steps or recipe.run.steps
        self.within: Within = nullcontext
        self.loss = loss or policy_loss(recipe.loss, recipe.reference)
        self.temperature = temperature or recipe.sampling.temperature
        learner = recipe.learner
        self.policy = TrainedNetwork(
            *loaded_chunks(recipe, hf_dir), optimizer or learner.optimizer, recipe, learner.optimizer_offload
        )
        architecture = self.policy.family.architecture
        if architecture.experts and not supervised:
            self.policy.replay = Replay(self.policy.chunks, architecture.expert_layers)
        self.policy.replays = recipe.model.moe.routing_replay
        self.critic = Critic(recipe, self.policy.family) if recipe.has_critic and not supervised else None
        self.reference = (
            Reference(recipe, self.policy.family) if recipe.reference.coefficient and not supervised else None
        )
        self.epochs = 1 if supervised else recipe.learner.epochs
        self.step = 0
        self.moments = NOTHING_SEEN
        self.skipped_steps = self.skipped_in_row = self.scaler_skipped_steps = 0
        self.offenders: list[dict[str, Any]] = []

    @property
    def networks(self) -> list[Network]:
        """All on this rank."""
        others = [other.network for other in (self.critic, self.reference) if other is not None]
        return [self.policy, *others]

    @property
    def passes(self) -> list[Callable[[Sequence[TrainSequence]], dict[str, float]]]:
        """Forward and backward of each network that learns."""
        return [self.forward_backward, *([self.critic.forward_backward] if self.critic else [])]

    def sequences(self, batch: Batch) -> list[TrainSequence]:
        """What the loss sees of the batch, with advantages unless a critic is to say. Once a step: running statistics take the
        batch in."""
        found = sequences_in_loss(batch, self.recipe)
        if self.reference and found:
            with self.within("reference"):
                found = self.reference.scored(found)
        found, self.moments = with_advantages(found, batch, self.recipe, self.moments)
        return found

    def train_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train step `self.step` and count it, also when nothing is trained. The same metrics on all ranks."""
        learning = self._learning()
        self.step += 1
        rates = {each.lr_name: each.lr for each in learning}
        if not sequences:
            return rates | {"empty": 1.0, "skipped": 0.0, "tokens_trained": 0.0}
        if self.critic:
            with self.within("values"):
                sequences, self.moments = self.critic.estimated(sequences, self.moments)
        overflows = 0
        for _ in range(self.epochs):
            metrics, broken, overflowed = _epoch(sequences, learning, self.within)
            overflows += bool(overflowed)
            if overflowed:
                scales = ", ".join(f"{e.norm_name} at {metrics[e.scale_name]:g}" for e in overflowed)
                log.info("step %d: an update was skipped, scaled gradients overflowed (%s)", self.step - 1, scales)
            if broken:
                break
        self.scaler_skipped_steps += overflows
        if broken:
            self.skipped_steps += 1
            what = ", ".join(f"{n} {metrics[n]}" for each in broken for n in (each.loss_name, each.norm_name))
            log.warning("step %d skipped: %s", self.step - 1, what)
        self.skipped_in_row = self.skipped_in_row + 1 if broken else 0
        self.offenders = broken[0].network.nonfinite.offenders() if broken else []
        return (
            metrics
            | rates
            | {"empty": 0.0, "skipped": float(bool(broken)), "skipped_steps": float(self.skipped_steps)}
            | self._scaler_row(overflows)
            | advantage_statistics(sequences)
        )

    def _scaler_row(self, overflows: int) -> dict[str, float]:
        """Of a step in which so many updates were skipped for an overflow; nothing if no network has a loss scale."""
        trained = [self.policy, *([self.critic.network] if self.critic else [])]
        if all(network.loss_scale is None for network in trained):
            return {}
        return {"scaler_skipped": float(overflows), "scaler_skipped_steps": float(self.scaler_skipped_steps)}

    def _learning(self) -> list["_Learning"]:
        """Who learns in the next step."""
        found = []
        if self.critic is None or self.step >= self.critic.settings.warmup_steps:
            lr = learning_rate(self.step, self.policy.settings, self.steps)
            found.append(_Learning(self.policy, self.forward_backward, lr, "loss", "grad_norm", "lr", "loss_scale"))
        if self.critic is not None:
            network = self.critic.network
            lr = learning_rate(self.step, network.settings, self.steps)
            names = ("value_loss", "critic_grad_norm", "critic_lr", "critic_loss_scale")
            found.append(_Learning(network, self.critic.forward_backward, lr, *names))
        return found

    def score(self, command: Score, incarnation: str) -> Scored:
        """The command's rollouts as the policy scores them now, by its own choice of experts. The same on all ranks."""
        sequences = [
            unrewarded(i, r.tokens, r.first, None if r.experts is None else r.experts.table)
            for i, r in enumerate(command.rollouts)
        ]
        counts = torch.zeros(2, dtype=torch.int64, device=self.policy.device)
        with self.policy.replay.comparing(counts) if self.policy.replay else nullcontext():
            scores = self.policy.ask(sequences, self.policy.scoring_head(command.against), shape=(2,))
        dist.all_reduce(counts)
        choices, differing = counts.tolist()
        kept = [values[r.first :] for values, r in zip(scores, command.rollouts, strict=True)]
        return Scored(
            incarnation=incarnation,
            version=self.step,
            logprobs=tuple(values[:, 0] for values in kept),
            against=tuple(values[:, 1] for values in kept),
            choices=choices,
            differing=differing,
        )

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Gradients of the policy's loss into its buffers, reduced over ranks; the metrics of that."""
        several = self.recipe.model.context_parallel > 1
        sharers = parallel_state.get_context_parallel_group() if several else None

        def loss(micro: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            logp, entropy = output
            tokens = Tokens(
                logp=logp,
                behaviour=micro.behaviour,
                reference=micro.reference,
                advantage=micro.advantage,
                entropy=entropy,
                counted=micro.counted,
                here=micro.here,
                lengths=micro.lengths,
                group=sharers,
            )
            losses, metrics = self.loss.function(tokens)
            return losses, {"entropy": entropy} | metrics

        names = ("entropy", *self.loss.metrics)
        found = self.policy.forward_backward(sequences, self.policy.lm_head(self.temperature), loss, names)
        return self.loss.finish(found)


@dataclass(frozen=True)
class _Learning:
    """One that learns in a step: its pass over the batch, its learning rate, what its metrics are called."""

    network: TrainedNetwork
    forward_backward: Callable[[Sequence[TrainSequence]], dict[str, float]]
    lr: float
    loss_name: str
    norm_name: str
    lr_name: str
    scale_name: str

    def measured(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Forward and backward: metrics, with the gradient's norm and the scale that the loss had."""
        found = self.forward_backward(sequences)
        found[self.norm_name] = self.network.gradient_norm()
        if self.network.loss_scale is not None:
            found[self.scale_name] = self.network.loss_scale.value
        return found

    def broken(self, metrics: dict[str, float]) -> bool:
        """Whether the loss is not finite, or the gradient is not and no lower loss scale could change that."""
        scale = self.network.loss_scale
        lowest = scale is None or scale.exhausted
        return not math.isfinite(metrics[self.loss_name]) or (lowest and not math.isfinite(metrics[self.norm_name]))


def _epoch(
    sequences: Sequence[TrainSequence], learning: Sequence[_Learning], within: Within
) -> tuple[dict[str, float], list[_Learning], list[_Learning]]:
    """All gradients, then all updates if every loss and gradient is finite. Metrics, those whose are not, and those whose
    gradients were not only because the loss scale was too high.

    Each loss scale judges its own network's gradients, so one may fall while the other counts a pass that fitted. If a network
    is broken, none judges: it would take for an overflow what is none.
    """
    metrics: dict[str, float] = {}
    for each in learning:
        with within("forward_backward"):
            metrics |= each.measured(sequences)
    broken = [e for e in learning if e.broken(metrics)]
    if broken:
        return metrics, broken, []
    overflowed = [e for e in learning if not math.isfinite(metrics[e.norm_name])]
    for each in learning:
        if each.network.loss_scale is not None:
            each.network.loss_scale.judge(each in overflowed)
    if not overflowed:
        with within("optimizer"):
            for each in learning:
                each.network.update(each.lr, metrics[each.norm_name])
    return metrics, broken, overflowed
