"""Corrections to gpt-oss in SGLang 0.5.23: its loader takes experts only as whole stacks, gigabytes each, and writes zeros into
what it was given where a rank has no part in a bias; its sinks are bfloat16 whatever the model is.

../served.py says how the server holds the tensors.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models import gpt_oss
from torch import Tensor


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """gpt-oss, loaded from any of its Hugging Face tensors, or experts by names of their own."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any, **options: Any) -> None:
        super().load_weights(list(self._others(weights)), *args, **options)

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that SGLang's own loader takes; load single experts, which it does not, here."""
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            prefix, experts, part = name.partition(".experts.")
            if not (experts and part[0].isdigit()):
                yield name, weight.clone() if name.endswith("_bias") else weight
                continue
            number, kind, what = part.split(".")
            served = ("w13_weight" if kind == "gate_up_proj" else "w2_weight") + "_bias" * (what == "bias")
            here = parameters[f"{prefix}.experts.{served}"].data[int(number)]
            rank = self.get_submodule(f"{prefix}.experts").moe_tp_rank
            if served == "w2_weight_bias":
                here.copy_(weight if rank == 0 else torch.zeros_like(weight))
            else:  # rows of gate and up, columns of down
                along = int(served == "w2_weight")
                here.copy_(weight.narrow(along, rank * here.shape[along], here.shape[along]))


EntryClass = [GptOssForCausalLM]

_build_attention = gpt_oss.GptOssAttention.__init__


def build_attention(self: Any, *args: object, **kwargs: object) -> None:
    """Replace gpt_oss.GptOssAttention.__init__: sinks have the model's precision, unless a kernel wants FP32."""
    _build_attention(self, *args, **kwargs)
    if self.sinks.dtype == torch.bfloat16:
        self.sinks.data = self.sinks.data.to(torch.get_default_dtype())


gpt_oss.GptOssAttention.__init__ = build_attention
