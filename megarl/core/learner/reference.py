"""The frozen reference of the KL penalty: a second model on the learner's ranks, asked once a batch, never trained or saved.

    sequences in the loss ──► log-probs of trained tokens ──┬─► in the loss, against the learner's (losses/reference_kl.py)
                                                            └─► in the reward, against the recorded ones (`kl_penalty`)

It is at the policy's layout and precision, without gradients or optimiser, and gives log-probs at the temperature of sampling.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.core import recipe as recipes
from megarl.core.algorithm.batch import TrainSequence
from megarl.core.algorithm.losses.reference_kl import estimate
from megarl.core.learner.network import Network, chunks_beside
from megarl.core.models import Family
from megarl.core.recipe import Recipe


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
