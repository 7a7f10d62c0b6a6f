"""Corrections to gpt-oss in SGLang 0.5.23. Its loader accepts experts only as whole
stacks of gigabytes, and zeroes the tensor that it was given if a rank has no part of a
bias. Its sinks are bfloat16, or FP32 for Blackwell's kernels, but they are published in
the model's type.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models import gpt_oss
from torch import Tensor


class GptOssForCausalLM(gpt_oss.GptOssForCausalLM):
    """gpt-oss, loaded from any of its Hugging Face tensors, or from single experts
    under names of their own.
    """

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], *args: Any, **options: Any
    ) -> None:
        """Load Hugging Face tensors, any number a call; the rest is for SGLang."""
        super().load_weights(list(self._others(weights)), *args, **options)

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that SGLang's own loader accepts; load single experts,
        which it does not accept, here.
        """
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            prefix, experts, part = name.partition(".experts.")
            if not (experts and part[0].isdigit()):
                yield name, weight.clone() if name.endswith("_bias") else weight
                continue
            number, kind, ending = part.split(".")
            stack = "w13_weight" if kind == "gate_up_proj" else "w2_weight"
            if ending == "bias":
                stack += "_bias"
            parameter = parameters[f"{prefix}.experts.{stack}"].data[int(number)]
            rank = self.get_submodule(f"{prefix}.experts").moe_tp_rank
            if stack == "w2_weight_bias":  # added once, by the first rank
                parameter.copy_(weight if rank == 0 else torch.zeros_like(weight))
                continue
            dim = 1 if stack == "w2_weight" else 0  # columns of down, rows of gate and up
            size = parameter.shape[dim]
            parameter.copy_(weight.narrow(dim, rank * size, size))


EntryClass = [GptOssForCausalLM]

_build_attention = gpt_oss.GptOssAttention.__init__


def build_attention(self: Any, *args: object, **kwargs: object) -> None:
    """Replace gpt_oss.GptOssAttention.__init__: sinks get the model's precision, and
    remember whether a kernel needs FP32.
    """
    _build_attention(self, *args, **kwargs)
    self.fp32_sinks = self.sinks.dtype == torch.float32
    self.sinks.data = self.sinks.data.to(torch.get_default_dtype())


def attend(self: Any, state: tuple[Any, Any, Any]) -> Tensor:
    """Replace gpt_oss.GptOssAttention.forward_core: sinks are converted for a kernel
    that needs FP32.
    """
    hidden, batch, inner = state
    if inner is None:
        return hidden
    sinks = self.sinks.float() if self.fp32_sinks else self.sinks
    attended = self.attn(
        *inner, sinks=sinks, save_kv_cache=not gpt_oss.enable_fused_set_kv_buffer(batch)
    )
    return self.o_proj(attended)[0]


gpt_oss.GptOssAttention.__init__ = build_attention
gpt_oss.GptOssAttention.forward_core = attend
