"""Two networks beside the policy, which are not published: the critic and the frozen reference.

The critic: a network of its own that learns what reward to expect at each token, and so what each token was worth.

    sequences ──► values of trained tokens (forward only, once a step) ──► algorithm/gae.py ──┬─► advantages: the policy
                                                                                          └─► returns: forward_backward

It has the policy's layout, a precision (critic.dtype) and an optimiser of its own, and no say in what is published.

The frozen reference of the KL penalty: a second model on the learner's ranks, asked once a batch, never trained or saved.

    sequences in the loss ──► log-probs of trained tokens ──┬─► in the loss, against the learner's (losses/terms.py)
                                                            └─► in the reward, against the recorded ones (`kl_penalty`)

It is at the policy's layout and precision, without gradients or optimiser, and gives log-probs at the temperature of sampling.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.core import recipe as recipes
from megarl.core.algorithm import gae
from megarl.core.algorithm.advantages import NOTHING_SEEN, Moments
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.losses import terms
from megarl.core.algorithm.losses.terms import estimate
from megarl.core.learner.head import trained_positions
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.network import Network, chunks_beside
from megarl.core.learner.trained import TrainedNetwork
from megarl.core.models import Family
from megarl.core.models.value_head import ValueHead
from megarl.core.recipe import Recipe


class Critic:
    """`recipe.critic` on this rank. Every method is collective."""

    def __init__(self, recipe: Recipe, policy: Family) -> None:
        self.settings = recipe.critic
        self.batch = recipe.batch
        optimizer, recipe = recipe.critic_optimizer, recipe.model_copy(update={"model": recipe.critic_model})
        chunks, family = chunks_beside(policy, recipe, "critic.path", self.settings.path)
        ValueHead.adopt(chunks)
        self.network = TrainedNetwork(chunks, family, optimizer, recipe)

    def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """What is expected before each trained token: [len] float32 a sequence, 0 elsewhere, on all ranks."""
        return self.network.ask(sequences, selected_values)

    def estimated(
        self, sequences: Sequence[TrainSequence], before: Moments = NOTHING_SEEN
    ) -> tuple[list[TrainSequence], Moments]:
        """The sequences with advantages, and with values and returns for `forward_backward`; statistics with this batch's."""
        settings, normalisation = self.settings, self.batch.advantage
        assert normalisation != "group"  # megarl/core/recipe/rules.py
        return gae.estimated(sequences, self.values(sequences), settings.gamma, settings.lam, normalisation, before)

    def forward_backward(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        """Gradients of the value loss into the network's buffers, reduced over ranks; its metrics."""

        def loss(micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return terms.value_loss(values, micro.value, micro.value_target, self.settings.value_clip)

        found = self.network.forward_backward(sequences, selected_values, loss, terms.VALUE_METRICS)
        kept = ("tokens_trained", "sequences", "microbatches", *terms.VALUE_METRICS)
        return {"value_loss": found["loss"]} | {name: found[name] for name in kept} | gae.value_statistics(sequences)


def selected_values(*, hidden_states: Tensor, output_layer: ValueHead, context: MicroBatch, **_: Any) -> Tensor:
    """The value head, as GPTModel's `output_processor`: values [n] float32 before each trained token of a micro-batch."""
    values: Tensor = output_layer(trained_positions(hidden_states, output_layer, context.at, in_parts=False))
    return values


class Reference:
    """On this rank. Its weights are those of the Hugging Face directory, also when the run is resumed."""

    def __init__(self, recipe: Recipe, policy: Family) -> None:
        self.settings, self.temperature = recipe.reference, recipe.sampling.temperature
        chunks, family = chunks_beside(policy, recipe, "reference.path", self.settings.path)
        for chunk in chunks:
            chunk.requires_grad_(False)
        self.network = Network(chunks, family, recipe)

    def scored(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """The sequences with `reference_logprobs`, and with `kl_penalty` if it is the reward that pays. COLLECTIVE."""
        logprobs = self.network.ask(sequences, self.network.lm_head(self.temperature), pick=lambda output: output[0])
        in_reward = self.settings.where == "reward"
        return [
            replace(
                s,
                reference_logprobs=reference,
                kl_penalty=kl_penalty(s, reference, self.settings) if in_reward else None,
            )
            for s, reference in zip(sequences, logprobs, strict=True)
        ]


def kl_penalty(sequence: TrainSequence, reference: np.ndarray, settings: recipes.Reference) -> np.ndarray:
    """[len] float32: of each trained token, `coefficient` times the estimate of KL(the policy that sampled it || reference)."""
    behaviour = torch.from_numpy(sequence.behaviour_logprobs)
    kl = estimate(behaviour, torch.from_numpy(reference), settings.estimator).numpy()
    return np.where(sequence.loss_weight > 0, np.float32(settings.coefficient) * kl, np.float32(0))
