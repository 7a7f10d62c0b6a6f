"""CISPO: truncated importance sampling REINFORCE.

    loss_t = -sg(clip(rho_t, lower, cap)) * A * log pi(y_t),    rho_t = pi(y_t) / mu(y_t)

mu is the policy that sampled the token, by its log-prob as recorded at sampling (megarl/types.py), so tokens of one rollout
may come from several weight versions. Clipping bounds a token's weight and never its gradient's direction: unlike in PPO, a
clipped token still learns. MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5); ScaleRL (arXiv 2510.13786) with lower = 0.
"""

from collections.abc import Callable

from torch import Tensor

METRICS = ("ratio_mean", "ratio_max", "capped_share", "kl_k3", "trained_logprob_diff", "trained_logprob_diff_max")


def cispo(cap: float, lower: float = 0.0) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]:
    """The loss for these bounds of the ratio. Its k3 = rho - 1 - log rho estimates KL(mu || pi) on tokens of mu
    (http://joschu.net/blog/kl-approx.html)."""

    def loss(logp: Tensor, behaviour: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = logp.detach() - behaviour
        ratio = log_ratio.exp()
        gap = log_ratio.abs()
        metrics = {
            "ratio_mean": ratio,
            "ratio_max": ratio,
            "capped_share": (ratio >= cap).float(),
            "kl_k3": ratio - 1 - log_ratio,
            "trained_logprob_diff": gap,
            "trained_logprob_diff_max": gap,
        }
        return -ratio.clamp(lower, cap) * advantage * logp, metrics

    return loss
