"""One training step on all ranks of the learner.

    Batch ──► sequences, scored by a reference if there is one
                    ├─► critic, if there is one: values ──► advantages (GAE)
                    └─► epochs: policy and critic: forward, backward ──► all gradients finite? ──► AdamW for each
                                                     │                     └── no: the step ends, and is counted as skipped
                                                     └── an fp16 model's scaled gradient overflowed: no update in this epoch, a
                                                         lower scale for the next
                                                         (optimizer.py); counted
                                                         separately

An epoch trains on the whole batch. The log-probs recorded by the server are the
behaviour policy of every epoch (PPO, arXiv 1707.06347, algorithm 1). A step's metrics
are those of its last epoch, in which the policy is farthest from the one that sampled.
All methods are collective: every rank calls them with the same sequences.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.core.algorithm.advantages import NOTHING_SEEN, with_advantages
from megarl.core.algorithm.batch import (
    TrainSequence,
    advantage_statistics,
    sequences_in_loss,
    unrewarded,
)
from megarl.core.algorithm.losses import policy_loss, terms
from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.base.messages import Score, Scored
from megarl.core.base.types import Batch
from megarl.core.learner.critic_and_reference import CriticModel, ReferenceModel
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.moe import Replay
from megarl.core.learner.network import Network, loaded_chunks
from megarl.core.learner.optimizer import learning_rate
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.recipe import Recipe

log = logging.getLogger(__name__)

MOST_SKIPPED = 3
"""Training fails after this many steps in a row without a finite gradient: one is
chance, three are broken weights or data.
"""


class PolicyModel(TrainedNetwork):
    """The model that is published. supervised: for the warm start (`recipe.sft`):
    cross-entropy and no routing replay.
    """

    def __init__(self, recipe: Recipe, hf_dir: Path, supervised: bool) -> None:
        optimizer = recipe.sft_optimizer if supervised else recipe.learner.optimizer
        # Only where a forward pass may follow an update. In PipelineRL a publication
        # does, which needs all weights at once, so that hooks on all modules would only
        # cost time.
        gathers_late = supervised or recipe.pipeline.phase_steps > 1 or recipe.learner.epochs > 1
        super().__init__(
            *loaded_chunks(recipe, hf_dir),
            optimizer,
            recipe,
            recipe.learner.optimizer_offload,
            gathers_late,
        )
        if self.family.architecture.experts and not supervised:
            self.replay = Replay(self.chunks, self.family.architecture.expert_layers)
        self.replays = recipe.model.moe.routing_replay
        self.head = self.lm_head(1.0 if supervised else recipe.sampling.temperature)
        self._loss = (
            terms.cross_entropy if supervised else policy_loss(recipe.loss, recipe.reference)
        )
        self.metric_names = ("entropy", "surprise", *terms.metric_names(self._loss))
        shared = recipe.model.context_parallel > 1
        self._sharing_sequences = parallel_state.get_context_parallel_group() if shared else None

    def loss(
        self, micro: MicroBatch, output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logp, entropy = output
        here = (
            micro.behaviour,
            micro.reference,
            micro.advantage,
            entropy,
            micro.counted,
            micro.here,
            micro.lengths,
        )
        losses, metrics = self._loss(Tokens(logp, *here, self._sharing_sequences))
        return losses, {"entropy": entropy, "surprise": -logp} | metrics

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        metrics = terms.with_effective_sample_size(super().forward_backward(sequences))
        if self.replay and self.replays and self.expert_load:
            metrics |= self.replay.metrics(self.expert_load.choices)
        return metrics


class Trainer:
    """The policy in training, its critic if there is one, and the step count.

    step: the next step to train, and also the version of the weights. skipped_in_row:
    skipped steps, whose loss or gradient was not finite, in a row up to the latest.
    offenders: the rollouts to blame in the latest step. scaler_skipped_steps: updates
    so far that overflows of scaled gradients prevented. moments: of the undivided
    advantages of all batches so far. within: returns a context for each named part of a
    step, to measure its time. before_update: waits until weights may change.
    """

    within: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __init__(self, recipe: Recipe, hf_dir: Path, supervised: bool = False) -> None:
        """supervised: for the warm start (`recipe.sft`), which trains only the policy,
        in one epoch.
        """
        self.recipe = recipe
        self.steps = recipe.sft.steps if supervised else recipe.run.steps
        self.policy = PolicyModel(recipe, hf_dir, supervised)
        family = self.policy.family
        self.critic = CriticModel(recipe, family) if recipe.has_critic and not supervised else None
        self.reference = (
            ReferenceModel(recipe) if recipe.reference.coefficient and not supervised else None
        )
        self.trained: list[TrainedNetwork] = [self.policy, *([self.critic] if self.critic else [])]
        self.networks: list[Network] = [
            *self.trained,
            *([self.reference] if self.reference else []),
        ]
        self.epochs = 1 if supervised else recipe.learner.epochs
        self.step = 0
        self.moments = NOTHING_SEEN
        self.skipped_steps = self.skipped_in_row = self.scaler_skipped_steps = 0
        self.offenders: list[dict[str, int | str]] = []
        self.before_update: Callable[[], None] = lambda: None

    def sequences(self, batch: Batch) -> list[TrainSequence]:
        """Return the batch's sequences in the loss, with advantages unless a critic
        estimates them. Call it once per step.
        """
        sequences = sequences_in_loss(batch, self.recipe)
        if self.reference and sequences:
            with self.within("reference"):
                sequences = self.reference.scored(sequences)
        sequences, self.moments = with_advantages(sequences, batch, self.recipe, self.moments)
        return sequences

    def train_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train step `self.step` and count it, even if nothing is trained. Return the
        same metrics on all ranks.
        """
        learning = self.trained
        first = self.recipe.critic.warmup_steps if self.critic else 0
        if self.critic and self.step < first:
            learning = [self.critic]  # the policy is not trained yet
        begins = {network: first if network is self.policy else 0 for network in learning}
        rates = {
            f"{network.prefix}lr": learning_rate(
                self.step - begin, network.settings, self.steps - begin
            )
            for network, begin in begins.items()
        }
        self.step += 1
        if not sequences:
            return rates | {"empty": 1.0, "skipped": 0.0, "tokens_trained": 0.0}
        if self.critic:
            with self.within("values"):
                sequences, self.moments = self.critic.estimated(sequences, self.moments)
        overflows = 0
        for _ in range(self.epochs):
            metrics, broken, overflowed = self._epoch(sequences, learning, rates)
            if overflowed:
                overflows += 1
                scales = ", ".join(
                    f"{p.norm_name} at {metrics[f'{p.prefix}loss_scale']:g}" for p in overflowed
                )
                said = "step %d: an update was skipped because scaled gradients overflowed (%s)"
                log.info(said, self.step - 1, scales)
            if broken:
                self.skipped_steps += 1
                what = ", ".join(
                    f"{name} {metrics[name]}" for p in broken for name in (p.loss_name, p.norm_name)
                )
                log.warning("step %d skipped: %s", self.step - 1, what)
                break
        self.skipped_in_row = self.skipped_in_row + 1 if broken else 0
        self.offenders = broken[0].offenders(sequences) if broken else []
        metrics |= rates | {
            "empty": 0.0,
            "skipped": float(bool(broken)),
            "skipped_steps": float(self.skipped_steps),
        }
        self.scaler_skipped_steps += overflows
        if any(network.loss_scale is not None for network in self.trained):
            metrics["scaler_skipped"] = float(overflows)
            metrics["scaler_skipped_steps"] = float(self.scaler_skipped_steps)
        return metrics | advantage_statistics(sequences)

    def _epoch(
        self,
        sequences: Sequence[TrainSequence],
        learning: Sequence[TrainedNetwork],
        rates: dict[str, float],
    ) -> tuple[dict[str, float], list[TrainedNetwork], list[TrainedNetwork]]:
        """Compute all gradients; update all networks if every loss and gradient is
        finite. Return metrics, the networks whose loss or gradient is not finite, and
        those whose gradient overflowed because the loss scale was too high. If a
        network is broken, no loss scale judges, since it would mistake that for an
        overflow.
        """
        metrics: dict[str, float] = {}
        for network in learning:
            with self.within("forward_backward"):
                metrics |= network.forward_backward(sequences) | {
                    network.norm_name: network.gradient_norm()
                }
            if network.loss_scale is not None:
                metrics[f"{network.prefix}loss_scale"] = network.loss_scale.value
        if broken := [network for network in learning if network.broken(metrics)]:
            return metrics, broken, []
        overflowed = [
            network for network in learning if not math.isfinite(metrics[network.norm_name])
        ]
        for network in learning:
            if network.loss_scale is not None:
                network.loss_scale.judge(network in overflowed)
        if not overflowed:
            self.before_update()
            with self.within("optimizer"):
                for network in learning:
                    network.update(rates[f"{network.prefix}lr"], metrics[network.norm_name])
        return metrics, [], overflowed

    def score(self, command: Score, incarnation: str) -> Scored:
        """Score the command's rollouts with the current policy and its own choices of
        experts. All ranks return the same.
        """
        sequences = [
            unrewarded(i, r.tokens, r.first, None if r.experts is None else r.experts.table)
            for i, r in enumerate(command.rollouts)
        ]
        counts = torch.zeros(2, dtype=torch.int64, device=self.policy.device)
        with self.policy.replay.comparing(counts) if self.policy.replay else nullcontext():
            scores = self.policy.ask(
                sequences, self.policy.scoring_head(command.against), shape=(2,)
            )
        dist.all_reduce(counts)
        choices, differing = counts.tolist()
        kept = [values[r.first :] for values, r in zip(scores, command.rollouts, strict=True)]
        logprobs, against = (tuple(values[:, column] for values in kept) for column in (0, 1))
        return Scored(
            incarnation=incarnation,
            version=self.step,
            logprobs=logprobs,
            against=against,
            choices=choices,
            differing=differing,
        )
