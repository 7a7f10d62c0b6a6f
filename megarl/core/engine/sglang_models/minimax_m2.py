"""Corrections to MiniMax-M2 in SGLang 0.5.23.

Everywhere: what config.json must say, and transformers 5 does not write. Without it
SGLang has no norms of q and k and no routers' biases, and rotates whole heads.

Without a GPU also: SGLang has the norms of q and k only as Triton kernels.
"""

from typing import Any

import torch
from sglang.srt.models import minimax_m2
from torch import Tensor

SETTINGS = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
}


class MiniMaxM2ForCausalLM(minimax_m2.MiniMaxM2ForCausalLM):
    """MiniMax-M2."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        for name, value in (SETTINGS | {"rotary_dim": int(config.head_dim * share)}).items():
            if not hasattr(config, name):
                setattr(config, name, value)
        super().__init__(config, *args, **kwargs)


EntryClass = [MiniMaxM2ForCausalLM]


def normalise(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Replace minimax_m2.MiniMaxM2QKRMSNorm._forward_naive by the two norms' own."""
    return self._q_norm(q), self._k_norm(k)


if not torch.cuda.is_available():
    minimax_m2.MiniMaxM2QKRMSNorm._forward_naive = normalise
