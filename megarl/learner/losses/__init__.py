"""Policy losses, one a file. A loss is a pure function of what is known of each trained token.

    Tokens(logp, behaviour, advantage) ──► per-token loss [n], per-token metrics [n]

The trainer sums `weight * loss`; the weights (megarl/batch.py) are the aggregation, so no loss knows about it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megarl.learner.losses import cispo, cross_entropy
from megarl.recipe import Loss as LossSection

TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(logp, behaviour log-prob, advantage), each float32 [n] -> loss [n] with gradient, metrics [n] without.

Names that end in `_max` are reduced by maximum, all others by the mean over trained tokens."""


@dataclass(frozen=True)
class Loss:
    """A loss and the names of its metrics: ranks that do not compute it reduce them all the same."""

    function: TokenLoss
    metrics: tuple[str, ...]


def policy_loss(section: LossSection) -> Loss:
    """The loss of `recipe.loss`."""
    return _LOSSES[section.kind](section)


def supervised_loss() -> Loss:
    """Cross-entropy, for the warm start."""
    return Loss(cross_entropy.cross_entropy, cross_entropy.METRICS)


_LOSSES: dict[str, Callable[[LossSection], Loss]] = {
    "cispo": lambda s: Loss(cispo.cispo(s.cap, s.lower), cispo.METRICS),
}
