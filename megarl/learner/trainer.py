"""One step of the whole learner world.

    Batch ──► sequences, asked of a reference if there is one
                    ├─► critic, if there is one: values ──► advantages (GAE)
                    └─► epochs: policy and critic: forward, backward ──► all gradients finite? ──► AdamW of each
                                                                           └── no: the step ends, is skipped and counted

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

from megarl.advantages import NOTHING_SEEN
from megarl.batch import TrainSequence, advantage_statistics, sequences_in_loss, unrewarded, with_advantages
from megarl.learner.critic import Critic
from megarl.learner.losses import Loss, policy_loss
from megarl.learner.losses.tokens import Tokens
from megarl.learner.microbatch import MicroBatch
from megarl.learner.network import Network, loaded_chunks
from megarl.learner.optimizer import learning_rate
from megarl.learner.reference import Reference
from megarl.learner.replay import Replay
from megarl.learner.trained import TrainedNetwork
from megarl.messages import Score, Scored
from megarl.recipe import Optimizer, Recipe
from megarl.types import Batch

log = logging.getLogger(__name__)

Within = Callable[[str], AbstractContextManager[Any]]


class Trainer:
    """The policy in training, its critic if there is one, and the step count.

    step: the next to train, and also the version of the weights.
    skipped_in_row: steps up to the latest whose loss or gradient was not finite; offenders: the rollouts of the latest.
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
        self.policy.replay = Replay(self.policy.chunks) if self.policy.family.experts and not supervised else None
        self.policy.replays = recipe.model.moe.routing_replay
        self.critic = Critic(recipe, self.policy.family) if recipe.has_critic and not supervised else None
        self.reference = (
            Reference(recipe, self.policy.family) if recipe.reference.coefficient and not supervised else None
        )
        self.epochs = 1 if supervised else recipe.learner.epochs
        self.step = 0
        self.moments = NOTHING_SEEN
        self.skipped_steps = self.skipped_in_row = 0
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
        for _ in range(self.epochs):
            metrics, broken = _epoch(sequences, learning, self.within)
            if broken:
                break
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
            | advantage_statistics(sequences)
        )

    def _learning(self) -> list["_Learning"]:
        """Who learns in the next step."""
        found = []
        if self.critic is None or self.step >= self.critic.settings.warmup_steps:
            lr = learning_rate(self.step, self.policy.settings, self.steps)
            found.append(_Learning(self.policy, self.forward_backward, lr, "loss", "grad_norm", "lr"))
        if self.critic is not None:
            network = self.critic.network
            lr = learning_rate(self.step, network.settings, self.steps)
            names = ("value_loss", "critic_grad_norm", "critic_lr")
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


def _epoch(
    sequences: Sequence[TrainSequence], learning: Sequence[_Learning], within: Within
) -> tuple[dict[str, float], list[_Learning]]:
    """All gradients, then all updates if every loss and gradient is finite. Metrics, and those whose are not."""
    metrics: dict[str, float] = {}
    for each in learning:
        with within("forward_backward"):
            metrics |= each.forward_backward(sequences)
            metrics[each.norm_name] = each.network.gradient_norm()
    broken = [e for e in learning if not all(math.isfinite(metrics[n]) for n in (e.loss_name, e.norm_name))]
    if not broken:
        with within("optimizer"):
            for each in learning:
                each.network.update(each.lr, metrics[each.norm_name])
    return metrics, broken
