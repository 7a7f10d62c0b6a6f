"""REINFORCE: the policy gradient without an importance weight.

    loss_t = -A log pi(y_t)

Williams 1992. With `batch.centring: leave_one_out` the advantage is that of RLOO (arXiv
2402.14740, eq. 6). The loss is unbiased only on policy; `loss.correction` adds an
importance weight to tokens sampled with older weights.
"""

from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def reinforce(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses [n]; there are no metrics."""
    return -tokens.advantage * tokens.logp, {}
