"""Model families: the names of their tensors, and how Megatron's tensors are made from
Hugging Face ones.

    Megatron  decoder.layers.3.self_attention.linear_qkv.weight   (layers, and experts, counted over the whole model)
       │  family.weight(name)
       ▼
    Weight(sources=(…q_proj, …k_proj, …v_proj), split=0, merge=…, unmerge=…)

A source is a Hugging Face tensor or a view of one: an expert's entry where experts are
stacked, a half where gate and up are fused. `merge` and `unmerge` work on whole views
and equally on one tensor-parallel shard: TP divides each view into equal pieces along
`split`, and merging a rank's pieces gives that rank's Megatron tensor. So a rank reads
and converts only its own part, and one rule serves loading, export and every layout.

Megatron fuses q, k, v into one tensor, ordered by key-value group (q of the group, its
k, its v), and gate with up.

Qwen3-MoE    each expert has its own gate_proj, up_proj and down_proj; so have those of GLM-4.5 and DeepSeek-V3, whose shared
             experts are one MLP. Their layers for multi-token prediction, after the
             last one, are carried along unchanged
DeepSeek-V3  q comes from a narrow q_a_proj, k and v from kv_a_proj_with_mqa; Megatron
calls these down and up projections
Llama 4      a layer's experts are stacked and transposed relative to Linear's: gate_up_proj [experts, hidden, 2 x inner],
             down_proj [experts, inner, hidden]. A multimodal directory (as released)
             has the text model under `language_model.`; vision tower and projector are
             carried along unchanged
gpt-oss      experts stacked and transposed like these, gate and up alternating in gate_up_proj; biases of all linear maps; a
             sink for each head, which Megatron calls softmax_offset
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from megarl.core.base import architecture
from megarl.core.base.architecture import Architecture
from megarl.core.base.hf_tensors import carried_prefixes, text_prefix


@dataclass(frozen=True)
class SourceView:
    """A Hugging Face tensor, or a view of one."""

    name: str
    expert: int | None = None  # index along dimension 0, if experts are stacked
    part: tuple[int, int] | None = (
        None  # (k, n): the k-th of n parts of the last dimension (a fused gate_up_proj)
    )

    @property
    def alone(self) -> str:
        """The name of this view of a stack as a separate, transposed tensor:
        `experts.3.gate_proj.weight`.
        """
        stack, _, name = self.name.rpartition(".")
        name, bias, _ = name.partition("_bias")
        if self.part is not None:
            name = name.removesuffix("_proj").split("_")[self.part[0]] + "_proj"
        return f"{stack}.{self.expert}.{name}.{'bias' if bias else 'weight'}"


@dataclass(frozen=True)
class Weight:
    """How one Megatron tensor corresponds to Hugging Face ones. sources: the views it
    is made from. split: the dimension of each view along which TP (for experts: expert
    TP) divides it; None: every rank has all of it. vocabulary: number of rows without
    the padding for TP; None: no padding. served: the type in which servers store it, if
    not the model's.
    """

    sources: tuple[SourceView, ...]
    split: int | None = None
    merge: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    unmerge: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    vocabulary: int | None = None
    served: torch.dtype | None = None


NamedWeights = dict[str, Weight]


@dataclass(frozen=True)
class Family:
    """One model: its architecture, and how its tensors correspond."""

    architecture: Architecture
    weights: Mapping[str, Weight]  # by Megatron's names in local layer specs
    elsewhere: tuple[
        str, ...
    ] = ()  # prefixes of tensors outside the language model, which are carried along unchanged

    def weight(self, name: str) -> Weight:
        """Return how a Megatron tensor is made. Layers and experts in its name count
        over the model. KeyError if unknown.
        """
        for pattern, local in _TRANSFORMER_ENGINE:
            name = pattern.sub(local, name)
        return self.weights[name]

    def passthrough(self, name: str) -> bool:
        """Return whether this Hugging Face tensor belongs to a part that is not trained
        here, such as a vision tower.
        """
        return name.startswith(self.elsewhere)


# Transformer Engine fuses a norm with the projection after it, and has all experts of a
# rank in one module.
_TRANSFORMER_ENGINE = [
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (
        re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$"),
        r".experts.local_experts.\3.\1.\2",
    ),
]
SERVED_ROUTERS = {"Glm4MoeForCausalLM": torch.float32}
"""The type of routers' weights on a server, by architecture; others have the model's.
"""


def family_of(hf_dir: Path) -> Family:
    model = architecture.in_directory(hf_dir)
    return Family(model, _weights(model, text_prefix(model)), carried_prefixes(model))


def _weights(model: Architecture, prefix: str = "") -> NamedWeights:
    """Return all weights of the model. prefix: begins their Hugging Face names."""
    weights: NamedWeights = {}
    for i in range(model.layers):
        hf = f"{prefix}model.layers.{i}."
        attention = _attention if model.latent is None else _latent_attention
        layer = attention(model, hf + "self_attn.") | _feed_forward(
            model, hf, i in model.expert_layers
        )
        layer["input_layernorm.weight"] = _plain(hf + "input_layernorm.weight")
        layer["pre_mlp_layernorm.weight"] = _plain(hf + "post_attention_layernorm.weight")
        weights |= {f"decoder.layers.{i}.{name}": weight for name, weight in layer.items()}
    embedding = Weight(
        (SourceView(prefix + "model.embed_tokens.weight"),), 0, vocabulary=model.vocabulary
    )
    head = Weight((SourceView(prefix + "lm_head.weight"),), 0, vocabulary=model.vocabulary)
    return weights | {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": _plain(prefix + "model.norm.weight"),
        "output_layer.weight": embedding if model.tied else head,
    }


def _plain(name: str, split: int | None = None) -> Weight:
    """Return a weight that is the same tensor on both sides."""
    return Weight((SourceView(name),), split)


def _turned(
    view: SourceView, split: int | None = None, served: torch.dtype | None = None
) -> Weight:
    """Return a weight that is the transpose of `view`, or `view` itself if it is a
    vector.
    """
    return Weight(
        (view,), split, lambda views: views[0].t(), lambda tensor: [tensor.t()], served=served
    )


def _attention(model: Architecture, hf: str) -> NamedWeights:
    """Return the projections of `hf` (…self_attn.), with biases, sinks and norms of
    heads if the model has them.
    """
    weights = {"self_attention.linear_proj.weight": _plain(hf + "o_proj.weight", 1)}
    for kind in ("weight", "bias") if model.qkv_biases else ("weight",):
        sources = tuple(SourceView(f"{hf}{x}_proj.{kind}") for x in "qkv")
        fused = Weight(
            sources, 0, partial(_merge_qkv, model.head_dim), partial(_unmerge_qkv, model)
        )
        weights[f"self_attention.linear_qkv.{kind}"] = fused
    if model.biases:
        weights["self_attention.linear_proj.bias"] = _plain(hf + "o_proj.bias")
    if model.sinks:
        weights["self_attention.core_attention.softmax_offset"] = _plain(hf + "sinks", 0)
    if model.head_norms:
        weights |= {
            f"self_attention.{x}_layernorm.weight": _plain(f"{hf}{x}_norm.weight") for x in "qk"
        }
    return weights


def _latent_attention(model: Architecture, hf: str) -> NamedWeights:
    """Return the projections and norms of `hf` (…self_attn.) in latent attention, with
    or without compressed q.
    """
    names = {"kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj", "q": "q_proj"}
    norms = {"kv_layernorm": "kv_a_layernorm"}
    if model.latent and model.latent.query is not None:
        del names["q"]
        names |= {"q_down": "q_a_proj", "q_up": "q_b_proj"}
        norms["q_layernorm"] = "q_a_layernorm"
    weights = {
        f"self_attention.linear_{ours}_proj.weight": _plain(f"{hf}{n}.weight", 0)
        for ours, n in names.items()
    }
    weights |= {
        f"self_attention.{ours}.weight": _plain(f"{hf}{name}.weight")
        for ours, name in norms.items()
    }
    return weights | {"self_attention.linear_proj.weight": _plain(hf + "o_proj.weight", 1)}


def _feed_forward(model: Architecture, hf: str, experts: bool) -> NamedWeights:
    if model.biases:
        return _experts_with_biases(model, hf + "mlp.")
    llama4 = model.name.startswith("Llama4")
    balanced = model.router == "balanced"
    hf += "feed_forward." if llama4 else "mlp."
    if not experts:
        return _gated_mlp("mlp.", hf)
    router = SourceView(hf + ("router.weight" if llama4 else "gate.weight"))
    weights = {"mlp.router.weight": Weight((router,), served=SERVED_ROUTERS.get(model.name))}
    if balanced:
        weights["mlp.router.expert_bias"] = _plain(hf + "gate.e_score_correction_bias")
    if model.shared_feed_forward:
        weights |= _gated_mlp(
            "mlp.shared_experts.", hf + ("shared_experts." if balanced else "shared_expert.")
        )
    for e in range(model.experts):
        megatron = f"mlp.experts.local_experts.{e}."
        all_experts = f"{hf}experts."
        one = f"{hf}experts.{e}."
        weights |= (
            _stacked_expert(megatron, all_experts, e) if llama4 else _gated_mlp(megatron, one)
        )
    return weights


def _gated_mlp(megatron: str, hf: str) -> NamedWeights:
    """Return gate, up and down of `hf` (…mlp.) as Megatron's MLP `megatron` (mlp.,
    mlp.shared_experts., …).
    """
    sources = SourceView(hf + "gate_proj.weight"), SourceView(hf + "up_proj.weight")
    return {
        megatron + "linear_fc1.weight": Weight(sources, 0, torch.cat, lambda fused: fused.chunk(2)),
        megatron + "linear_fc2.weight": _plain(hf + "down_proj.weight", 1),
    }


def _stacked_expert(megatron: str, hf: str, expert: int) -> NamedWeights:
    """Return expert `expert` of the stacks `hf` (…experts.), whose entries are
    transposed: [hidden, inner], [inner, hidden].
    """
    gate_up = tuple(SourceView(hf + "gate_up_proj", expert, (k, 2)) for k in range(2))
    return {
        megatron + "linear_fc1.weight": Weight(
            gate_up,
            1,
            lambda views: torch.cat([v.T for v in views]),
            lambda fused: [half.T for half in fused.chunk(2)],
        ),
        megatron + "linear_fc2.weight": _turned(SourceView(hf + "down_proj", expert), 0),
    }


def _experts_with_biases(model: Architecture, hf: str) -> NamedWeights:
    """Return router and experts of `hf` (…mlp.). When transposed, a stack's entry has
    rows of gate and up alternately.
    """
    weights = {f"mlp.router.{kind}": _plain(f"{hf}router.{kind}") for kind in ("weight", "bias")}
    for e in range(model.experts):
        for ending, kind, served in (("", "weight", None), ("_bias", "bias", torch.float32)):
            gate_up, down = (
                SourceView(f"{hf}experts.{name}_proj{ending}", e) for name in ("gate_up", "down")
            )
            megatron = f"mlp.experts.local_experts.{e}.linear_fc"
            weights[f"{megatron}1.{kind}"] = Weight(
                (gate_up,), None, _apart, _in_turn, served=served
            )
            weights[f"{megatron}2.{kind}"] = _turned(down, served=served)
    return weights


def _apart(views: Sequence[Tensor]) -> Tensor:
    """Map [hidden, 2 inner] or [2 inner], gate and up alternating, to [2 inner, …],
    gate before up.
    """
    rows = views[0].t()
    return torch.cat([rows[0::2], rows[1::2]])


def _in_turn(fused: Tensor) -> list[Tensor]:
    return [torch.stack(fused.chunk(2), 1).flatten(0, 1).t()]


def _merge_qkv(head_dim: int, views: Sequence[Tensor]) -> Tensor:
    """Map q [groups * n * head_dim, …], k and v [groups * head_dim, …] to [groups * (n
    + 2) * head_dim, …].
    """
    hidden = views[0].shape[1:]  # empty for a bias
    groups = views[1].shape[0] // head_dim  # of this shard
    return torch.cat([t.reshape(groups, -1, *hidden) for t in views], 1).reshape(-1, *hidden)


def _unmerge_qkv(model: Architecture, tensor: Tensor) -> list[Tensor]:
    hidden = tensor.shape[1:]
    parts = [model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim]
    grouped = tensor.reshape(-1, sum(parts), *hidden)
    return [t.reshape(-1, *hidden) for t in grouped.split(parts, 1)]
