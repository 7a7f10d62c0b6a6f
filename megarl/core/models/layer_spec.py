"""Which modules a layer is built of: megatron-core's, with ours where Transformer Engine is missing or does not suffice.

on a GPU with Transformer Engine    its fused norms, its attention of packed rows, experts by grouped GEMM, FP8 (fp8.py)
on one without it, and on a CPU     local_spec.py: our norm, torch's kernels for attention; experts one after the other
"""

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.core.models.family import Family
from megarl.core.models.layer_attention import LayerAttention
from megarl.core.models.local_spec import CausalAttention, RMSNorm
from megarl.core.models.rope import Rope
from megarl.core.models.te_attention import ChunkedTEAttention


def block_spec(
    config: TransformerConfig, family: Family, transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """This rank's layers of chunk `vp_stage`. Transformer Engine's attention leaves rotation to the model, ours does it."""
    spec = get_gpt_decoder_block_spec(config, transformer_engine, normalization="RMSNorm", vp_stage=vp_stage)
    if transformer_engine:
        if set(family.attention) != {LayerAttention()}:
            _set_attention(spec, functools.partial(ChunkedTEAttention, layers=family.attention))
        return spec
    rope = Rope(family.inverse_frequencies, family.architecture.get("rotary_interleaved", False))
    _set_attention(spec, functools.partial(CausalAttention, rope=rope, layers=family.attention))
    spec.layer_norm = RMSNorm
    for layer in (spec.submodules for spec in spec.layer_specs):
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        # Names in checkpoints are Transformer Engine's, which fuses this norm with a projection, but not with experts.
        if layer.mlp.func is MoELayer:
            layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)  # layers share it
        attention = layer.self_attention.submodules
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def _set_attention(spec: TransformerBlockSubmodules, core_attention: Any) -> None:
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = core_attention
