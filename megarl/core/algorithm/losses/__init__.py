"""Policy losses, one per file. A loss is a pure function of what is known about each trained token.

    Tokens ──► cispo.py | clip.py | gspo.py | reinforce.py ──► terms.py: correction, entropy bonus, KL to a reference
                                               ──► per-token loss [n], metrics [n]

The trainer sums `weight * loss`; the weights (batch.py) do the aggregation, so no loss needs to know about it. terms.py has
what they share: `Tokens`, the importance ratio, and the losses of the critic and the warm start. own.py loads a user's loss.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megarl.core.algorithm.losses import cispo, clip, gspo, reinforce, terms
from megarl.core.algorithm.losses.own import own
from megarl.core.algorithm.losses.terms import TokenLoss, with_entropy_bonus
from megarl.core.recipe import Loss as LossSection
from megarl.core.recipe import Reference


@dataclass(frozen=True)
class Loss:
    """A loss and the names of its metrics, which ranks that do not compute the loss reduce as well.

    finish: turns the reduced metrics into those shown.
    """

    function: TokenLoss
    metrics: tuple[str, ...]
    finish: Callable[[dict[str, float]], dict[str, float]] = terms.with_effective_sample_size


def policy_loss(section: LossSection, reference: Reference | None = None) -> Loss:
    """Build the loss of `recipe.loss` and `recipe.reference`."""
    loss = _LOSSES[section.kind](section) if section.kind in _LOSSES else Loss(*own(section))
    if section.correction != "none":
        has_ratio = section.kind != "reinforce"
        function = terms.corrected(loss.function, section.correction, section.correction_cap, has_ratio)
        loss = replace(loss, function=function, metrics=(*loss.metrics, *terms.CORRECTION_METRICS))
    if section.entropy_bonus:
        loss = replace(loss, function=with_entropy_bonus(loss.function, section.entropy_bonus))
    if reference is not None and reference.coefficient:
        coefficient = reference.coefficient if reference.where == "loss" else 0.0
        function = terms.with_reference_kl(loss.function, reference.estimator, coefficient)
        loss = replace(loss, function=function, metrics=(*loss.metrics, *terms.REFERENCE_METRICS))
    return loss


def supervised_loss() -> Loss:
    """Return cross-entropy, for the warm start."""
    return Loss(terms.cross_entropy, terms.SUPERVISED_METRICS, finish=dict)


_LOSSES: dict[str, Callable[[LossSection], Loss]] = {
    "cispo": lambda s: Loss(cispo.cispo(s.cap), cispo.METRICS),
    "clip": lambda s: Loss(clip.clip(s.clip_low, s.clip_high), clip.METRICS),
    "gspo": lambda s: Loss(gspo.gspo(s.clip_low, s.clip_high), gspo.METRICS),
    "reinforce": lambda _: Loss(reinforce.reinforce, reinforce.METRICS),
}
