"""Cross-entropy on completion tokens: -log pi(y). What the warm start minimises."""

from torch import Tensor

from megarl.core.algorithm.losses.tokens import Tokens

SUPERVISED_METRICS = ("token_nll",)


def cross_entropy(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
    """-logp [n]; behaviour log-probs and advantages play no part."""
    return -tokens.logp, {"token_nll": -tokens.logp.detach()}
