"""Model families: the names of their tensors, and how Megatron's tensors are made from
Hugging Face ones.

    Megatron  decoder.layers.3.self_attention.linear_qkv.weight
       │      (layers, and experts, counted over the whole model)
       │  family.weight(name)
       ▼
    Weight(sources=(…q_proj, …k_proj, …v_proj), split=0, merge=…, unmerge=…)

A source is a Hugging Face tensor or a view of one: an expert's entry where experts are
stacked, a half where gate and up are fused, a range of rows. `merge` and `unmerge` work
on whole views and equally on one tensor-parallel shard: TP divides each view into equal
pieces along `split`, and merging a rank's pieces gives that rank's Megatron tensor. So
a rank reads and converts only its own part, and one rule serves loading, export and
every layout.

Megatron fuses q, k, v into one tensor, ordered by key-value group (q of the group, its
k, its v), and gate with up.

Qwen3-MoE    each expert has its own gate_proj, up_proj and down_proj; so have those of
             GLM-4.5 and DeepSeek-V3, whose shared experts are one MLP. Their layers for
             multi-token prediction, after the last one, are carried along unchanged
DeepSeek-V3  q comes from a narrow q_a_proj, k and v from kv_a_proj_with_mqa; Megatron
             calls these down and up projections
Llama 4      a layer's experts are stacked and transposed relative to Linear's:
             gate_up_proj [experts, hidden, 2 x inner], down_proj [experts, inner,
             hidden]. A multimodal directory (as released) has the text model under
             `language_model.`; vision tower and projector are carried along unchanged
Qwen3.5      gated delta networks in most layers: rows of one key head after the other
             (`_delta_network`). q_proj has a gate beside each head. Experts as in
             Qwen3-MoE, taken apart by base/hf_tensors.py where they are stacked;
             vision tower and layers for multi-token prediction are carried along.
             Qwen3-Next is the same with rows in another order
gpt-oss      experts stacked and transposed like these, gate and up alternating in
             gate_up_proj; biases of all linear maps; a sink for each head, which
             Megatron calls softmax_offset
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from megarl.core.base import architecture
from megarl.core.base.architecture import Architecture
from megarl.core.base.delta_layers import DeltaLayers
from megarl.core.base.hf_tensors import carried_prefixes, decoder_prefix, head_name


@dataclass(frozen=True)
class SourceView:
    """A Hugging Face tensor, or a view of one."""

    name: str
    expert: int | None = None  # index along dimension 0, if experts are stacked
    # (k, n): the k-th of n parts of the last dimension (a fused gate_up_proj)
    part: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None  # the first of these rows, and the one after the last

    @property
    def separate_name(self) -> str:
        """The name of this view of a stack as a separate, transposed tensor:
        `experts.3.gate_proj.weight`.
        """
        stack, _, name = self.name.rpartition(".")
        kind = "bias" if name.endswith("_bias") else "weight"
        projection = name.removesuffix("_bias")
        if self.part is not None:
            k, _ = self.part
            projection = projection.removesuffix("_proj").split("_")[k] + "_proj"
        return f"{stack}.{self.expert}.{projection}.{kind}"


@dataclass(frozen=True)
class Weight:
    """How one Megatron tensor corresponds to Hugging Face ones. sources: the views it
    is made from. split: the dimension of each view along which TP (for experts: expert
    TP) divides it; None: every rank has all of it. vocabulary: number of rows without
    the padding for TP; None: no padding. served_dtype: the type in which servers store
    it, if not the model's.
    """

    sources: tuple[SourceView, ...]
    split: int | None = None
    merge: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    unmerge: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    vocabulary: int | None = None
    served_dtype: torch.dtype | None = None


def joined_rows(
    views: Iterable[tuple[SourceView, Tensor]],
) -> Iterator[tuple[SourceView, Tensor]]:
    """Yield a weight's sources with their values, after neighbours that are rows of one
    tensor have been put together. All rows of a tensor are in one weight.
    """
    for (name, has_rows), group in groupby(views, _tensor_of):
        if has_rows:
            yield SourceView(name), torch.cat([view for _, view in group])
        else:
            yield from group


def _tensor_of(view: tuple[SourceView, Tensor]) -> tuple[str, bool]:
    """Return the name of a view's tensor, and whether the view is some of its rows."""
    source, _ = view
    return source.name, source.rows is not None


NamedWeights = dict[str, Weight]


