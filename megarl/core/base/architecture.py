"""A model's sizes and parameter counts, from its config.json alone: no weights, no torch.

The tensors counted are those that megarl/core/models/families/ convert; a test holds the two together. What is carried along
untouched (a vision tower) is neither trained nor published and not counted.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config, read_json
from megarl.core.base.types import Routing

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. feed_forward: inner size of a dense layer. expert_feed_forward: of one expert;
    shared_feed_forward: of the expert that all tokens take, 0 if there is none. moe_layers: how many layers have experts.
    head_norms: parameters of a layer's norms of each head's q and k. qkv_biases: whether q, k and v have biases.
    attention_chunk: positions that layers with local attention look back on, None: all; local_layers: how many do."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    shared_feed_forward: int = 0
    moe_layers: int = 0
    head_norms: int = 0
    qkv_biases: bool = False
    attention_chunk: int | None = None
    local_layers: int = 0

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.groups * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Matrices of one layer's attention: q, k, v, output."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def mlp_parameters(self) -> int:
        """gate, up and down of one dense layer."""
        return 3 * self.hidden * self.feed_forward

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden * self.expert_feed_forward

    @property
    def shared_parameters(self) -> int:
        """Of one layer with experts: the shared expert and the router."""
        return 3 * self.hidden * self.shared_feed_forward + self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def vector_parameters(self) -> int:
        """Norms and biases of one layer."""
        return 2 * self.hidden + self.head_norms + self.qkv_biases * (self.query + 2 * self.key)

    @property
    def dense_parameters(self) -> int:
        """All but routed experts, embedding and head: attention, MLPs, shared experts, routers, norms."""
        dense_layers = self.layers - self.moe_layers
        every = self.layers * (self.attention_parameters + self.vector_parameters) + self.hidden
        return every + dense_layers * self.mlp_parameters + self.moe_layers * self.shared_parameters

    @property
    def routed_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Of the head, if it is not the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.routed_parameters + self.embedding_parameters + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """That one token meets."""
        chosen = self.moe_layers * self.experts_per_token * self.expert_parameters
        return self.dense_parameters + chosen + self.embedding_parameters + self.head_parameters

    @property
    def body_parameters(self) -> int:
        """That one token is multiplied with, without the head: a look-up in the embedding is none."""
        return self.active_parameters - self.embedding_parameters - self.head_parameters

    def divisible(self) -> Mapping[str, int]:
        """What layouts must divide, by megatron's names (megarl/core/recipe/rules.py)."""
        sizes = {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "ffn_hidden_size": self.feed_forward,
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "kv_channels": self.head_dim,
        }
        if self.experts:
            sizes |= {"num_moe_experts": self.experts, "moe_ffn_hidden_size": self.expert_feed_forward}
        if self.shared_feed_forward:
            sizes |= {"moe_shared_expert_intermediate_size": self.shared_feed_forward}
        return sizes


def known() -> list[str]:
    """Names of the public configurations that come with megarl."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def read(name_or_path: str) -> Shape:
    """Of a known name, a config.json, or a directory that has one."""
    path = Path(name_or_path)
    if name_or_path in known():
        path = CONFIGS / f"{name_or_path}.json"
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise MegarlError(
            f"--model-config: {name_or_path!r} is neither a config.json, nor a directory with one, nor a known name "
            f"({', '.join(known())})"
        )
    try:
        return of(read_json(path), str(path))
    except KeyError as error:
        raise MegarlError(f"{path}: no {error.args[0]!r} there") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise MegarlError(f"{path}: not a model's configuration: {error}") from None


def of(config: dict[str, Any], where: str) -> Shape:
    """Of a parsed config.json."""
    architecture = (config.get("architectures") or ["none"])[0]
    text = config.get("text_config", config)
    match architecture:
        case "LlamaForCausalLM":
            return _decoder(text)
        case "Qwen2ForCausalLM":
            return _decoder(text, qkv_biases=True)
        case "Qwen3ForCausalLM":
            return _decoder({"head_dim": 128, **text}, head_norms=True)
        case "Qwen3MoeForCausalLM":
            return _qwen3_moe(text)
        case "Llama4ForCausalLM" | "Llama4ForConditionalGeneration":
            tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            return _llama4(text | {"tie_word_embeddings": tied})
    raise MegarlError(
        f"{where}: architecture {architecture} is not known to the planner (Llama, Qwen2, Qwen3, Qwen3-MoE and Llama 4 are)"
    )


def _decoder(config: dict[str, Any], head_norms: bool = False, **more: Any) -> Shape:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        feed_forward=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        head_norms=2 * head_dim if head_norms else 0,
        **more,
    )


def _qwen3_moe(config: dict[str, Any]) -> Shape:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    return _decoder(
        config,
        head_norms=True,
        experts=config["num_local_experts"] if "num_local_experts" in config else config["num_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_feed_forward=config["moe_intermediate_size"],
        moe_layers=sum(i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])),
    )


def _llama4(config: dict[str, Any]) -> Shape:
    layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers")
    interval = config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    inner = config["intermediate_size"]  # an expert's; that of dense layers is intermediate_size_mlp
    return _decoder(
        config | {"intermediate_size": config["intermediate_size_mlp"]},
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_feed_forward=inner,
        shared_feed_forward=inner,
        moe_layers=len(range(step - 1, layers, step) if listed is None else listed),
        attention_chunk=config.get("attention_chunk_size"),
        local_layers=sum(rotary),
    )


@dataclass(frozen=True)
class RoutedLayers:
    """Which layers of a model have experts, and how a server tells the experts it chose (model.moe.routing_replay).

    reply    base64 of int32 [rows, all layers, experts a token]     rows: tokens from `routing_from` on, but the last
    rollout  Routing, layers with experts only, a byte a choice      rows of one request follow on those of the one before

    layers: how many there are; with_experts: which of them, from 0; chosen: experts that a token gets.
    """

    layers: int
    with_experts: tuple[int, ...]
    experts: int
    chosen: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From a config.json; None for a dense model."""
        text = config.get("text_config", config)
        experts = text.get("num_experts") or text.get("num_local_experts")
        if not experts:
            return None
        layers = text["num_hidden_layers"]
        step = text.get("interleave_moe_layer_step", 1)
        with_experts = text.get("moe_layers") or range(step - 1, layers, step)
        return cls(layers, tuple(with_experts), experts, text["num_experts_per_tok"])

    def decoded(self, reply: str) -> np.ndarray:
        """[rows, layers with experts, chosen] uint8, or int16 where there are more experts."""
        if not reply:
            raise MegarlError(
                "a server did not say which experts it chose: was it started with model.moe.routing_replay?"
            )
        table = np.frombuffer(base64.b64decode(reply), "<i4").reshape(-1, self.layers, self.chosen)
        return table[:, self.with_experts].astype(np.uint8 if self.experts <= 256 else np.int16)

    def joined(self, tables: Sequence[np.ndarray]) -> Routing:
        """Of a rollout, from the tables of its requests."""
        return Routing(choices=np.concatenate(tables).reshape(-1), layers=len(self.with_experts), chosen=self.chosen)


def layers_of(model_path: str) -> RoutedLayers | None:
    """The routed layers of the model in this directory; None for a dense one."""
    return RoutedLayers.of(read_config(model_path))
