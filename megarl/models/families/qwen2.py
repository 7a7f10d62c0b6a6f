"""Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v. DeepSeek-R1-Distill-Qwen is the same architecture."""

from pathlib import Path
from typing import Any

from megarl.models import decoder
from megarl.models.family import Family
from megarl.models.layer_attention import LayerAttention
from megarl.models.rope import inverse_frequencies


def qwen2(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, {"hidden_act": "silu", "use_sliding_window": False})
    sizes = decoder.Sizes.read(config, where)

    def layer(i: int) -> decoder.Weights:
        hf = f"model.layers.{i}."
        projections = decoder.attention(sizes, hf + "self_attn.") | decoder.qkv_biases(sizes, hf + "self_attn.")
        return decoder.norms(hf) | projections | decoder.gated_mlp("mlp.", hf + "mlp.")

    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=sizes.architecture() | {"add_qkv_bias": True},
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=(LayerAttention(),) * sizes.layers,
        weights=decoder.model_weights(sizes, layer),
    )


ARCHITECTURES = {"Qwen2ForCausalLM": qwen2}
