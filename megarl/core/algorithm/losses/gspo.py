"""GSPO: PPO's clip with one importance ratio for a whole sequence, the geometric mean
of its tokens' ratios.

    s_i = (pi(y_i) / mu(y_i))^(1 / |y_i|) = exp(mean over t of log rho_t)
    s_t = sg(s_i) pi(y_t) / sg(pi(y_t))
    loss_t = -min(s_t A, clip(s_t, 1 - low, 1 + high) A)

sg(x) is x without its gradient. arXiv 2507.18071: s_i in eq. 7; s_t, equal in value,
in eq. 14. As all tokens of a sequence have the same advantage and weight, the sum of
the token losses has the value and gradient of the sequence's own loss (eq. 5), and
ranks that share a sequence exchange only numbers without gradient. The bounds apply to
a mean, so they are small: 3e-4 and 4e-4 in the paper.
"""

from torch import Tensor

from megarl.core.algorithm.losses.clip import surrogate
from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def gspo(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses [n] above, and per token [n] whether it was clipped and its
    sequence's ratio. COLLECTIVE, as `sequence_mean` is.
    """
    sequence_ratio = tokens.sequence_mean(tokens.log_ratio).exp()
    # equal in value, with the gradient of the token's own log-prob
    ratio = sequence_ratio * (tokens.logp - tokens.logp.detach()).exp()
    losses, clipped = surrogate(ratio, tokens.advantage, settings.clip_low, settings.clip_high)
    return losses, {"clipped_share": clipped, "sequence_ratio_max": sequence_ratio}
