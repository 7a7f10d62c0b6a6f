"""Entropy bonus, against early determinism: loss_t - coefficient * H(pi(. | y_<t)).

Williams and Peng 1991; PPO (arXiv 1707.06347, eq. 9). The entropy is that of the whole distribution, with its exact gradient
(megarl/core/learner/head/), not an estimate from the sampled token.
"""

from torch import Tensor

from megarl.core.algorithm.losses.tokens import TokenLoss, Tokens


def with_entropy_bonus(loss: TokenLoss, coefficient: float) -> TokenLoss:
    """`loss` with the bonus, for the same tokens with the same weights."""

    def of_tokens(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = loss(tokens)
        return losses - coefficient * tokens.entropy, metrics

    return of_tokens
