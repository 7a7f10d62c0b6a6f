"""PPO's clipped surrogate, of which GRPO and DAPO are special cases.

    loss_t = -min(rho_t A, clip(rho_t, 1 - low, 1 + high) A)
    rho_t  = pi(y_t) / mu(y_t)

A token whose ratio has left the bounds in the direction that its advantage pulls has no
gradient. PPO (arXiv 1707.06347, eq. 7) and GRPO (arXiv 2402.03300, eq. 3): low = high =
0.2. DAPO (arXiv 2503.14476, eq. 8) raises only the upper bound, so that unlikely tokens
can grow: 0.2 and 0.28; ScaleRL's DAPO baseline has 0.2 and 0.26.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens, with_finite_ratios
from megarl.core.recipe import Loss


def clip(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n] above and, per token [n], whether it was clipped."""
    # With advantage >= 0 a ratio is clipped above; an infinite one would leave NaN.
    tokens = with_finite_ratios(tokens, tokens.advantage >= 0)
    ratio = (tokens.logp - tokens.behaviour).exp()
    losses, clipped = surrogate(ratio, tokens.advantage, settings.clip_low, settings.clip_high)
    return losses, {"clipped_share": clipped}


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the clipped loss [n] for these ratios, and [n]: 1 where clipping removed
    the gradient, else 0.
    """
    free = ratio * advantage
    bounded = ratio.clamp(1 - low, 1 + high) * advantage
    return -torch.minimum(free, bounded), (bounded < free).detach().float()
