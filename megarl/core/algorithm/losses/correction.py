"""Truncated (TIS) and masked (MIS) importance sampling: a bound on the weight with which a token of another policy learns.

    truncate   rho_t -> min(rho_t, cap)            mask   rho_t -> rho_t [rho_t <= cap]            rho_t = pi(y_t) / mu(y_t)

Truncation: Ionides 2008; between server and learner: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training". Masking: Liu et al. 2025, "When Speed Kills Stability".

There the old policy of the clip is recomputed by the learner and the correction is a second factor. Here the old policy is
what the server recorded, so the ratio of a clip loss already has the mismatch in it: its weight is bounded, not multiplied
once more. In particular truncation bounds what PPO's clip does not, a large ratio of negative advantage. REINFORCE, which
has no ratio, gets it: with `truncate` it is CISPO without a lower bound.
"""

from typing import Literal

from torch import Tensor

from megarl.core.algorithm.losses.tokens import TokenLoss, Tokens

CORRECTION_METRICS = ("corrected_share",)

Correction = Literal["truncate", "mask"]


def corrected(loss: TokenLoss, kind: Correction, cap: float, has_ratio: bool) -> TokenLoss:
    """`loss` with the corrected weight. has_ratio: its gradient holds rho already."""

    def of_tokens(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = loss(tokens)
        ratio = (tokens.logp.detach() - tokens.behaviour).exp()
        left = kept(ratio, kind, cap)
        factor = left if has_ratio else left * ratio
        return losses * factor, metrics | {"corrected_share": (left < 1).float()}

    return of_tokens


def kept(ratio: Tensor, kind: Correction, cap: float) -> Tensor:
    """The part of each ratio [n] that is left, from 0 to 1."""
    return (cap / ratio).clamp(max=1) if kind == "truncate" else (ratio <= cap).to(ratio.dtype)
