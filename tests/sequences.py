"""From a batch to the sequences of a step, where no batch and no model has to be known beside it."""

from megarl.batch import TrainSequence, sequences_in_loss, with_advantages
from megarl.recipe import Recipe
from megarl.types import Batch


def training_sequences(batch: Batch, recipe: Recipe) -> list[TrainSequence]:
    """Those in the loss, with their advantages."""
    return with_advantages(sequences_in_loss(batch, recipe), batch, recipe)[0]
