"""Qwen3.5, 3.6 and Qwen3-Next in SGLang 0.5.23.

Everywhere:
    directories released ones are multimodal, and SGLang's class for these loads the
                vision tower. Here its text-only classes load the language model from
                either kind, without vision tower and layers for multi-token prediction
    norms       of delta networks: their weights are FP32, in which released models have
                them, so that none is rounded; SGLang's kernels compute in FP32 anyway

Without a GPU also: these norms, and the gate of the shared expert, are Triton kernels
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.models import qwen2_moe, qwen3_5_text, qwen3_next
from torch import Tensor
from torch.nn import Module, Parameter

OUTER = "model.language_model."
CARRIED = ("model.visual.", "mtp.")
"""Beginnings of the names of tensors that are not served."""


def text_config(config: Any) -> Any:
    """Return the language model's part of a multimodal model's configuration, which
    says outside of it whether embedding and head are one; of a text model its own.
    """
    if not hasattr(config, "text_config"):
        return config
    config.text_config.tie_word_embeddings = config.tie_word_embeddings
    return config.text_config


def use_fp32_norms(model: Module) -> None:
    """Give the norms of delta networks weights in FP32."""
    for name, module in model.named_modules():
        if name.endswith(".linear_attn.norm"):
            module.weight = Parameter(module.weight.data.float(), requires_grad=False)


def language_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the language model's tensors under their names in a text-only directory."""
    for name, weight in weights:
        if not name.startswith(CARRIED):
            yield name.replace(OUTER, "model."), weight


class Qwen3_5ForCausalLM(qwen3_5_text.Qwen3_5ForCausalLM):
    """The dense language model, of either kind of directory."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(text_config(config), *args, **options)
        use_fp32_norms(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load Hugging Face tensors, any number a call."""
        loaded: set[str] = super().load_weights(language_tensors(weights))
        return loaded


class Qwen3_5MoeForCausalLM(qwen3_5_text.Qwen3_5MoeForCausalLM):
    """The language model with experts, of either kind of directory."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(text_config(config), *args, **options)
        use_fp32_norms(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load Hugging Face tensors, any number a call."""
        loaded: set[str] = super().load_weights(language_tensors(weights))
        return loaded

    @classmethod
    def get_model_config_for_expert_location(cls, config: Any) -> Any:
        """Return how many experts there are, and in how many layers."""
        return super().get_model_config_for_expert_location(text_config(config))


class Qwen3NextForCausalLM(qwen3_next.Qwen3NextForCausalLM):
    """Qwen3-Next."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        use_fp32_norms(self)


EntryClass = [Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM]


def add_gated(hidden: Tensor, weight: Tensor, shared: Tensor, output: Tensor) -> None:
    """Replace qwen2_moe.fused_gate_sigmoid_mul_add: add the shared expert's output
    [tokens, hidden], times the sigmoid of hidden · weight, to `output` in place.
    """
    gate = torch.sigmoid(F.linear(hidden.float(), weight.float()[None]))
    output.add_((gate * shared.float()).to(output.dtype))


if not torch.cuda.is_available():
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
    layernorm_gated._use_cpu = True
    fused_norm_gate._use_cpu = True
