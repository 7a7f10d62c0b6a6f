"""DPPO: a trust region in the divergence of a token's distribution, where PPO has one
in the token's ratio.

    loss_t = -M_t rho_t A
    M_t = 0 if A > 0, rho_t > 1, D_t > high
          0 if A < 0, rho_t < 1, D_t > low
          1 else

    tv   D_t = |mu(y_t) - pi(y_t)|
    kl   D_t = mu(y_t) log(mu(y_t) / pi(y_t))
               + (1 - mu(y_t)) log((1 - mu(y_t)) / (1 - pi(y_t)))

D is the divergence between "y_t" and "any other token", a lower bound of that over the
whole vocabulary. A ratio says little about it: if y_t goes from 1e-5 to 1e-3, the
distribution has hardly moved; if from .99 to .8, it has. A token whose gradient pulls
back towards mu is never masked. rho is not bounded here, but by `loss.correction`. Qi
et al. 2026 (arXiv 2602.04879), Binary-TV and Binary-KL; bounds in the authors' recipe:
0.15 for tv, 0.05 for kl.

prime-rl's default loss (`default_loss_fn`, v0.8.1.dev67) is this one with tv, 0.2 and
`loss.log_ratio_penalty` 1e-3.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def dppo(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n] above, and the divergence and mask of each token [n]."""
    mu = tokens.behaviour
    logp = tokens.logp.detach()
    log_ratio = tokens.log_ratio
    if settings.divergence == "tv":
        divergence = (mu.exp() - logp.exp()).abs()
    else:
        divergence = binary_kl(mu, logp)
    rises = (tokens.advantage > 0) & (log_ratio > 0)
    falls = (tokens.advantage < 0) & (log_ratio < 0)
    rises_too_far = rises & (divergence > settings.clip_high)
    falls_too_far = falls & (divergence > settings.clip_low)
    masked = rises_too_far | falls_too_far
    # Masked before the exponential: an infinite ratio would leave NaN in the gradient.
    ratio = (tokens.logp - tokens.behaviour).masked_fill(masked, 0.0).exp()
    losses = -ratio * tokens.advantage * ~masked
    return losses, {
        "clipped_share": masked.float(),
        "divergence_mean": divergence,
        "divergence_max": divergence,
    }


def binary_kl(behaviour: Tensor, logp: Tensor) -> Tensor:
    """Return KL(mu || pi) over {the sampled token, all others}, from log-probs [n].
    expm1 keeps 1 - p precise for p near 1.
    """
    others_behaviour = (-torch.expm1(behaviour)).clamp(min=0)
    others_policy = (-torch.expm1(logp)).clamp(min=torch.finfo(logp.dtype).tiny)
    token_term = behaviour.exp() * (behaviour - logp)
    return token_term + torch.xlogy(others_behaviour, others_behaviour / others_policy)
