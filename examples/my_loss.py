"""A loss of your own: REINFORCE that takes right answers as they are, and bounds how
much it learns from wrong ones of older weights. Copy it to where you start megarl.

    megarl train quickstart loss.kind=my_loss:tapered loss.cap=1.0

docs/how-to/add-a-loss.md says what a loss gets and returns.
"""

import torch
from torch import Tensor

from megarl.core.algorithm.losses.terms import Tokens
from megarl.core.recipe import Loss


def tapered(tokens: Tokens, settings: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses [n] with gradient, and metrics [n] without, of n trained tokens."""
    ratio = (tokens.logp.detach() - tokens.behaviour).exp()
    bounded = ratio.clamp(max=settings.cap)
    weight = torch.where(tokens.advantage >= 0, torch.ones_like(ratio), bounded)
    losses = -weight * tokens.advantage * tokens.logp
    return losses, {"tapered_share": (ratio > settings.cap).float()}
