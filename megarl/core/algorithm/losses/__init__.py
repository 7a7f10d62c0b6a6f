"""Policy losses, one per file. A loss is a pure function of data about each trained
token (`Tokens`) and of `recipe.loss`.

    Tokens ──► cispo.py | clip.py | dppo.py | gmpo.py | gspo.py | reinforce.py
               | a user's (own.py)
                 └─► terms.py: ratio metrics, correction, sequence mask,
                     entropy bonus, (log rho)^2, KL to a reference
                       └─► losses [n], metrics [n]

The trainer sums `weight * loss`; the weights (batch.py) do the aggregation, so no loss
needs to know about it.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses import terms
from megarl.core.algorithm.losses.cispo import cispo
from megarl.core.algorithm.losses.clip import clip
from megarl.core.algorithm.losses.dppo import dppo
from megarl.core.algorithm.losses.gmpo import gmpo
from megarl.core.algorithm.losses.gspo import gspo
from megarl.core.algorithm.losses.own import load_loss
from megarl.core.algorithm.losses.reinforce import reinforce
from megarl.core.algorithm.losses.terms import PolicyLoss, TokenLoss, Tokens
from megarl.core.recipe import Loss, Reference

LOSSES: dict[str, PolicyLoss] = {
    "cispo": cispo,
    "clip": clip,
    "dppo": dppo,
    "gmpo": gmpo,
    "gspo": gspo,
    "reinforce": reinforce,
}


def policy_loss(section: Loss, reference: Reference | None = None) -> TokenLoss:
    """Return the recipe's loss with its correction, mask and penalties."""
    bare = LOSSES.get(section.kind) or load_loss(section)

    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return each token's loss [n], with the penalties, and metrics [n] by name."""
        losses, metrics = _bounded_loss(bare, tokens, section)
        if section.log_ratio_penalty:
            losses = losses + section.log_ratio_penalty * (tokens.logp - tokens.behaviour).square()
        if section.entropy_bonus:
            losses = losses - section.entropy_bonus * tokens.entropy
        if reference is not None and reference.coefficient:
            kl = _kl_to_reference(tokens, reference.estimator)
            if reference.in_loss:
                losses = losses + reference.coefficient * kl
            metrics["kl_reference"] = kl.detach()
            metrics["kl_reference_max"] = kl.detach()
        return losses, metrics

    return loss


def _bounded_loss(
    bare: PolicyLoss, tokens: Tokens, section: Loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the bare loss with the recipe's correction and sequence mask."""
    masked = None
    if section.sequence_mask is not None:
        masked = terms.sequences_outside(tokens, *section.sequence_mask)
    bounded = tokens
    if section.correction != "none":
        bounded = terms.with_finite_ratios(tokens, True)
    elif masked is not None:
        bounded = terms.with_finite_ratios(tokens, masked)
    losses, own_metrics = bare(bounded, section)
    metrics = terms.ratio_metrics(tokens) | own_metrics
    if section.correction != "none":
        ratio = bounded.log_ratio.exp()
        factor = terms.correction_factor(ratio, section.correction, section.lower, section.cap)
        metrics["corrected_share"] = (factor < 1).float()
        if section.kind == "reinforce":  # the other losses contain the ratio already
            factor = factor * ratio
        losses = losses * factor
    if masked is not None:
        losses = losses.masked_fill(masked, 0.0)
        metrics["sequence_masked_share"] = masked.float()
    return losses, metrics


def _kl_to_reference(tokens: Tokens, estimator: terms.Estimator) -> Tensor:
    """Return the KL [n] with gradient, without filler tokens: their log-prob may be
    infinite, and a weight of 0 would not remove that.
    """
    reference = torch.where(tokens.counted > 0, tokens.reference, tokens.logp.detach())
    return terms.estimate(tokens.logp, reference, estimator)
