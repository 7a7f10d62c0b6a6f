"""Llama 3.x, dense: grouped queries, llama3 rope scaling, tied and untied embeddings."""

from pathlib import Path
from typing import Any

from megarl.models import decoder
from megarl.models.family import Family
from megarl.models.layer_attention import LayerAttention
from megarl.models.rope import inverse_frequencies


def llama(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    sizes = decoder.Sizes.read(config, where)

    def layer(i: int) -> decoder.Weights:
        hf = f"model.layers.{i}."
        return decoder.norms(hf) | decoder.attention(sizes, hf + "self_attn.") | decoder.gated_mlp("mlp.", hf + "mlp.")

    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=sizes.architecture(),
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=(LayerAttention(),) * sizes.layers,
        weights=decoder.model_weights(sizes, layer),
    )


ARCHITECTURES = {"LlamaForCausalLM": llama}
