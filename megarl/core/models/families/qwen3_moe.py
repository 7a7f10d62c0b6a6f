"""Qwen3-MoE: Qwen3's attention; experts chosen by softmax over all, weights of the chosen normalised (norm_topk_prob) or not.

On disk each expert has its own gate_proj, up_proj and down_proj. Layers may be dense (mlp_only_layers, decoder_sparse_step).
"""

from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.models import decoder
from megarl.core.models.attention import LayerAttention
from megarl.core.models.families import qwen3
from megarl.core.models.family import Family
from megarl.core.models.rope import inverse_frequencies


def qwen3_moe(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, qwen3.ONLY)
    sizes = decoder.Sizes.read(config, where)
    # transformers 5 writes num_local_experts; before, it was num_experts.
    experts = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    chosen, normalised = config["num_experts_per_tok"], config.get("norm_topk_prob", False)
    if chosen == 1 and normalised:
        raise MegarlError(
            f"{where}: norm_topk_prob with num_experts_per_tok=1 is not supported: the router has no effect"
        )
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(sizes.layers)]

    def layer(i: int) -> decoder.Weights:
        hf = f"model.layers.{i}."
        weights = decoder.norms(hf) | qwen3.attention(sizes, hf + "self_attn.")
        if not sparse[i]:
            return weights | decoder.gated_mlp("mlp.", hf + "mlp.")
        weights["mlp.router.weight"] = decoder.plain(hf + "mlp.gate.weight")
        for e in range(experts):
            weights |= decoder.gated_mlp(f"mlp.experts.local_experts.{e}.", f"{hf}mlp.experts.{e}.")
        return weights

    architecture = sizes.architecture() | {
        "qk_layernorm": True,
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_layer_freq": [int(s) for s in sparse],
        "moe_router_topk": chosen,
        # Softmax over the chosen ones is softmax over all, normalised.
        "moe_router_pre_softmax": not normalised,
    }
    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=architecture,
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=(LayerAttention(),) * sizes.layers,
        weights=decoder.model_weights(sizes, layer),
    )


ARCHITECTURES = {"Qwen3MoeForCausalLM": qwen3_moe}
