"""Corrections to DeepSeek-V3 in SGLang 0.5.23, and to GLM-4.7-Flash, which has the
same layers in a class of its own; GLM-4.5 needs none.

Everywhere:
    loading     q_a_proj and kv_a_proj_with_mqa are one parameter, which SGLang fills
                only if both come in one call; otherwise it silently changes nothing. It
                copies tensors on the host in other threads, where sync/delta.py has no
                effect
    norms       of compressed q, k and v: SGLang uses rms_norm_eps, transformers (and
                the released models' code) 1e-6
    config      moe_layer_freq, topk_method and scoring_func must be in config.json, and
                GLM-4.7-Flash's first_k_dense_replace; transformers 5 does not write
                them
    derived     from GLM-4.7-Flash's kv_b_proj SGLang computes other tensors, those of
                all layers in every call

Without a GPU also:
    attention   SGLang gives the plain backend work that only the triton backend can do
    rotation    an assertion fails for models without YaRN (Moonlight)
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models import deepseek_v2, glm4_moe_lite
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from torch import Tensor
from torch.nn import Module

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
        mend_narrow_norms(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], is_nextn: bool = False) -> None:
        """Load Hugging Face tensors, any number a call. is_nextn: SGLang's, for the
        layer that drafts tokens.
        """
        super().load_weights(
            others(self, weights) if self.fuse_qkv_a_proj and not is_nextn else weights, is_nextn
        )


class Glm4MoeLiteForCausalLM(glm4_moe_lite.Glm4MoeLiteForCausalLM):
    """GLM-4.7-Flash."""

    _loaded_names: list[str] | None = None  # in the present call of load_weights

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = config.mlp_layer_types.count("dense")
        super().__init__(config, *args, **kwargs)
        mend_narrow_norms(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *args: Any) -> None:
        """Load Hugging Face tensors, any number a call; the rest is for SGLang."""
        names: list[str] = []
        self._loaded_names = names
        try:
            super().load_weights(noted(others(self, weights), names), *args)
        finally:
            self._loaded_names = None

    def post_load_weights(
        self, is_nextn: bool = False, weight_names: Iterable[str] | None = None
    ) -> None:
        """Derive tensors from what load_weights has just loaded; called by itself, from
        all.
        """
        super().post_load_weights(is_nextn, weight_names or self._loaded_names)


def mend_narrow_norms(model: Any) -> None:
    """Give the norms of compressed q, k and v their epsilon."""
    for layer in model.model.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if hasattr(layer, "self_attn") and hasattr(layer.self_attn, name):
                getattr(layer.self_attn, name).variance_epsilon = EPSILON


def others(model: Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copy the projections in NARROW into their rows of the joint parameter; yield all
    other tensors.
    """
    parameters = dict(model.named_parameters())
    for name, weight in weights:
        layer, _, kind = name.rpartition(".self_attn.")
        joint = parameters.get(f"{layer}.self_attn.{JOINT}")
        if joint is None or kind not in NARROW:
            yield name, weight
        else:
            (joint.data[: len(weight)] if kind == NARROW[0] else joint.data[-len(weight) :]).copy_(
                weight
            )


def noted(weights: Iterable[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; append their names to `names`."""
    for name, weight in weights:
        names.append(name)
        yield name, weight


EntryClass = [DeepseekV3ForCausalLM, Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM]
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
