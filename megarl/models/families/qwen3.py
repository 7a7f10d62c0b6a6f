"""Qwen3, dense: Llama with an RMS norm of each head's q and k before rotation."""

from pathlib import Path
from typing import Any

from megarl.models import decoder
from megarl.models.family import Family
from megarl.models.layer_attention import LayerAttention
from megarl.models.rope import inverse_frequencies

ONLY = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def attention(sizes: decoder.Sizes, hf: str) -> decoder.Weights:
    """Attention and norms of layer `hf`, of the dense and the MoE model alike."""
    return decoder.norms(hf) | decoder.attention(sizes, hf + "self_attn.") | decoder.head_norms(hf + "self_attn.")


def qwen3(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, ONLY)
    sizes = decoder.Sizes.read({"head_dim": 128, **config}, where)  # 128 whatever the number of heads

    def layer(i: int) -> decoder.Weights:
        hf = f"model.layers.{i}."
        return attention(sizes, hf) | decoder.gated_mlp("mlp.", hf + "mlp.")

    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=sizes.architecture() | {"qk_layernorm": True},
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=(LayerAttention(),) * sizes.layers,
        weights=decoder.model_weights(sizes, layer),
    )


ARCHITECTURES = {"Qwen3ForCausalLM": qwen3}
