"""Cross-entropy on completion tokens: -log pi(y). What the warm start minimises."""

from torch import Tensor

METRICS = ("token_nll",)


def cross_entropy(logp: Tensor, behaviour: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-logp [n]; behaviour log-probs and advantages play no part."""
    return -logp, {"token_nll": -logp.detach()}
