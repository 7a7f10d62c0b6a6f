"""REINFORCE: the policy gradient without an importance weight.

    loss_t = -A log pi(y_t)

Williams 1992. With `batch.centring: leave_one_out` the advantage is that of RLOO (arXiv 2402.14740, eq. 6). Unbiased on
policy only; `loss.correction` weighs tokens of older weights.
"""

from megarl.core.algorithm.losses import ratios
from torch import Tensor

from megarl.core.algorithm.losses import ratios
from megarl.core.algorithm.losses.tokens import Tokens

METRICS = ratios.RATIO_METRICS


def reinforce(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi(y)."""
    return -tokens.advantage * tokens.logp, ratios.ratio_metrics(tokens.logp.detach() - tokens.behaviour)
