"""KL to a frozen reference, estimated on each sampled token y of the policy's distribution.

    d = log pi(y) - log pi_ref(y)        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html); k3 is GRPO's (arXiv 2402.03300, eq. 4). On
tokens of pi, k1 and k3 are unbiased for KL(pi || pi_ref); k3 is never negative and varies less; k2 is biased and as steady.

A good estimate need not have a good gradient (Liu et al. 2025, arXiv 2510.01555; Shah et al. 2025, arXiv 2512.21852). On tokens
of pi the gradients of the estimates are on average

    in the loss      k1   0: it would only add noise, and the recipe refuses it
                     k2   d KL(pi || pi_ref), what is meant
                     k3   d KL(pi_ref || pi), the other direction: the same to first order in d
    in the reward    k1   d KL(pi || pi_ref), of the whole sequence; k2 and k3 are biased there

Off policy none is exact: the tokens are of the policy that sampled, and in the loss the penalty has no importance weight, as in
GRPO. In the reward it is of that policy itself, by its recorded log-probs, and is weighed as the reward is.
"""

from typing import Literal

import torch
from torch import Tensor

from megarl.core.algorithm.losses.tokens import TokenLoss, Tokens

REFERENCE_METRICS = ("kl_reference", "kl_reference_max")

Estimator = Literal["k1", "k2", "k3"]


def estimate(logp: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Of each token [n], with the gradient of `logp`. exp(-d) - 1 is taken at once: for small d little would be left of it."""
    d = logp - reference
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else torch.expm1(-d) + d


def with_reference_kl(loss: TokenLoss, estimator: Estimator, coefficient: float) -> TokenLoss:
    """`loss` plus `coefficient` times the estimate, for the same tokens with the same weights; 0: it is only watched."""

    def of_tokens(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = loss(tokens)
        # Filler has any log-prob at all, and infinity times its weight of 0 is not 0.
        reference = torch.where(tokens.counted > 0, tokens.reference, tokens.logp.detach())
        kl = estimate(tokens.logp, reference, estimator)
        if coefficient:
            losses = losses + coefficient * kl
        return losses, metrics | dict.fromkeys(REFERENCE_METRICS, kl.detach())

    return of_tokens
