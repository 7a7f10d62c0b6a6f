"""How tensors are called: those of a Hugging Face directory, and Megatron's, which are made of them.

Megatron fuses q, k, v into one tensor, ordered by key-value group (q of the group, its k, its v), and gate with up.

Qwen3-MoE    each expert has its own gate_proj, up_proj and down_proj
Llama 4      a layer's experts are stacked and transposed against Linear's: gate_up_proj [experts, hidden, 2 x inner],
             down_proj [experts, inner, hidden]. A multimodal directory (the released ones) has the text model behind
             `language_model.`; vision tower and projector are carried along untouched
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from megarl.core.base import architecture
from megarl.core.base.architecture import Architecture
from megarl.core.models.family import Family, Source, Weight

Weights = dict[str, Weight]
VISION = ("vision_model.", "multi_modal_projector.")


def family_of(hf_dir: Path) -> Family:
    """The family that can read this Hugging Face directory, configured by it."""
    model = architecture.in_directory(hf_dir)
    if model.name == "Llama4ForConditionalGeneration":
        return Family(model, _weights(model, "language_model."), elsewhere=VISION)
    return Family(model, _weights(model))


def _weights(model: Architecture, prefix: str = "") -> Weights:
    """All of the model. prefix: how Hugging Face names begin."""
    weights: Weights = {}
    for i in range(model.layers):
        hf = f"{prefix}model.layers.{i}."
        layer = _norms(hf) | _attention(model, hf + "self_attn.") | _feed_forward(model, hf, i in model.expert_layers)
        weights |= {f"decoder.layers.{i}.{name}": weight for name, weight in layer.items()}
    embedding = Weight((Source(prefix + "model.embed_tokens.weight"),), 0, vocabulary=model.vocabulary)
    head = Weight((Source(prefix + "lm_head.weight"),), 0, vocabulary=model.vocabulary)
    return weights | {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": _plain(prefix + "model.norm.weight"),
        "output_layer.weight": embedding if model.tied else head,
    }


def _plain(name: str, split: int | None = None) -> Weight:
    """The same tensor on both sides."""
    return Weight((Source(name),), split)


def _norms(hf: str) -> Weights:
    """The two norms of layer `hf`."""
    return {
        "input_layernorm.weight": _plain(hf + "input_layernorm.weight"),
        "pre_mlp_layernorm.weight": _plain(hf + "post_attention_layernorm.weight"),
    }


def _attention(model: Architecture, hf: str) -> Weights:
    """Projections of `hf` (…self_attn.), with biases and norms of heads where the model has them."""

    def fused(kind: str) -> Weight:
        sources = tuple(Source(f"{hf}{x}_proj.{kind}") for x in "qkv")
        return Weight(sources, 0, partial(_merge_qkv, model.head_dim), partial(_unmerge_qkv, model))

    weights = {
        "self_attention.linear_qkv.weight": fused("weight"),
        "self_attention.linear_proj.weight": _plain(hf + "o_proj.weight", 1),
    }
    if model.qkv_biases:
        weights["self_attention.linear_qkv.bias"] = fused("bias")
    if model.head_norms:
        weights |= {f"self_attention.{x}_layernorm.weight": _plain(f"{hf}{x}_norm.weight") for x in "qk"}
    return weights


def _feed_forward(model: Architecture, hf: str, experts: bool) -> Weights:
    """The MLP of layer `hf`, or its router and experts."""
    llama4 = model.name.startswith("Llama4")
    hf += "feed_forward." if llama4 else "mlp."
    if not experts:
        return _gated_mlp("mlp.", hf)
    weights = {"mlp.router.weight": _plain(hf + ("router.weight" if llama4 else "gate.weight"))}
    if model.shared_feed_forward:
        weights |= _gated_mlp("mlp.shared_experts.", hf + "shared_expert.")
    for e in range(model.experts):
        megatron = f"mlp.experts.local_experts.{e}."
        weights |= (
            _stacked_expert(megatron, hf + "experts.", e) if llama4 else _gated_mlp(megatron, f"{hf}experts.{e}.")
        )
    return weights


def _gated_mlp(megatron: str, hf: str) -> Weights:
    """gate, up and down of `hf` (…mlp.) as Megatron's MLP `megatron` (mlp., mlp.shared_experts., …)."""
    return {
        megatron + "linear_fc1.weight": Weight(
            (Source(hf + "gate_proj.weight"), Source(hf + "up_proj.weight")), 0, torch.cat, _halves
        ),
        megatron + "linear_fc2.weight": _plain(hf + "down_proj.weight", 1),
    }


def _stacked_expert(megatron: str, hf: str, expert: int) -> Weights:
    """Expert `expert` of the stacks `hf` (…experts.)."""
    gate, up = (Source(hf + "gate_up_proj", expert, (k, 2)) for k in range(2))
    return {
        megatron + "linear_fc1.weight": Weight((gate, up), 1, _merge_gate_up, _unmerge_gate_up),
        megatron + "linear_fc2.weight": Weight((Source(hf + "down_proj", expert),), 0, _merge_down, _unmerge_down),
    }


def _merge_qkv(head_dim: int, views: Sequence[torch.Tensor]) -> torch.Tensor:
    """q [groups * n * head_dim, hidden], k and v [groups * head_dim, hidden] -> [groups * (n + 2) * head_dim, hidden].

    Biases alike, without `hidden`.
    """
    hidden = views[0].shape[1:]
    groups = views[1].shape[0] // head_dim  # of this shard
    return torch.cat([t.reshape(groups, -1, *hidden) for t in views], 1).reshape(-1, *hidden)


def _unmerge_qkv(model: Architecture, tensor: torch.Tensor) -> list[torch.Tensor]:
    hidden = tensor.shape[1:]
    parts = [model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim]
    grouped = tensor.reshape(-1, sum(parts), *hidden)
    return [t.reshape(-1, *hidden) for t in grouped.split(parts, 1)]


def _halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """gate and up."""
    return list(tensor.chunk(2))


def _merge_gate_up(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two [hidden, inner] -> [2 x inner, hidden]."""
    return torch.cat([view.T for view in views])


def _unmerge_gate_up(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [half.T for half in _halves(tensor)]


def _merge_down(views: Sequence[torch.Tensor]) -> torch.Tensor:
    (view,) = views
    return view.T


def _unmerge_down(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.T]