@dataclass(frozen=True)
class Family:
    """One model: its architecture, and how its tensors correspond."""

    architecture: Architecture
    weights: Mapping[str, Weight]  # by Megatron's names in local layer specs
    # Prefixes of tensors outside the language model, which are carried along unchanged.
    elsewhere: tuple[str, ...] = ()

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
    """Return the family of the model in a Hugging Face directory."""
    model = architecture.in_directory(hf_dir)
    return Family(model, _weights(model), carried_prefixes(model))


def _weights(model: Architecture) -> NamedWeights:
    """Return all weights of the model."""
    weights: NamedWeights = {}
    prefix = decoder_prefix(model)
    for i in range(model.layers):
        layer = _layer(model, f"{prefix}layers.{i}.", i)
        weights |= {f"decoder.layers.{i}.{name}": weight for name, weight in layer.items()}
    embedding = _by_vocabulary(model, prefix + "embed_tokens.weight")
    head = embedding if model.tied else _by_vocabulary(model, head_name(model))
    return weights | {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": _plain(prefix + "norm.weight"),
        "output_layer.weight": head,
    }


def _layer(model: Architecture, hf: str, number: int) -> NamedWeights:
    """Return the weights of layer `hf` (…layers.3.) with this number."""
    if model.delta and number in model.delta.layers:
        mixer = _delta_network(model, model.delta, hf + "linear_attn.")
    elif model.latent is None:
        mixer = _attention(model, hf + "self_attn.")
    else:
        mixer = _latent_attention(model, hf + "self_attn.")
    weights = mixer | _feed_forward(model, hf, number in model.expert_layers)
    weights["input_layernorm.weight"] = _plain(hf + "input_layernorm.weight")
    weights["pre_mlp_layernorm.weight"] = _plain(hf + "post_attention_layernorm.weight")
    return weights


def _by_vocabulary(model: Architecture, name: str) -> Weight:
    """Return a weight with a row for each token, which TP divides."""
    return Weight((SourceView(name),), 0, vocabulary=model.vocabulary)


def _plain(name: str, split: int | None = None) -> Weight:
    """Return a weight that is the same tensor on both sides."""
    return Weight((SourceView(name),), split)


def _transposed(
    view: SourceView, split: int | None = None, served_dtype: torch.dtype | None = None
) -> Weight:
    """Return a weight that is the transpose of `view`, or `view` itself if it is a
    vector.
    """
    return Weight((view,), split, _transpose_first, _transposes, served_dtype=served_dtype)


def _transpose_first(views: Sequence[Tensor]) -> Tensor:
    return views[0].t()


def _transposes(*tensors: Tensor) -> list[Tensor]:
    return [tensor.t() for tensor in tensors]


def _attention(model: Architecture, hf: str) -> NamedWeights:
    """Return the projections of `hf` (…self_attn.), with biases, sinks and norms of
    heads if the model has them.
    """
    weights = {"self_attention.linear_proj.weight": _plain(hf + "o_proj.weight", 1)}
    merge: Callable[[Sequence[Tensor]], Tensor] = partial(_merge_qkv, model.head_dim)
    unmerge: Callable[[Tensor], Sequence[Tensor]] = partial(_unmerge_qkv, model)
    if model.gated_attention:
        merge = partial(_merge_gated_qkv, model)
        unmerge = partial(_unmerge_gated_qkv, model)
    kinds = ("weight", "bias") if model.qkv_biases else ("weight",)
    for kind in kinds:
        sources = tuple(SourceView(f"{hf}{x}_proj.{kind}") for x in "qkv")
        weights[f"self_attention.linear_qkv.{kind}"] = Weight(sources, 0, merge, unmerge)
    if model.biases:
        weights["self_attention.linear_proj.bias"] = _plain(hf + "o_proj.bias")
    if model.sinks:
        weights["self_attention.core_attention.softmax_offset"] = _plain(hf + "sinks", 0)
    if model.head_norms:
        for x in "qk":
            weights[f"self_attention.{x}_layernorm.weight"] = _plain(f"{hf}{x}_norm.weight")
    return weights


