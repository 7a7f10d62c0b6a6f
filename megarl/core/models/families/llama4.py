"""Llama 4, the language model: one expert of many by sigmoid and a shared one, attention of two kinds (attention.py).

The chosen expert's score multiplies its input, not its output. Rotation is interleaved. On disk the experts of a layer are
stacked and transposed against Linear's: gate_up_proj [experts, hidden, 2 x inner], down_proj [experts, inner, hidden].
A multimodal directory (Llama4ForConditionalGeneration: the released ones) has the text model's configuration in text_config
and its tensors behind `language_model.`; vision tower and projector are carried along untouched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.core.models import decoder
from megarl.core.models.attention import LayerAttention
from megarl.core.models.family import Family, Source, Weight
from megarl.core.models.rope import inverse_frequencies

VISION = ("vision_model.", "multi_modal_projector.")


def multimodal(config: dict[str, Any], where: Path) -> Family:
    tied = config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", False))
    return llama4(config["text_config"] | {"tie_word_embeddings": tied}, where, "language_model.", VISION)


def llama4(config: dict[str, Any], where: Path, prefix: str = "", elsewhere: tuple[str, ...] = ()) -> Family:
    decoder.refuse_others(config, where, {"hidden_act": "silu", "attention_bias": False, "num_experts_per_tok": 1})
    # intermediate_size is an expert's; that of dense layers is intermediate_size_mlp.
    inner = config["intermediate_size"]
    sizes = decoder.Sizes.read(config | {"intermediate_size": config["intermediate_size_mlp"]}, where)
    experts = config["num_local_experts"]
    step = config.get("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers")
    sparse = set(range(step - 1, sizes.layers, step) if listed is None else listed)
    interval = config.get("no_rope_layer_interval", 4)
    # 1 where there is rotation, in spite of the name.
    rotary = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(sizes.layers)]

    def layer(i: int) -> decoder.Weights:
        hf = f"{prefix}model.layers.{i}."
        mlp = hf + "feed_forward."
        weights = decoder.norms(hf) | decoder.attention(sizes, hf + "self_attn.")
        if i not in sparse:
            return weights | decoder.gated_mlp("mlp.", mlp)
        weights["mlp.router.weight"] = decoder.plain(mlp + "router.weight")
        weights |= decoder.gated_mlp("mlp.shared_experts.", mlp + "shared_expert.")
        for e in range(experts):
            weights |= stacked_expert(f"mlp.experts.local_experts.{e}.", mlp + "experts.", e)
        return weights

    architecture = sizes.architecture() | {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": inner,
        "moe_layer_freq": [int(i in sparse) for i in range(sizes.layers)],
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "rotary_interleaved": True,
        "no_rope_freq": [int(not r) for r in rotary],
    }
    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=architecture,
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=tuple(_attention(config, sizes, bool(rotary[i])) for i in range(sizes.layers)),
        weights=decoder.model_weights(sizes, layer, prefix),
        elsewhere=elsewhere,
    )


def stacked_expert(megatron: str, hf: str, expert: int) -> decoder.Weights:
    """Expert `expert` of the stacks `hf` (…experts.)."""
    gate, up = (Source(hf + "gate_up_proj", expert, (k, 2)) for k in range(2))
    return {
        megatron + "linear_fc1.weight": Weight((gate, up), 1, _merge_gate_up, _unmerge_gate_up),
        megatron + "linear_fc2.weight": Weight((Source(hf + "down_proj", expert),), 0, _merge_down, _unmerge_down),
    }


def _attention(config: dict[str, Any], sizes: decoder.Sizes, rotary: bool) -> LayerAttention:
    if rotary:
        normalised = config.get("use_qk_norm", True)
        return LayerAttention(
            chunk=config.get("attention_chunk_size"), l2_epsilon=sizes.epsilon if normalised else None
        )
    if not config.get("attn_temperature_tuning", True):
        return LayerAttention(rotary=False)
    return LayerAttention(rotary=False, temperature=(config.get("floor_scale", 8192), config.get("attn_scale", 0.1)))


def _merge_gate_up(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two [hidden, inner] -> [2 x inner, hidden]."""
    return torch.cat([view.T for view in views])


def _unmerge_gate_up(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [half.T for half in decoder.halves(tensor)]


def _merge_down(views: Sequence[torch.Tensor]) -> torch.Tensor:
    (view,) = views
    return view.T


def _unmerge_down(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.T]


ARCHITECTURES = {"Llama4ForCausalLM": llama4, "Llama4ForConditionalGeneration": multimodal}
