"""Corrections to DeepSeek-V3 in SGLang 0.5.23; GLM-4.5 needs none.

Everywhere:
    loading     q_a_proj and kv_a_proj_with_mqa are one parameter, which SGLang fills
                only if both come in one call; otherwise it silently changes nothing. It
                copies tensors on the host in other threads, where sync/delta.py has no
                effect
    norms       of compressed q, k and v: SGLang uses rms_norm_eps, transformers (and
                the released models' code) 1e-6
    config      moe_layer_freq, topk_method and scoring_func must be in config.json;
                transformers 5 does not write them

Without a GPU also:
    attention   SGLang gives the plain backend work that only the triton backend can do
    rotation    an assertion fails for models without YaRN (Moonlight)
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from torch import Tensor

NARROW = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
JOINT = "fused_qkv_a_proj_with_mqa.weight"
EPSILON = 1e-6
SETTINGS = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):
    """DeepSeek-V3, DeepSeek-R1, Moonlight, Kimi K2."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in SETTINGS.items():
            if not hasattr(config, name):
                setattr(config, name, value)
        super().__init__(config, *args, **kwargs)
        for layer in self.model.layers:
            for name in ("q_a_layernorm", "kv_a_layernorm"):
                if hasattr(layer, "self_attn") and hasattr(layer.self_attn, name):
                    getattr(layer.self_attn, name).variance_epsilon = EPSILON

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> None:
        """Load Hugging Face tensors, any number a call. is_nextn: SGLang's, for the
        layer that drafts tokens.
        """
        super().load_weights(
            self._others(weights) if self.fuse_qkv_a_proj and not is_nextn else weights, is_nextn
        )

    def _others(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Copy the projections in NARROW into their rows of the joint parameter; yield
        all other tensors.
        """
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            layer, _, kind = name.rpartition(".self_attn.")
            joint = parameters.get(f"{layer}.self_attn.{JOINT}")
            if joint is None or kind not in NARROW:
                yield name, weight
            else:
                (
                    joint.data[: len(weight)] if kind == NARROW[0] else joint.data[-len(weight) :]
                ).copy_(weight)


EntryClass = [DeepseekV3ForCausalLM, Glm4MoeForCausalLM]
deepseek_weight_loader.should_async_load = lambda weight: False

_rope = deepseek_v2.get_rope_wrapper


def rope_without_yarn(
    *args: Any, rope_scaling: Any = None, device: Any = None, **kwargs: Any
) -> Any:
    """Replace deepseek_v2.get_rope_wrapper, which on a CPU supports only YaRN."""
    if rope_scaling is None:
        return get_rope(*args, rope_scaling=None, **kwargs)
    return _rope(*args, rope_scaling=rope_scaling, device=device, **kwargs)


if not torch.cuda.is_available():
    deepseek_v2.get_rope_wrapper = rope_without_yarn
    AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: AttnForwardMethod.MLA
    )