def _delta_network(model: Architecture, delta: DeltaLayers, hf: str) -> NamedWeights:
    """Return the weights of `hf` (…linear_attn.). Megatron's tensors have what belongs
    to one key head after the other: its q and k, then v, gate, b and a of the value
    heads that it serves.
    """
    parts = [delta.key_dim, delta.key_dim, delta.grouped * delta.value_dim]
    inputs = [*parts, delta.grouped * delta.value_dim, delta.grouped, delta.grouped]
    bounds = [0, delta.key, 2 * delta.key, delta.convolved]
    ranges = list(pairwise(bounds))
    if model.name == "Qwen3NextForCausalLM":  # rows are in this order already
        sources = [SourceView(f"{hf}in_proj_{name}.weight") for name in ("qkvz", "ba")]
        inputs = [sum(inputs[:4]), sum(inputs[4:])]
    else:
        sources = [SourceView(f"{hf}in_proj_qkv.weight", rows=rows) for rows in ranges]
        sources += [SourceView(f"{hf}in_proj_{name}.weight") for name in "zba"]
    channels = tuple(SourceView(f"{hf}conv1d.weight", rows=rows) for rows in ranges)
    exact = torch.float32
    weights = {
        "in_proj.weight": _by_key_head(tuple(sources), inputs),
        "convolution": _by_key_head(channels, parts),
        "A_log": Weight((SourceView(hf + "A_log"),), 0, served_dtype=exact),
        "dt_bias": _plain(hf + "dt_bias", 0),
        "norm_weight": Weight((SourceView(hf + "norm.weight"),), served_dtype=exact),
        "out_proj.weight": _plain(hf + "out_proj.weight", 1),
    }
    return {f"self_attention.{name}": weight for name, weight in weights.items()}


def _by_key_head(sources: tuple[SourceView, ...], rows: Sequence[int]) -> Weight:
    """Return a weight with the rows of each key head together. rows: how many of each
    source a key head has.
    """

    def merge(views: Sequence[Tensor]) -> Tensor:
        by_head = [view.unflatten(0, (-1, n)) for view, n in zip(views, rows, strict=True)]
        return torch.cat(by_head, 1).flatten(0, 1)

    def unmerge(tensor: Tensor) -> list[Tensor]:
        by_head = tensor.unflatten(0, (-1, sum(rows)))
        return [part.flatten(0, 1) for part in by_head.split(list(rows), 1)]

    return Weight(sources, 0, merge, unmerge)


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
    weights = {"self_attention.linear_proj.weight": _plain(hf + "o_proj.weight", 1)}
    for megatron, name in names.items():
        weights[f"self_attention.linear_{megatron}_proj.weight"] = _plain(f"{hf}{name}.weight", 0)
    for megatron, name in norms.items():
        weights[f"self_attention.{megatron}.weight"] = _plain(f"{hf}{name}.weight")
    return weights


def _feed_forward(model: Architecture, hf: str, experts: bool) -> NamedWeights:
    """Return the weights of the MLP of the layer `hf` (…layers.3.), or of its router
    and experts.
    """
    if model.biases:
        return _experts_with_biases(model, hf + "mlp.")
    if model.name.startswith("Llama4"):
        hf += "feed_forward."
        return _stacked_experts(model, hf) if experts else _gated_mlp("mlp.", hf)
    hf += "mlp."
    return _separate_experts(model, hf) if experts else _gated_mlp("mlp.", hf)


def _separate_experts(model: Architecture, hf: str) -> NamedWeights:
    """Return router and experts of `hf` (…mlp.), where each expert has tensors of its
    own.
    """
    router = SourceView(hf + "gate.weight")
    served_dtype = SERVED_ROUTERS.get(model.name)
    weights = {"mlp.router.weight": Weight((router,), served_dtype=served_dtype)}
    shared = "shared_expert."
    if model.router == "balanced":
        weights["mlp.router.expert_bias"] = _plain(hf + "gate.e_score_correction_bias")
        shared = "shared_experts."
    if model.shared_feed_forward:
        weights |= _gated_mlp("mlp.shared_experts.", hf + shared)
    if model.gated_shared_expert:
        weights["mlp.shared_experts.gate_weight"] = _plain(hf + "shared_expert_gate.weight")
    for e in range(model.experts):
        weights |= _gated_mlp(f"mlp.experts.local_experts.{e}.", f"{hf}experts.{e}.")
    return weights


def _stacked_experts(model: Architecture, hf: str) -> NamedWeights:
    """Return router and experts of `hf` (…feed_forward.), where experts are stacked."""
    weights = {"mlp.router.weight": _plain(hf + "router.weight")}
    if model.shared_feed_forward:
        weights |= _gated_mlp("mlp.shared_experts.", hf + "shared_expert.")
    for e in range(model.experts):
        weights |= _stacked_expert(f"mlp.experts.local_experts.{e}.", hf + "experts.", e)
    return weights


def _gated_mlp(megatron: str, hf: str) -> NamedWeights:
    """Return gate, up and down of `hf` (…mlp.) as Megatron's MLP `megatron` (mlp.,
    mlp.shared_experts., …).
    """
    sources = (SourceView(hf + "gate_proj.weight"), SourceView(hf + "up_proj.weight"))
    return {
        megatron + "linear_fc1.weight": Weight(sources, 0, torch.cat, _halves),
        megatron + "linear_fc2.weight": _plain(hf + "down_proj.weight", 1),
    }


