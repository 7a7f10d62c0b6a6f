"""The critic's loss: half the squared error against the return, clipped like PPO's ratio.

    loss_t = 1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)

V_old is what the critic said before the step, so with one epoch a step the clip never acts. It is in the code that came with
PPO (arXiv 1707.06347); Andrychowicz et al. 2020 (arXiv 2006.05990) found that it does not help. The value coefficient 0.5 of
PPO is the 1/2: the critic has parameters and an AdamW of its own, to which another factor means nothing but a gradient clip
at another norm.
"""

import torch
from torch import Tensor

VALUE_METRICS = ("value_clipped_share",)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss [n] and metrics [n] of `values` [n] with gradient; clip: eps, or None for no clip."""
    free = (values - returns).square()
    if clip is None:
        return free / 2, dict.fromkeys(VALUE_METRICS, torch.zeros_like(free.detach()))
    bounded = (torch.clamp(values, old - clip, old + clip) - returns).square()
    return torch.maximum(free, bounded) / 2, {"value_clipped_share": (bounded > free).detach().float()}
