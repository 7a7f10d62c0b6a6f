"""One training step on all ranks of the learner.

    Batch ──► sequences, scored by a reference if there is one
      ├─► critic, if there is one: values ──► advantages (GAE)
      └─► epochs: policy and critic: forward, backward ──► all gradients finite?
            ├── yes: AdamW for each
            ├── no: the step ends, and is counted as skipped
            └── an fp16 model's scaled gradient overflowed: no update in this epoch, a
                lower scale for the next (optimizer.py); counted separately

An epoch trains on the whole batch. The log-probs recorded by the server are the
behaviour policy of every epoch (PPO, arXiv 1707.06347, algorithm 1). A step's metrics
are those of its last epoch, in which the policy is farthest from the one that sampled.
All methods are collective: every rank calls them with the same sequences.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from megarl.core.algorithm.losses.terms import TokenLoss, Tokens
from megarl.core.base.messages import Score, Scored
from megarl.core.base.types import Batch
from megarl.core.learner.critic_and_reference import CriticModel, ReferenceModel
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.moe import Replay
from megarl.core.learner.network import Network, loaded_chunks
from megarl.core.learner.optimizer import learning_rate
from megarl.core.learner.shares import Fetch, with_shares
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
        chunks, family = loaded_chunks(recipe, hf_dir)
        offload = recipe.learner.optimizer_offload
        super().__init__(chunks, family, optimizer, recipe, offload, gathers_late)
        if family.architecture.experts and not supervised:
            self.replay = Replay(chunks, family.architecture.expert_layers)
        self.replays_in_training = recipe.model.moe.routing_replay
        if supervised:
            self.head = self.lm_head(1.0)
            self._loss: TokenLoss = terms.cross_entropy
        else:
            self.head = self.lm_head(recipe.sampling.temperature)
            self._loss = policy_loss(recipe.loss, recipe.reference)
        self.metric_names = ("entropy", "surprise", *terms.metric_names(self._loss))
        self._sharing_sequences = None
        if recipe.model.context_parallel > 1:
            self._sharing_sequences = parallel_state.get_context_parallel_group()

    def loss(
        self, micro: MicroBatch, output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and metrics [n] from the trained tokens' log-probs and
        entropies [n].
        """
        logp, entropy = output
        tokens = Tokens(
            logp=logp,
            behaviour=micro.behaviour,
            reference=micro.reference,
            advantage=micro.advantage,
            entropy=entropy,
            counted=micro.counted,
            local_lengths=micro.local_lengths,
            lengths=micro.lengths,
            group=self._sharing_sequences,
        )
        losses, metrics = self._loss(tokens)
        return losses, {"entropy": entropy, "surprise": -logp} | metrics

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Also return what importance ratios and routing replay say of the pass."""
        metrics = terms.with_effective_sample_size(super().forward_backward(sequences))
        if self.replay and self.replays_in_training and self.expert_load:
            metrics |= self.replay.metrics(self.expert_load.choices)
        return metrics


@dataclass(frozen=True)
class Epoch:
    """What came of one pass over a step's sequences. Networks are updated only if both
    lists are empty.
    """

    metrics: dict[str, float]
    broken: list[TrainedNetwork]  # loss or gradient not finite
    overflowed: list[TrainedNetwork]  # the gradient, because the loss scale was too high


class Trainer:
    """The policy in training, its critic if there is one, and the step count.

    step: the next step to train, and also the version of the weights. skipped_in_row:
    skipped steps, whose loss or gradient was not finite, in a row up to the latest.
    offenders: the rollouts to blame in the latest step. scaler_skipped_steps: updates
    so far that overflows of scaled gradients prevented. moments: of the undivided
    advantages of all batches so far. before_update: waits until weights may change.
    """

    def __init__(
        self,
        recipe: Recipe,
        hf_dir: Path,
        supervised: bool = False,
        within: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """supervised: for the warm start (`recipe.sft`), which trains only the policy,
        in one epoch. within: returns a context for each named part of a step, to
        measure its time.
        """
        self.recipe = recipe
        self.within = within
        self.steps = recipe.sft.steps if supervised else recipe.run.steps
        self.epochs = 1 if supervised else recipe.learner.epochs
        self.policy = PolicyModel(recipe, hf_dir, supervised)
        self.critic: CriticModel | None = None
        self.reference: ReferenceModel | None = None
        self.trained: list[TrainedNetwork] = [self.policy]
        if recipe.has_critic and not supervised:
            self.critic = CriticModel(recipe, self.policy.family)
            self.trained.append(self.critic)
        self.networks: list[Network] = [*self.trained]
        if recipe.reference.coefficient and not supervised:
            self.reference = ReferenceModel(recipe)
            self.networks.append(self.reference)
        self.step = 0
        self.moments = NOTHING_SEEN
        self.skipped_steps = 0
        self.skipped_in_row = 0
        self.scaler_skipped_steps = 0
        self.offenders: list[dict[str, int | str]] = []
        self.before_update: Callable[[], None] = lambda: None

    def in_loss(self, batch: Batch, fetch: Fetch) -> list[TrainSequence]:
        """Return the batch's sequences in the loss, with this rank's share of the
        recorded experts of which the batch has outlines. Raises Withheld.
        """
        sequences = sequences_in_loss(batch, self.recipe)
        if not self.policy.replay or not self.policy.replays_in_training:
            return sequences
        members = self.policy.plan(sequences).members
        return with_shares(sequences, batch, members, self.policy.experts_cut, fetch)

    def sequences(self, batch: Batch) -> list[TrainSequence]:
        """Return the sequences of a batch that has its experts, as `completed`."""
        return self.completed(sequences_in_loss(batch, self.recipe), batch)

    def completed(self, sequences: list[TrainSequence], batch: Batch) -> list[TrainSequence]:
        """Return the batch's sequences in the loss, with advantages unless a critic
        estimates them. Call it once per step, as the batch then counts in `moments`.
        """
        if self.reference and sequences:
            with self.within("reference"):
                sequences = self.reference.scored(sequences)
        sequences, self.moments = with_advantages(sequences, batch, self.recipe, self.moments)
        return sequences

    def train_step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Train step `self.step` and count it, even if nothing is trained. Return the
        same metrics on all ranks.
        """
        rates = self._learning_rates()
        named_rates = {network.names.lr: rate for network, rate in rates.items()}
        step = self.step
        self.step += 1
        if not sequences:
            return named_rates | {"empty": 1.0, "skipped": 0.0, "tokens_trained": 0.0}
        if self.critic:
            with self.within("values"):
                sequences, self.moments = self.critic.estimated(sequences, self.moments)
        overflows = 0
        for _ in range(self.epochs):
            epoch = self._epoch(sequences, rates)
            if epoch.overflowed:
                overflows += 1
                _log_overflow(step, epoch)
            if epoch.broken:
                _log_skipped(step, epoch)
                break
        self._count(epoch, overflows)
        self.offenders = epoch.broken[0].offenders(sequences) if epoch.broken else []
        metrics = epoch.metrics | named_rates
        metrics["empty"] = 0.0
        metrics["skipped"] = float(bool(epoch.broken))
        metrics["skipped_steps"] = float(self.skipped_steps)
        if any(network.loss_scale is not None for network in self.trained):
            metrics["scaler_skipped"] = float(overflows)
            metrics["scaler_skipped_steps"] = float(self.scaler_skipped_steps)
        return metrics | advantage_statistics(sequences)

    def _learning_rates(self) -> dict[TrainedNetwork, float]:
        """Return the rate of each network that step `self.step` trains. A policy waits
        for its critic's warm-up.
        """
        warmup = self.recipe.critic.warmup_steps if self.critic else 0
        rates: dict[TrainedNetwork, float] = {}
        for network in self.trained:
            first_step = warmup if network is self.policy else 0
            if self.step >= first_step:
                rates[network] = learning_rate(
                    self.step - first_step, network.settings, self.steps - first_step
                )
        return rates

    def _count(self, epoch: Epoch, overflows: int) -> None:
        """Count a step by its last epoch."""
        self.scaler_skipped_steps += overflows
        if epoch.broken:
            self.skipped_steps += 1
            self.skipped_in_row += 1
        else:
            self.skipped_in_row = 0

    def _epoch(
        self, sequences: Sequence[TrainSequence], rates: dict[TrainedNetwork, float]
    ) -> Epoch:
        """Compute the gradients of all networks in `rates`; update them if every loss
        and gradient is finite. If a network is broken, no loss scale judges, since it
        would mistake that for an overflow.
        """
        metrics: dict[str, float] = {}
        for network in rates:
            with self.within("forward_backward"):
                metrics |= network.forward_backward(sequences)
                metrics[network.names.norm] = network.gradient_norm()
            if network.loss_scale is not None:
                metrics[network.names.loss_scale] = network.loss_scale.value
        broken = [network for network in rates if network.broken(metrics)]
        if broken:
            return Epoch(metrics, broken, overflowed=[])
        overflowed = [
            network for network in rates if not math.isfinite(metrics[network.names.norm])
        ]
        for network in rates:
            if network.loss_scale is not None:
                network.loss_scale.judge(network in overflowed)
        if not overflowed:
            self.before_update()
            with self.within("optimizer"):
                for network, rate in rates.items():
                    network.update(rate, metrics[network.names.norm])
        return Epoch(metrics, broken=[], overflowed=overflowed)

    def score(self, command: Score, incarnation: str) -> Scored:
        """Score the command's rollouts with the current policy and its own choices of
        experts. All ranks return the same.
        """
        sequences = []
        for i, rollout in enumerate(command.rollouts):
            experts = None if rollout.experts is None else rollout.experts.table
            sequences.append(unrewarded(i, rollout.tokens, rollout.first, experts))
        policy = self.policy
        counts = torch.zeros(2, dtype=torch.int64, device=policy.device)
        with policy.replay.comparing(counts) if policy.replay else nullcontext():
            scores = policy.ask(sequences, policy.scoring_head(command.against), shape=(2,))
        dist.all_reduce(counts)
        choices, differing = counts.tolist()
        logprobs = []
        against = []
        for rollout, values in zip(command.rollouts, scores, strict=True):
            logprobs.append(values[rollout.first :, 0])
            against.append(values[rollout.first :, 1])
        return Scored(
            incarnation=incarnation,
            version=self.step,
            logprobs=tuple(logprobs),
            against=tuple(against),
            choices=choices,
            differing=differing,
        )


def _log_overflow(step: int, epoch: Epoch) -> None:
    """Log which networks' gradients overflowed, and at which loss scales."""
    scales = []
    for network in epoch.overflowed:
        scales.append(f"{network.names.norm} at {epoch.metrics[network.names.loss_scale]:g}")
    text = "step %d: an update was skipped because scaled gradients overflowed (%s)"
    log.info(text, step, ", ".join(scales))


def _log_skipped(step: int, epoch: Epoch) -> None:
    """Log the losses and gradient norms for which a step is skipped."""
    values = []
    for network in epoch.broken:
        for name in (network.names.loss, network.names.norm):
            values.append(f"{name} {epoch.metrics[name]}")
    log.warning("step %d skipped: %s", step, ", ".join(values))
