"""GMPO: one importance ratio for a whole sequence, the geometric mean of its tokens'
clipped ratios.

    w_t = exp(high) if A > 0 and rho_t > exp(high)
          exp(-low) if A < 0 and rho_t < exp(-low)
          rho_t     else
    s_i = exp(mean over t of log w_t)
    loss_t = -sg(s_i) w_t / sg(w_t) A

Zhao et al. 2025 (arXiv 2507.20673): the objective of a sequence is s_i A, and a clipped
token has no gradient. GSPO instead bounds s_i. As there, the sum of token losses under
`batch.aggregation: sample` has the value and gradient of the sequence's own loss. The
paper's bounds are wide, low = high = 0.4, because the mean dampens single ratios.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def gmpo(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n] above, and per token [n] whether it was clipped and its
    sequence's ratio. COLLECTIVE, as `sequence_mean` is.
    """
    log_ratio = tokens.logp - tokens.behaviour
    above = log_ratio > settings.clip_high
    below = log_ratio < -settings.clip_low
    clipped = ((tokens.advantage > 0) & above) | ((tokens.advantage < 0) & below)
    bounds = log_ratio.detach().clamp(-settings.clip_low, settings.clip_high)
    bounded = torch.where(clipped, bounds, log_ratio)
    sequence_ratio = tokens.sequence_mean(bounded.detach()).exp()
    factor = (bounded - bounded.detach()).exp()  # 1; it only carries the gradient
    losses = -sequence_ratio * factor * tokens.advantage
    return losses, {"clipped_share": clipped.float(), "sequence_ratio_max": sequence_ratio}
