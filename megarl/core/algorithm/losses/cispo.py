"""CISPO: truncated importance sampling REINFORCE.

    loss_t = -sg(min(rho_t, cap)) * A * log pi(y_t),    rho_t = pi(y_t) / mu(y_t)

mu is the policy that sampled the token; its log-prob was recorded at sampling
(base/types.py), so tokens of one rollout may come from several weight versions.
Truncation bounds a token's weight but leaves its gradient's direction: unlike in PPO, a
clipped token still learns. MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5); ScaleRL (arXiv
2510.13786).
"""

from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def cispo(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n] above and, per token [n], whether its ratio was capped."""
    ratio = tokens.log_ratio.exp()
    losses = -ratio.clamp(max=settings.cap) * tokens.advantage * tokens.logp
    return losses, {"capped_share": (ratio >= settings.cap).float()}
