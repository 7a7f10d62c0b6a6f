"""Helpers: the sequences of a step from a batch, and a trainer's log-probs of
sequences.
"""

from collections.abc import Sequence

import numpy as np

from megarl.core.algorithm.advantages import with_advantages
from megarl.core.algorithm.batch import TrainSequence, sequences_in_loss
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.base.types import Batch
from megarl.core.learner.trainer import Trainer
from megarl.core.recipe import Recipe


def training_sequences(batch: Batch, recipe: Recipe) -> list[TrainSequence]:
    """Those in the loss, with their advantages."""
    return with_advantages(sequences_in_loss(batch, recipe), batch, recipe)[0]


def logprobs(trainer: Trainer, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The policy's log-prob of each token of each sequence but its first. [len - 1]
    float32 each. Collective.
    """
    rollouts = tuple(ScoredRollout(tokens=tokens, first=1) for tokens in sequences)
    return trainer.score(Score(version=trainer.step, rollouts=rollouts, against=0), "test").logprobs