def _stacked_expert(megatron: str, hf: str, expert: int) -> NamedWeights:
    """Return expert `expert` of the stacks `hf` (…experts.), whose entries are
    transposed: [hidden, inner], [inner, hidden].
    """
    gate_up = (
        SourceView(hf + "gate_up_proj", expert, (0, 2)),
        SourceView(hf + "gate_up_proj", expert, (1, 2)),
    )
    down = SourceView(hf + "down_proj", expert)
    return {
        megatron + "linear_fc1.weight": Weight(gate_up, 1, _merge_transposes, _unmerge_transposes),
        megatron + "linear_fc2.weight": _transposed(down, 0),
    }


def _halves(fused: Tensor) -> Sequence[Tensor]:
    return fused.chunk(2)


def _merge_transposes(views: Sequence[Tensor]) -> Tensor:
    return torch.cat(_transposes(*views))


def _unmerge_transposes(fused: Tensor) -> list[Tensor]:
    return _transposes(*fused.chunk(2))


def _experts_with_biases(model: Architecture, hf: str) -> NamedWeights:
    """Return router and experts of `hf` (…mlp.). When transposed, a stack's entry has
    rows of gate and up alternately.
    """
    weights = {f"mlp.router.{kind}": _plain(f"{hf}router.{kind}") for kind in ("weight", "bias")}
    for e in range(model.experts):
        for ending, kind, served_dtype in (("", "weight", None), ("_bias", "bias", torch.float32)):
            gate_up = SourceView(f"{hf}experts.gate_up_proj{ending}", e)
            down = SourceView(f"{hf}experts.down_proj{ending}", e)
            megatron = f"mlp.experts.local_experts.{e}.linear_fc"
            weights[f"{megatron}1.{kind}"] = Weight(
                (gate_up,), None, _separate_rows, _alternate_rows, served_dtype=served_dtype
            )
            weights[f"{megatron}2.{kind}"] = _transposed(down, served_dtype=served_dtype)
    return weights


def _separate_rows(views: Sequence[Tensor]) -> Tensor:
    """Map [hidden, 2 inner] or [2 inner], gate and up alternating, to [2 inner, …],
    gate before up.
    """
    rows = views[0].t()
    return torch.cat([rows[0::2], rows[1::2]])


def _alternate_rows(fused: Tensor) -> list[Tensor]:
    gate_up = torch.stack(fused.chunk(2), 1)
    return [gate_up.flatten(0, 1).t()]


def _merge_qkv(head_dim: int, views: Sequence[Tensor]) -> Tensor:
    """Map q [groups * n * head_dim, …], k and v [groups * head_dim, …] to [groups * (n
    + 2) * head_dim, …].
    """
    hidden = views[0].shape[1:]  # empty for a bias
    groups = views[1].shape[0] // head_dim  # of this shard
    by_group = [view.reshape(groups, -1, *hidden) for view in views]
    grouped = torch.cat(by_group, 1)
    return grouped.reshape(-1, *hidden)


def _unmerge_qkv(model: Architecture, tensor: Tensor) -> list[Tensor]:
    hidden = tensor.shape[1:]
    queries_per_group = model.heads // model.groups
    parts = [queries_per_group * model.head_dim, model.head_dim, model.head_dim]
    grouped = tensor.reshape(-1, sum(parts), *hidden)
    return [t.reshape(-1, *hidden) for t in grouped.split(parts, 1)]


def _merge_gated_qkv(model: Architecture, views: Sequence[Tensor]) -> Tensor:
    """Map q and k, v [groups * head_dim, …] to [groups * (2 n + 2) * head_dim, …]. q
    has a gate after each head; in Megatron a group has all n heads of q, their gates, k
    and v.
    """
    query, *others = views
    hidden = query.shape[1:]
    groups = others[0].shape[0] // model.head_dim  # of this shard
    heads = query.reshape(groups, -1, 2, model.head_dim, *hidden)
    by_group = [heads.transpose(1, 2).flatten(1, 3)]
    by_group += [view.reshape(groups, model.head_dim, *hidden) for view in others]
    return torch.cat(by_group, 1).flatten(0, 1)


def _unmerge_gated_qkv(model: Architecture, tensor: Tensor) -> list[Tensor]:
    queries_per_group = model.heads // model.groups
    parts = [2 * queries_per_group * model.head_dim, model.head_dim, model.head_dim]
    grouped = tensor.unflatten(0, (-1, sum(parts)))
    query, key, value = grouped.split(parts, 1)
    heads = query.unflatten(1, (2, queries_per_group, model.head_dim)).transpose(1, 2)
    return [heads.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]
