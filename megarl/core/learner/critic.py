"""The critic: a network of its own that learns what reward to expect at each token, and so what each token was worth.

    sequences ──► values of trained tokens (forward only, once a step) ──► algorithm/gae.py ──┬─► advantages: the policy
                                                                                          └─► returns: forward_backward

It has the policy's layout, a precision (critic.dtype) and an optimiser of its own, and no say in what is published.
"""

from megarl.core.algorithm.losses import value
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megarl.core.algorithm import gae
from megarl.core.algorithm.advantages import NOTHING_SEEN, Moments
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.losses import value
from megarl.core.learner.head import trained_positions
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.network import chunks_beside
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.models import Family
from megarl.core.models.value_head import ValueHead
from megarl.core.recipe import Recipe


class Critic:
    """`recipe.critic` on this rank. Every method is collective."""

    def __init__(self, recipe: Recipe, policy: Family) -> None:
        self.settings = recipe.critic
        self.batch = recipe.batch
        recipe = recipe.model_copy(update={"model": recipe.critic_model})
        chunks, family = chunks_beside(policy, recipe, "critic.path", self.settings.path)
        ValueHead.adopt(chunks)
        self.network = TrainedNetwork(chunks, family, self.settings.optimizer, recipe)

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """What is expected before each trained token: [len] float32 a sequence, 0 elsewhere, on all ranks."""
        return self.network.ask(sequences, selected_values)

    def estimated(
        self, sequences: Sequence[TrainSequence], before: Moments = NOTHING_SEEN
    ) -> tuple[list[TrainSequence], Moments]:
        """The sequences with advantages, and with values and returns for `forward_backward`; statistics with this batch's."""
        settings, normalisation = self.settings, self.batch.advantage
        assert normalisation != "group"  # megarl/core/recipe/combinations.py
        values, decay = self.values(sequences), self.batch.running_decay
        return gae.estimated(sequences, values, settings.gamma, settings.lam, normalisation, before, decay)

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Gradients of the value loss into the network's buffers, reduced over ranks; its metrics."""

        def loss(micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return value.value_loss(values, micro.value, micro.value_target, self.settings.value_clip)

        found = self.network.forward_backward(sequences, selected_values, loss, value.VALUE_METRICS)
        kept = ("tokens_trained", "sequences", "microbatches", *value.VALUE_METRICS)
        return {"value_loss": found["loss"]} | {name: found[name] for name in kept} | gae.value_statistics(sequences)


def selected_values(*, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **_: Any) -> Tensor:
    """The value head, as GPTModel's `output_processor`: values [n] float32 before each trained token of a micro-batch."""
    values: Tensor = output_layer(trained_positions(hidden_states, output_layer, context.at, in_parts=False))
    return values
