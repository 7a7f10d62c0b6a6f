"""GMPO: one importance ratio for a whole sequence, the geometric mean of its tokens'
clipped ratios.

    w_t = exp(high) if A > 0 and rho_t > exp(high)
          exp(-low) if A < 0 and rho_t < exp(-low)
          rho_t     else
    s_i = exp(mean over t of log w_t)
    loss_t = -sg(s_i) w_t / sg(w_t) A

sg(x) is x without its gradient; low and high bound the log of a ratio. Zhao et al. 2025
(arXiv 2507.20673): the objective of a sequence is s_i A, and a clipped token has no
gradient. GSPO instead bounds s_i. As there, the sum of token losses under
`batch.aggregation: sample` has the value and gradient of the sequence's own loss. The
paper's bounds are wide, low = high = 0.4, because the mean dampens single ratios.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def gmpo(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n], loss_t above, and per token [n] whether it was clipped and
    its sequence's ratio s_i, of which a step reports the largest. COLLECTIVE, as
    `sequence_mean` is.
    """
    log_ratio = tokens.logp - tokens.behaviour
    rises_too_far = (tokens.advantage > 0) & (log_ratio > settings.clip_high)
    falls_too_far = (tokens.advantage < 0) & (log_ratio < -settings.clip_low)
    clipped = rises_too_far | falls_too_far
    # Without gradient, so that a clipped token has none.
    clamped = log_ratio.detach().clamp(-settings.clip_low, settings.clip_high)
    log_weight = torch.where(clipped, clamped, log_ratio)
    sequence_ratio = tokens.sequence_mean(log_weight.detach()).exp()
    factor = (log_weight - log_weight.detach()).exp()  # 1; it only carries the gradient
    losses = -sequence_ratio * factor * tokens.advantage
    return losses, {"clipped_share": clipped.float(), "sequence_ratio_max": sequence_ratio}
