"""Policy losses, one per file. A loss is a pure function of data about each trained
token (`Tokens`) and of `recipe.loss`.

    Tokens ──► cispo.py | clip.py | dppo.py | gmpo.py | gspo.py | reinforce.py | a user's (own.py)
                        └─► terms.py: ratio metrics, correction, sequence mask, entropy bonus, (log rho)^2, KL to a reference
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
from megarl.core.algorithm.losses.own import own
from megarl.core.algorithm.losses.reinforce import reinforce
from megarl.core.algorithm.losses.terms import TokenLoss, Tokens
from megarl.core.recipe import Loss, Reference


def policy_loss(section: Loss, reference: Reference | None = None) -> TokenLoss:
    known: dict[str, terms.PolicyLoss] = {
        "cispo": cispo,
        "clip": clip,
        "dppo": dppo,
        "gmpo": gmpo,
        "gspo": gspo,
        "reinforce": reinforce,
    }
    bare = known.get(section.kind) or own(section)

    def loss(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        masked = (
            None
            if section.sequence_mask is None
            else terms.sequences_outside(tokens, *section.sequence_mask)
        )
        bounded = tokens
        if section.correction != "none" or masked is not None:
            bounded = terms.with_finite_ratios(
                tokens, masked if section.correction == "none" else True
            )
        losses, metrics = bare(bounded, section)
        metrics = terms.ratio_metrics(tokens) | metrics
        if section.correction != "none":
            ratio = bounded.log_ratio.exp()
            kept = terms.kept(ratio, section.correction, section.lower, section.cap)
            # Only REINFORCE needs the ratio as a factor: the other losses contain it
            # already.
            losses = losses * (kept * ratio if section.kind == "reinforce" else kept)
            metrics["corrected_share"] = (kept < 1).float()
        if masked is not None:
            losses = losses.masked_fill(masked, 0.0)
            metrics["sequence_masked_share"] = masked.float()
        if section.log_ratio_penalty:
            losses = losses + section.log_ratio_penalty * (tokens.logp - tokens.behaviour).square()
        if section.entropy_bonus:
            losses = losses - section.entropy_bonus * tokens.entropy
        if reference is not None and reference.coefficient:
            # Filler tokens are left out: their log-prob may be infinite, and a weight
            # of 0 would not remove that.
            known_logp = torch.where(tokens.counted > 0, tokens.reference, tokens.logp.detach())
            kl = terms.estimate(tokens.logp, known_logp, reference.estimator)
            if reference.in_loss:
                losses = losses + reference.coefficient * kl
            metrics |= dict.fromkeys(("kl_reference", "kl_reference_max"), kl.detach())
        return losses, metrics

    return loss
