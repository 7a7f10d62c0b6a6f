"""Two networks besides the policy that are not published: the critic and the frozen
reference of the KL penalty.

    critic      sequences ──► values of trained tokens, once a step ──► algorithm/gae.py ──┬─► advantages, for the policy
                                                                                           └─► returns, for the critic
    reference   sequences ──► log-probs of trained tokens ──┬─► KL in the loss, to the learner's log-probs (losses/terms.py)
                                                            └─► or in the reward, to the recorded ones (`kl_penalty`)

Both have the policy's layout; the critic has its own precision (critic.dtype) and
optimiser.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from megarl.core.algorithm.advantages import NOTHING_SEEN, Moments
from megarl.core.algorithm.advantages import critic as gae
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.losses.terms import VALUE_METRICS, value_loss
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.network import Network, loaded_chunks, trained_positions
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.models import Family
from megarl.core.models.layers import ValueHead
from megarl.core.recipe import Recipe

VALUE_CLIP = 0.2
"""Distance from its old value beyond which a value learns no more: PPO's usual clip
(arXiv 1707.06347), from epoch two on.
"""


class CriticModel(TrainedNetwork):
    """`recipe.critic` on this rank. Every method is collective."""

    prefix = "critic_"
    loss_name = "value_loss"
    norm_name = "critic_grad_norm"
    metric_names = VALUE_METRICS

    def __init__(self, recipe: Recipe, policy: Family) -> None:
        self.critic = recipe.critic
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
        self, sequences: Sequence[TrainSequence], before: Moments = NOTHING_SEEN
    ) -> tuple[list[TrainSequence], Moments]:
        """As gae.estimated."""
        assert self.normalisation != "group"  # megarl/core/recipe/rules.py
        return gae.estimated(
            sequences, self.values(sequences), self.critic.lam, self.normalisation, before
        )

    def loss(self, micro: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(output, micro.value, micro.value_target, VALUE_CLIP)

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        metrics = super().forward_backward(sequences)
        kept = ("tokens_trained", "sequences", "microbatches", *VALUE_METRICS)
        losses = {"value_loss": metrics["loss"]} | {name: metrics[name] for name in kept}
        return losses | gae.value_statistics(sequences)


def selected_values(
    *, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **_: object
) -> Tensor:
    """Act as GPTModel's `output_processor`: return the value [n] float32 before each
    trained token of a micro-batch.
    """
    return output_layer(trained_positions(hidden_states, output_layer, context.at, in_parts=False))


class ReferenceModel(Network):
    """`recipe.reference` on this rank, always with the weights of model.path, even when
    the run is resumed.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(*loaded_chunks(recipe, Path(recipe.model.path)), recipe)
        self.settings = recipe.reference
        self.temperature = recipe.sampling.temperature
        for chunk in self.chunks:
            chunk.requires_grad_(False)

    def scored(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """Return the sequences with `reference_logprobs`, and with `kl_penalty` if the
        KL is in the reward. COLLECTIVE.
        """
        head = self.lm_head(self.temperature)
        logprobs = self.ask(sequences, lambda **given: head(**given)[0])
        scored = [
            replace(s, reference_logprobs=r) for s, r in zip(sequences, logprobs, strict=True)
        ]
        if self.settings.in_loss:
            return scored
        weight = np.float32(
            self.settings.coefficient
        )  # of k1, which estimates KL(behaviour policy || reference)
        return [
            replace(
                s,
                kl_penalty=np.where(s.trained, weight * (s.behaviour_logprobs - r), np.float32(0)),
            )
            for s, r in zip(scored, logprobs, strict=True)
        ]
