"""Llama 3.x, dense: configuration, layer spec, and names Megatron <-> Hugging Face.

Covers grouped-query attention, a head_dim other than hidden/heads, llama3 rope scaling, tied and untied embeddings.
Megatron fuses q, k, v into one tensor, ordered by key-value group (q of the group, its k, its v), and gate with up.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.errors import MegarlError
from megarl.models.family import Weight
from megarl.models.local_spec import Rope, block_spec

LAYERS = "decoder.layers."


class Llama:
    """See megarl.models.family.Family."""

    def __init__(self, config: dict[str, Any], hf_dir: Path) -> None:
        for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(key, only) != only:
                raise MegarlError(f"{hf_dir / 'config.json'}: {key}={config[key]!r} is not supported, only {only!r}")
        self.layers: int = config["num_hidden_layers"]
        self.hidden: int = config["hidden_size"]
        self.heads: int = config["num_attention_heads"]
        self.groups: int = config.get("num_key_value_heads") or self.heads
        self.head_dim: int = config.get("head_dim") or self.hidden // self.heads
        self.feed_forward: int = config["intermediate_size"]
        self.epsilon: float = config["rms_norm_eps"]
        self.vocabulary: int = config["vocab_size"]
        self.tied: bool = config.get("tie_word_embeddings", False)
        self.context: int = config["max_position_embeddings"]
        # transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling.
        self.rope: dict[str, Any] = config.get("rope_parameters") or {
            "rope_theta": config.get("rope_theta", 10000.0),
            **(config.get("rope_scaling") or {}),
        }
        if self.rope.get("rope_type", "default") not in ("default", "llama3"):
            raise MegarlError(
                f"{hf_dir / 'config.json'}: rope_type {self.rope['rope_type']!r} is not supported; supported: default, llama3"
            )

    def architecture(self) -> dict[str, Any]:
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

    def inverse_frequencies(self) -> torch.Tensor:
        return inverse_frequencies(self.head_dim, self.rope)

    def block_spec(self, config: Any, transformer_engine: bool, vp_stage: int | None) -> Any:
        return block_spec(config, transformer_engine, vp_stage, Rope(self.inverse_frequencies()))

    def weight(self, name: str) -> Weight:
        if not name.startswith(LAYERS):
            return self._outside_layers(name)
        layer, _, part = name.removeprefix(LAYERS).partition(".")
        hf = f"model.layers.{int(layer)}."
        attention, mlp = hf + "self_attn.", hf + "mlp."
        match part:
            case "self_attention.linear_qkv.weight":
                names = tuple(f"{attention}{x}_proj.weight" for x in "qkv")
                return Weight(names, 0, self._merge_qkv, self._unmerge_qkv)
            case "self_attention.linear_proj.weight":
                return Weight((attention + "o_proj.weight",), 1)
            case "mlp.linear_fc1.weight":
                return Weight((mlp + "gate_proj.weight", mlp + "up_proj.weight"), 0, torch.cat, _halves)
            case "mlp.linear_fc2.weight":
                return Weight((mlp + "down_proj.weight",), 1)
            # The second names are Transformer Engine's, which fuses the norm with the projection behind it.
            case "input_layernorm.weight" | "self_attention.linear_qkv.layer_norm_weight":
                return Weight((hf + "input_layernorm.weight",))
            case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
                return Weight((hf + "post_attention_layernorm.weight",))
        raise KeyError(name)

    def _outside_layers(self, name: str) -> Weight:
        match name:
            case "embedding.word_embeddings.weight":
                return Weight(("model.embed_tokens.weight",), 0, vocabulary=self.vocabulary)
            case "output_layer.weight":
                return Weight(
                    ("model.embed_tokens.weight" if self.tied else "lm_head.weight",), 0, vocabulary=self.vocabulary
                )
            case "decoder.final_layernorm.weight":
                return Weight(("model.norm.weight",))
        raise KeyError(name)

    def names(self) -> set[str]:
        parts = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_proj" for x in "qkvo"))
        parts += tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
        layers = {f"model.layers.{i}.{part}.weight" for i in range(self.layers) for part in parts}
        return (
            layers | {"model.embed_tokens.weight", "model.norm.weight"} | (set() if self.tied else {"lm_head.weight"})
        )

    def _merge_qkv(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """q [groups * n * head_dim, hidden], k and v [groups * head_dim, hidden] -> [groups * (n + 2) * head_dim, hidden]."""
        hidden = pieces[0].shape[-1]
        groups = pieces[1].shape[0] // self.head_dim  # of this shard
        return torch.cat([t.reshape(groups, -1, hidden) for t in pieces], 1).reshape(-1, hidden)

    def _unmerge_qkv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        hidden, per_group = tensor.shape[-1], self.heads // self.groups
        sizes = [per_group * self.head_dim, self.head_dim, self.head_dim]
        grouped = tensor.reshape(-1, sum(sizes), hidden)
        return [t.reshape(-1, hidden) for t in grouped.split(sizes, 1)]


def _halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(2))


def inverse_frequencies(head_dim: int, rope: dict[str, Any]) -> torch.Tensor:
    """[head_dim / 2] float32, bit for bit transformers' `default` and `llama3` (modeling_rope_utils.py).

    llama3: wavelengths longer than original/low_freq_factor are stretched by `factor`, those shorter than
    original/high_freq_factor are kept, those between are interpolated.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (rope["rope_theta"] ** (steps / head_dim))
    if rope.get("rope_type", "default") == "default":
        return frequencies
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where((wavelengths >= original / high) & (wavelengths <= original / low), between, stretched)
