"""What decoders have in common: the sizes in config.json, and the tensors of embedding, attention and gated MLP.

A family takes from here what it shares with others and adds its own. Megatron fuses q, k, v into one tensor, ordered by
key-value group (q of the group, its k, its v), and gate with up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.core.base.errors import MegarlError
from megarl.core.models.attention import LayerAttention
from megarl.core.models.family import Family, Source, Weight
from megarl.core.models.rope import inverse_frequencies, rope_parameters

Weights = dict[str, Weight]


@dataclass(frozen=True)
class Sizes:
    """The part of config.json that most families write alike."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    feed_forward: int
    epsilon: float
    vocabulary: int
    tied: bool
    context: int
    rope: dict[str, Any]

    @staticmethod
    def read(config: dict[str, Any], where: Path) -> "Sizes":
        heads = config["num_attention_heads"]
        return Sizes(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            feed_forward=config["intermediate_size"],
            epsilon=config["rms_norm_eps"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            context=config["max_position_embeddings"],
            rope=rope_parameters(config, where),
        )

    def architecture(self) -> dict[str, Any]:
        """Arguments of TransformerConfig."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": self.feed_forward,
            "layernorm_epsilon": self.epsilon,
            "normalization": "RMSNorm",
            "activation_func": torch.nn.functional.silu,
            "gated_linear_unit": True,
            "add_bias_linear": False,
        }


def refuse_others(config: dict[str, Any], where: Path, only: dict[str, Any]) -> None:
    """MegarlError for a setting that has another value than the one that is implemented."""
    for key, value in only.items():
        if config.get(key, value) != value:
            raise MegarlError(f"{where}: {key}={config[key]!r} is not supported, only {value!r}")


def dense(sizes: Sizes, attention: Callable[[str], Weights], **architecture: Any) -> Family:
    """A family of dense layers, all alike. attention: its weights in `hf` (…self_attn.). architecture: arguments of
    TransformerConfig beside those of `sizes`."""

    def layer(i: int) -> Weights:
        hf = f"model.layers.{i}."
        return norms(hf) | attention(hf + "self_attn.") | gated_mlp("mlp.", hf + "mlp.")

    return Family(
        vocabulary=sizes.vocabulary,
        tied=sizes.tied,
        context=sizes.context,
        architecture=sizes.architecture() | architecture,
        inverse_frequencies=inverse_frequencies(sizes.head_dim, sizes.rope),
        attention=(LayerAttention(),) * sizes.layers,
        weights=model_weights(sizes, layer),
    )


def model_weights(sizes: Sizes, layer: Callable[[int], Weights], prefix: str = "") -> Weights:
    """Of the whole model: `layer(i)` by their names within it, the embedding, the last norm, the head. prefix: of Hugging Face
    names."""
    weights = {
        f"decoder.layers.{i}.{name}": weight for i in range(sizes.layers) for name, weight in layer(i).items()
    }  # fmt: skip
    embedding = Weight((Source(prefix + "model.embed_tokens.weight"),), 0, vocabulary=sizes.vocabulary)
    head = Weight((Source(prefix + "lm_head.weight"),), 0, vocabulary=sizes.vocabulary)
    return weights | {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": plain(prefix + "model.norm.weight"),
        "output_layer.weight": embedding if sizes.tied else head,
    }


def plain(name: str, split: int | None = None) -> Weight:
    """The same tensor on both sides."""
    return Weight((Source(name),), split)


def norms(hf: str) -> Weights:
    """The two norms of layer `hf`."""
    return {
        "input_layernorm.weight": plain(hf + "input_layernorm.weight"),
        "pre_mlp_layernorm.weight": plain(hf + "post_attention_layernorm.weight"),
    }


def attention(sizes: Sizes, hf: str) -> Weights:
    """Projections of `hf` (…self_attn.)."""
    sources = tuple(Source(f"{hf}{x}_proj.weight") for x in "qkv")
    return {
        "self_attention.linear_qkv.weight": Weight(
            sources, 0, partial(_merge_qkv, sizes.head_dim), partial(_unmerge_qkv, sizes)
        ),
        "self_attention.linear_proj.weight": plain(hf + "o_proj.weight", 1),
    }


def qkv_biases(sizes: Sizes, hf: str) -> Weights:
    """Biases of q, k and v of `hf` (…self_attn.), fused as their projections are."""
    sources = tuple(Source(f"{hf}{x}_proj.bias") for x in "qkv")
    return {
        "self_attention.linear_qkv.bias": Weight(
            sources, 0, partial(_merge_qkv, sizes.head_dim), partial(_unmerge_qkv, sizes)
        )
    }


def head_norms(hf: str) -> Weights:
    """RMS norms of each head's q and k, of `hf` (…self_attn.)."""
    return {f"self_attention.{x}_layernorm.weight": plain(f"{hf}{x}_norm.weight") for x in "qk"}


def gated_mlp(megatron: str, hf: str) -> Weights:
    """gate, up and down of `hf` (…mlp.) as Megatron's MLP `megatron` (mlp., mlp.shared_experts., …)."""
    return {
        megatron + "linear_fc1.weight": Weight(
            (Source(hf + "gate_proj.weight"), Source(hf + "up_proj.weight")), 0, torch.cat, halves
        ),
        megatron + "linear_fc2.weight": plain(hf + "down_proj.weight", 1),
    }


def halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """gate and up."""
    return list(tensor.chunk(2))


def _merge_qkv(head_dim: int, views: Sequence[torch.Tensor]) -> torch.Tensor:
    """q [groups * n * head_dim, hidden], k and v [groups * head_dim, hidden] -> [groups * (n + 2) * head_dim, hidden].

    Biases alike, without `hidden`.
    """
    hidden = views[0].shape[1:]
    groups = views[1].shape[0] // head_dim  # of this shard
    return torch.cat([t.reshape(groups, -1, *hidden) for t in views], 1).reshape(-1, *hidden)


def _unmerge_qkv(sizes: Sizes, tensor: torch.Tensor) -> list[torch.Tensor]:
    hidden = tensor.shape[1:]
    parts = [sizes.heads // sizes.groups * sizes.head_dim, sizes.head_dim, sizes.head_dim]
    grouped = tensor.reshape(-1, sum(parts), *hidden)
    return [t.reshape(-1, *hidden) for t in grouped.split(parts, 1)]
