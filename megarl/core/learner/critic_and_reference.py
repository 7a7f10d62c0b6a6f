"""Two networks besides the policy that are not published: the critic and the frozen
reference of the KL penalty.

    critic      sequences ──► values of trained tokens, once a step
                                └─► algorithm/advantages/critic.py
                                      ├─► advantages, for the policy
                                      └─► returns, for the critic
    reference   sequences ──► log-probs of trained tokens
                                ├─► KL in the loss, to the learner's log-probs
                                │   (losses/terms.py)
                                └─► or in the reward (`kl_penalty`), to the recorded
                                    ones

Both have the policy's layout; the critic has its own precision (critic.dtype) and
optimiser.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megarl.core.algorithm.advantages import NOTHING_SEEN, Moments, critic
from megarl.core.algorithm.batch import PerToken, TrainSequence
from megarl.core.algorithm.losses.terms import VALUE_METRICS, value_loss
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.network import Network, loaded_chunks, trained_positions
from megarl.core.learner.trained import MetricNames, TrainedNetwork
from megarl.core.models import Family
from megarl.core.models.layers import ValueHead
from megarl.core.recipe import Recipe

VALUE_CLIP = 0.2
"""Distance from its old value beyond which a value learns no more: PPO's usual clip
(arXiv 1707.06347), from epoch two on.
"""


class CriticModel(TrainedNetwork):
    """`recipe.critic` on this rank. Every method is collective."""

    names = MetricNames(
        loss="value_loss", norm="critic_grad_norm", lr="critic_lr", loss_scale="critic_loss_scale"
    )
    metric_names = VALUE_METRICS

    def __init__(self, recipe: Recipe, policy: Family) -> None:
        self.lam = recipe.critic.lam
        self.normalisation = recipe.batch.advantage
        optimizer = recipe.critic_optimizer
        recipe = recipe.model_copy(update={"model": recipe.critic_model})
        chunks, family = loaded_chunks(recipe, Path(recipe.model.path))
        ValueHead.adopt(chunks)
        super().__init__(chunks, family, optimizer, recipe, gathers_late=True)
        self.head = selected_values

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Return the reward expected before each trained token: [len] float32 per
        sequence, 0 elsewhere, on all ranks.
        """
        return self.ask(sequences, selected_values)

    def estimated(
        self, sequences: Sequence[TrainSequence], moments: Moments = NOTHING_SEEN
    ) -> tuple[list[TrainSequence], Moments]:
        """Return the sequences with advantages, values and returns, and the moments of
        all batches, as `advantages.critic.estimated`.
        """
        assert self.normalisation != "group"  # megarl/core/recipe/rules.py
        values = self.values(sequences)
        return critic.estimated(sequences, values, self.lam, self.normalisation, moments)

    def loss(self, micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and metrics [n] from the trained tokens' values [n]."""
        return value_loss(output, micro.value, micro.value_target, VALUE_CLIP)

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Return only metrics of the critic, and what values say of the returns."""
        pass_metrics = super().forward_backward(sequences)
        metrics = {self.names.loss: pass_metrics["loss"]}
        for name in ("tokens_trained", "sequences", "microbatches", *VALUE_METRICS):
            metrics[name] = pass_metrics[name]
        return metrics | critic.value_statistics(sequences)


def selected_values(
    *, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **_: object
) -> Tensor:
    """Act as GPTModel's `output_processor`: return the value [n] float32 before each
    trained token of a micro-batch.
    """
    selected = trained_positions(hidden_states, output_layer, context.positions, in_parts=False)
    return output_layer(selected)


class ReferenceModel(Network):
    """`recipe.reference` on this rank, always with the weights of model.path, even when
    the run is resumed.
    """

    def __init__(self, recipe: Recipe) -> None:
        chunks, family = loaded_chunks(recipe, Path(recipe.model.path))
        super().__init__(chunks, family, recipe)
        self.settings = recipe.reference
        self.temperature = recipe.sampling.temperature
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def scored(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Return the sequences with `reference_logprobs`, and with `kl_penalty` if the
        KL is in the reward. COLLECTIVE.
        """
        head = self.lm_head(self.temperature)

        def only_logprobs(**arguments: Any) -> Tensor:
            """Compute log-probs without the entropies beside them (a Head)."""
            return head(**arguments)[0]

        scored = []
        for sequence, logprobs in zip(sequences, self.ask(sequences, only_logprobs), strict=True):
            penalty: PerToken = 0.0
            if not self.settings.in_loss:
                penalty = self._kl_penalty(sequence, logprobs)
            scored.append(replace(sequence, reference_logprobs=logprobs, kl_penalty=penalty))
        return scored

    def _kl_penalty(self, sequence: TrainSequence, logprobs: np.ndarray) -> np.ndarray:
        """Return the coefficient times k1, which estimates KL(behaviour policy ||
        reference), at trained tokens, 0 elsewhere: [len] float32.
        """
        k1 = sequence.behaviour_logprobs - logprobs
        penalty = np.float32(self.settings.coefficient) * k1
        return np.where(sequence.trained, penalty, np.float32(0))
