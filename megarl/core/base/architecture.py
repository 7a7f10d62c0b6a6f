"""A model's structure, read from its config.json. Only this module and delta_layers.py
interpret that file; they need no weights and no torch.

    config.json ──► Architecture
      models/            megatron's arguments, each layer's attention, names of tensors
      routed_experts     decodes the experts that a server chose, for routing replay
      client/servable.py   models that SGLang would serve wrongly
      algorithm/packing.py, predict/planning/   a sequence's cost, what fits on a GPU

A vision tower is neither trained nor published; nothing here describes it or counts its
parameters.
"""

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megarl.core.base.config_values import MOST_EXPERTS, MOST_LAYERS, check_values, names, size
from megarl.core.base.delta_layers import DeltaLayers, read_delta_layers
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config, read_json, text_config
from megarl.core.base.types import JsonObject, Routing

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's change of the rotary wavelengths (in positions): those longer than
    original / low are multiplied by `factor`, those shorter than original / high are
    kept, and those in between are interpolated.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071). Pairs that make fewer than `slow` turns in `original`
    positions have their wavelength multiplied by `factor`, pairs with more than `fast`
    turns keep it, the rest is interpolated.
    """

    factor: float
    fast: float
    slow: float
    original: int
    truncate: bool  # round the bounds to whole pairs
    magnitude: float  # a factor on the rotated q and k
    scores: float = 1.0  # a further factor on attention scores (DeepSeek's squared mscale)


@dataclass(frozen=True)
class Latent:
    """Widths in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query: int | None  # the compressed q; None: no compression
    shared: int  # the latent vector that k and v are made from
    content: int  # a head's part of k from the latent vector
    position: int  # the rotated part of k, which all heads share
    value: int  # a head's v


@dataclass(frozen=True)
class Architecture:
    """A decoder. Layers are counted from 0; sizes are numbers of elements. router: how
    experts' outputs (sigmoid: their inputs) are weighted. balanced: by the normalised
    sigmoids of the chosen ones times router_scale; chosen by sigmoid plus a bias
    without gradient (arXiv 2408.15664).
    """

    name: str  # transformers' class, from config.json
    layers: int
    hidden: int
    heads: int
    groups: int  # number of heads of k and v
    head_dim: int
    feed_forward: int  # inner size of a dense layer's MLP
    vocabulary: int
    context: int  # the largest supported position
    tied: bool  # embedding and head are one matrix
    epsilon: float  # of the RMS norms
    rope_theta: float  # base of the rotary embedding
    # How many of a head's elements are rotated: its first, or with `latent` its last.
    rotated: int
    rope_scaling: RopeScaling | Yarn | None = None
    rope_interleaved: bool = False  # it rotates neighbouring pairs
    # Layers without rotary embedding, which attend to all earlier positions.
    unrotated_layers: tuple[int, ...] = ()
    # Size of the chunks within which the other layers attend; None: no chunks.
    attention_chunk: int | None = None
    # (floor, scale) of the factor on q in unrotated layers.
    temperature: tuple[int, float] | None = None
    head_norms: bool = False  # RMS norms of each head's q and k before rotation
    whole_norms: bool = False  # RMS norms of all heads' q, and of all heads' k, before it
    l2_norms: bool = False  # norms of q and k without weights, after it
    qkv_biases: bool = False
    experts: int = 0  # in each layer of expert_layers; 0: the model is dense
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    # Inner size of the expert that all tokens take; 0: no shared expert.
    shared_feed_forward: int = 0
    expert_layers: tuple[int, ...] = ()
    # One in this many layers has experts; config.json may have this instead of a list.
    expert_step: int = 1
    router: Literal["softmax", "softmax of the chosen", "sigmoid", "balanced"] = "softmax"
    router_scale: float = 1.0
    # (all, used): a token's experts come from this many groups; None: any.
    router_groups: tuple[int, int] | None = None
    # k and v come from a narrow vector; q and k, not v, are head_dim wide.
    latent: Latent | None = None
    # After the last one, for multi-token prediction; carried along, not counted here.
    predicting_layers: int = 0
    # Of all linear maps of a layer but q, k and v, router and experts included.
    biases: bool = False
    # Each head has an extra attention score that belongs to no key or value (arXiv
    # 2309.17453).
    sinks: bool = False
    window: int | None = None  # positions that window_layers attend to, the token's own included
    window_layers: tuple[int, ...] = ()
    # Clamps an expert's gate g and up u: (u + 1) g sigmoid(1.702 g), not u silu(g).
    glu_limit: float | None = None
    # Gated delta networks, which some layers have instead of attention.
    delta: DeltaLayers | None = None
    # q comes with a gate as wide as it; its sigmoid multiplies attention's output.
    gated_attention: bool = False
    # The shared expert's output is multiplied by the sigmoid of one number per token.
    gated_shared_expert: bool = False
    # RMS norms multiply by 1 + weight, those in delta networks excepted.
    centered_norms: bool = False

    @property
    def query(self) -> int:
        """Width of q, all heads together."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of k, all heads together."""
        return self.groups * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head of v."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def value(self) -> int:
        """Width of v, all heads together."""
        return self.groups * self.value_dim

    @property
    def attended(self) -> int:
        """Width of attention's output before its projection, all heads together."""
        return self.heads * self.value_dim

    @property
    def cached(self) -> int:
        """Elements that a server caches per token and attention layer: k and v, or the
        latent vector that they are made from.
        """
        if self.latent:
            return self.latent.shared + self.latent.position
        return self.key + self.value

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Layers that have a gated delta network."""
        return self.delta.layers if self.delta else ()

    @property
    def attention_layers(self) -> int:
        """Number of layers that have attention."""
        return self.layers - len(self.delta_layers)

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.expert_layers)

    @property
    def local_layers(self) -> int:
        """Number of layers that attend within chunks or windows."""
        if self.attention_chunk is None:
            return len(self.window_layers)
        return self.layers - len(self.unrotated_layers) + len(self.window_layers)

    @property
    def local_positions(self) -> int | None:
        """The most positions that a local layer attends to; None if there are no local
        layers.
        """
        return self.attention_chunk or self.window

    @property
    def attention_parameters(self) -> int:
        """Parameters of the matrices of one layer's attention: q, its gate if it has
        one, k, v, output.
        """
        latent = self.latent
        if latent is None:
            q_and_output = 2 * self.hidden * self.query
            gate = self.hidden * self.query if self.gated_attention else 0
            k_and_v = 2 * self.hidden * self.key
            return q_and_output + gate + k_and_v
        query_parameters = self.hidden * self.query
        if latent.query is not None:  # to the compressed q, and from it
            query_parameters = latent.query * (self.hidden + self.query)
        # k and v: to the latent vector and the rotated part of k, and from the vector.
        down = self.hidden * (latent.shared + latent.position)
        up = latent.shared * self.heads * (latent.content + latent.value)
        output = self.attended * self.hidden
        return query_parameters + down + up + output

    @property
    def mixing_parameters(self) -> int:
        """Parameters of the matrices of all layers' attention and delta networks, which
        mix tokens of different positions.
        """
        parameters = self.attention_layers * self.attention_parameters
        if self.delta:
            parameters += len(self.delta_layers) * self.delta.matrix_parameters(self.hidden)
        return parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert in one layer: gate, up and down."""
        return 3 * self.hidden * self.expert_feed_forward + self.expert_biases

    @property
    def expert_biases(self) -> int:
        """Biases among an expert's parameters."""
        if not self.biases:
            return 0
        return 2 * self.expert_feed_forward + self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def vector_parameters(self) -> int:
        """Parameters of the norms and biases of all layers, and of the norm after the
        last layer; of a delta network all but its matrices.
        """
        attention = 0
        if self.head_norms:
            attention += 2 * self.head_dim
        if self.whole_norms:
            attention += self.query + self.key
        if self.qkv_biases:
            attention += self.query + 2 * self.key
        if self.latent:
            attention += (self.latent.query or 0) + self.latent.shared
        if self.biases:
            attention += self.hidden + self.experts
        if self.sinks:
            attention += self.heads
        delta = len(self.delta_layers) * self.delta.vector_parameters if self.delta else 0
        norms = (2 * self.layers + 1) * self.hidden
        return norms + self.attention_layers * attention + delta

    @property
    def dense_parameters(self) -> int:
        """All parameters except routed experts, embedding and head: attention, MLPs,
        shared experts, routers, norms.
        """
        dense = (self.layers - self.moe_layers) * 3 * self.feed_forward
        gates = int(self.gated_shared_expert)
        shared = self.moe_layers * (3 * self.shared_feed_forward + gates + self.experts)
        feed_forward = self.hidden * (dense + shared)
        return self.mixing_parameters + feed_forward + self.vector_parameters

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.moe_layers * self.experts * self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        vocabulary = self.embedding_parameters + self.head_parameters
        return self.dense_parameters + self.routed_parameters + vocabulary

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        vocabulary = self.embedding_parameters + self.head_parameters
        chosen_experts = self.moe_layers * self.experts_per_token
        vectors = self.vector_parameters + chosen_experts * self.expert_biases
        return self.body_parameters + vectors + vocabulary

    @property
    def body_parameters(self) -> int:
        """Parameters of the matrices that one token is multiplied with, without the
        head. The embedding is only looked up.
        """
        chosen_experts = self.moe_layers * self.experts_per_token
        routed = chosen_experts * (self.expert_parameters - self.expert_biases)
        return self.dense_parameters - self.vector_parameters + routed

    def state_bytes(self, width: int) -> int:
        """Return what a server keeps of each sequence besides keys and values; 0
        without delta networks. width: bytes of an activation.
        """
        return self.delta.state_bytes(width) if self.delta else 0

    def megatron_sizes(self) -> dict[str, int | None]:
        """Return the sizes under their names in megatron's TransformerConfig; those of
        experts and latent attention if any.
        """
        sizes: dict[str, int | None] = {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "ffn_hidden_size": self.feed_forward,
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "add_bias_linear": self.biases,
            "kv_channels": self.value_dim,
        }
        if self.experts:
            sizes["num_moe_experts"] = self.experts
            sizes["moe_ffn_hidden_size"] = self.expert_feed_forward
        if self.shared_feed_forward:
            sizes["moe_shared_expert_intermediate_size"] = self.shared_feed_forward
        if self.gated_shared_expert:
            sizes["moe_shared_expert_gate"] = True
        if self.gated_attention:
            sizes["attention_output_gate"] = True
        if self.delta:
            sizes["linear_num_key_heads"] = self.delta.key_heads
            sizes["linear_num_value_heads"] = self.delta.value_heads
            sizes["linear_key_head_dim"] = self.delta.key_dim
            sizes["linear_value_head_dim"] = self.delta.value_dim
        if self.router == "balanced":
            sizes["moe_router_enable_expert_bias"] = True
        if self.latent:
            sizes["q_lora_rank"] = self.latent.query
            sizes["kv_lora_rank"] = self.latent.shared
            sizes["v_head_dim"] = self.latent.value
            sizes["qk_head_dim"] = self.latent.content
            sizes["qk_pos_emb_head_dim"] = self.latent.position
        return sizes

    def routed_experts(self, reply: str) -> np.ndarray:
        """Return the experts that a server chose for tokens from `routing_from` on,
        except the last (model.moe.routing_replay): [tokens, layers with experts,
        chosen] uint8, or int16 where there are more experts. reply: base64 of [tokens,
        all layers, chosen], of one byte each, or two if there are more than 255 experts
        (own_routing in engine/workers.py).
        """
        if not reply:
            raise MegarlError(
                "a server did not say which experts it chose: was it started with"
                " model.moe.routing_replay?"
            )
        sent_dtype = "u1" if self.experts < 256 else "<u2"
        choices = np.frombuffer(base64.b64decode(reply), sent_dtype)
        table = choices.reshape(-1, self.layers, self.experts_per_token)[:, self.expert_layers]
        largest = int(table.max(initial=0))
        if largest >= self.experts:  # -1 is large, too
            raise MegarlError(
                f"a server chose expert {largest} of {self.experts}: is its SGLang the version in"
                " requirements/?"
            )
        dtype = np.uint8 if self.experts <= 256 else np.int16
        return table.astype(dtype, copy=False)

    def routing(self, tables: Sequence[np.ndarray]) -> Routing:
        """Join the `routed_experts` of a rollout's requests."""
        return Routing.of(np.concatenate(tables), self.experts)


def read(name_or_path: str) -> Architecture:
    """Return the architecture for a name in CONFIGS, the path of a config.json, or a
    directory that contains one.
    """
    paths = {path.stem: path for path in CONFIGS.glob("*.json")}
    path = paths.get(name_or_path, Path(name_or_path))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise MegarlError(
            f"--model-config: {name_or_path!r} is neither a config.json, nor a directory with one,"
            f" nor a known name ({', '.join(sorted(paths))})"
        )
    return of(read_json(path), path)


def in_directory(hf_dir: Path | str) -> Architecture:
    """Return the architecture of the model in a Hugging Face directory. MegarlError if
    its weights are quantised.
    """
    config = read_config(hf_dir)
    quantization = config.get("quantization_config")
    refused = any(name in str(config.get("architectures")) for name in REFUSED)
    if quantization and not refused:  # else the conversion that this names would fail
        method = quantization
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        raise MegarlError(
            f"{hf_dir}: its weights are quantised (quant_method {method}), but megarl trains and"
            f" serves bf16; convert it: python -m checkpoints_tools dequantize {hf_dir} NEW"
        )
    return of(config, Path(hf_dir) / "config.json")


def of(config: JsonObject, path: Path | str) -> Architecture:
    """Return the architecture in a parsed config.json. MegarlError, beginning with
    `path`, if unsupported or incomplete.
    """
    name = ""
    try:
        name = _supported_name(config)
        check_values(text_config(config, Path(path)))
        return _checked(replace(READERS[name](config), name=name))
    except MegarlError as error:
        raise MegarlError(f"{path}: {error}") from None
    except KeyError as error:
        raise MegarlError(f"{path}: {error.args[0]!r} is missing, which {name} needs") from None
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise MegarlError(f"{path}: not a model's configuration: {error}") from None


def _supported_name(config: JsonObject) -> str:
    """Return the first name in `architectures` that has a reader."""
    architectures = names(config)
    for name in architectures:
        if name in READERS:
            return name
        if name in REFUSED:
            raise MegarlError(f"architecture {name} is not supported: {REFUSED[name]}")
    supported = ", ".join(sorted(READERS))
    text = ", ".join(architectures) or "none"
    raise MegarlError(f"architecture {text} is not supported; supported: {supported}")


def _checked(model: Architecture) -> Architecture:
    """Return the model. MegarlError if its sizes contradict each other, or are no
    model's.
    """
    if model.heads % model.groups:
        raise MegarlError(
            f"num_attention_heads={model.heads} is no multiple of"
            f" num_key_value_heads={model.groups}"
        )
    if model.experts_per_token > model.experts:
        raise MegarlError(
            f"num_experts_per_tok={model.experts_per_token}, but there are only"
            f" {model.experts} experts"
        )
    if model.experts * model.moe_layers > MOST_EXPERTS:
        raise MegarlError(
            f"{model.moe_layers} layers of {model.experts:,} experts are more than any model has"
            f" ({MOST_EXPERTS:,} in all)"
        )
    if model.predicting_layers > MOST_LAYERS:
        raise MegarlError(
            f"{model.predicting_layers:,} layers for multi-token prediction are more than any"
            " model has"
        )
    return model


# SGLang rotates as dual chunk attention asks (Qwen2.5's -1M) but no longer has the
# kernels for it.
QWEN = {"use_sliding_window": False, "dual_chunk_attention_config": None}
NO_BIAS = {"attention_bias": False}
ROPES = ("default", "llama3", "yarn")
"""Kinds of rotary embedding of Llama and Qwen."""


def _llama(config: JsonObject) -> Architecture:
    return _decoder(config, NO_BIAS | {"mlp_bias": False}, ROPES)


def _qwen2(config: JsonObject) -> Architecture:
    return replace(_decoder(config, QWEN, ROPES), qkv_biases=True)


def _qwen3(config: JsonObject) -> Architecture:
    # The default size of a head is 128, whatever the number of heads.
    decoder = _decoder({"head_dim": 128, **config}, QWEN | NO_BIAS, ROPES)
    return replace(decoder, head_norms=True)


def _qwen3_moe(config: JsonObject) -> Architecture:
    """Read Qwen3-MoE. Every decoder_sparse_step-th layer has experts, unless it is in
    mlp_only_layers.
    """
    chosen = size(config, "num_experts_per_tok")
    normalised = config.get("norm_topk_prob", False)
    if chosen == 1 and normalised:
        raise MegarlError(
            "norm_topk_prob with num_experts_per_tok=1 is not supported: the router has no effect"
        )
    dense = config.get("mlp_only_layers") or []
    step = size(config, "decoder_sparse_step", 1)
    layers = range(size(config, "num_hidden_layers"))
    # transformers 5 writes num_local_experts; before, it was num_experts.
    experts_key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return replace(
        _decoder(config, QWEN | NO_BIAS, ROPES),
        head_norms=True,
        experts=size(config, experts_key),
        experts_per_token=chosen,
        expert_feed_forward=size(config, "moe_intermediate_size"),
        expert_layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
        expert_step=step,
        router="softmax of the chosen" if normalised else "softmax",
    )


def _llama4_multimodal(config: JsonObject) -> Architecture:
    return _llama4(_text_of(config))


def _llama4(config: JsonObject) -> Architecture:
    """Read Llama 4's language model from its own configuration, not that of the
    multimodal model around it.
    """
    layers = range(size(config, "num_hidden_layers"))
    step = size(config, "interleave_moe_layer_step", 1)
    expert_layers = config.get("moe_layers")
    if expert_layers is None:
        expert_layers = [i for i in layers if (i + 1) % step == 0]
    interval = size(config, "no_rope_layer_interval", 4)
    # Despite its name, no_rope_layers has a 1 for each layer with rotary embedding.
    rotary = config.get("no_rope_layers") or [(i + 1) % interval for i in layers]
    # Of an expert; dense layers have intermediate_size_mlp.
    inner = size(config, "intermediate_size")
    temperature = _llama4_temperature(config)
    attention_chunk = None
    if config.get("attention_chunk_size"):
        attention_chunk = size(config, "attention_chunk_size")
    return replace(
        _decoder({"rope_theta": 500000.0, **config}, NO_BIAS | {"num_experts_per_tok": 1}),
        feed_forward=size(config, "intermediate_size_mlp"),
        rope_interleaved=True,
        unrotated_layers=tuple(i for i in layers if not rotary[i]),
        attention_chunk=attention_chunk,
        temperature=temperature,
        l2_norms=config.get("use_qk_norm", True),
        experts=size(config, "num_local_experts"),
        experts_per_token=1,
        expert_feed_forward=inner,
        shared_feed_forward=inner,
        expert_layers=tuple(i for i in layers if i in expert_layers),
        expert_step=step,
        router="sigmoid",
    )


def _llama4_temperature(config: JsonObject) -> tuple[int, float] | None:
    """Return (floor, scale) of the temperature by position (models/attention.py,
    `temperatures`); None if it is switched off.
    """
    tuned = config.get("attn_temperature_tuning", True)
    if not isinstance(tuned, bool):  # the first releases have 4, with the same meaning
        raise MegarlError(
            f"attn_temperature_tuning={tuned!r} is not supported: transformers 5, and so a server,"
            f" does not load it; set it to {str(bool(tuned)).lower()}"
        )
    if not tuned:
        return None
    return config.get("floor_scale", 8192), config.get("attn_scale", 0.1)


def _glm4_moe(config: JsonObject) -> Architecture:
    """Read GLM-4.5, which rotates only a share of each head."""
    # Before transformers 5, the share was a key of `config`.
    rope: JsonObject = config.get("rope_parameters") or {}
    share: float = (config | rope).get("partial_rotary_factor", 0.5)
    return replace(
        _balanced(_decoder(config, {}, ("default",)), config),
        rotated=int(size(config, "head_dim") * share),
        head_norms=config.get("use_qk_norm", False),
        qkv_biases=config.get("attention_bias", False),
    )


def _deepseek_v3(config: JsonObject, ropes: Sequence[str] = ("default", "yarn")) -> Architecture:
    """Read DeepSeek-V3. A head of q and k is its part from the latent vector and its
    rotated part, end to end. ropes: as in `_decoder`.
    """
    query = config.get("q_lora_rank")
    latent = Latent(
        query=None if query is None else size(config, "q_lora_rank"),
        shared=size(config, "kv_lora_rank"),
        content=size(config, "qk_nope_head_dim"),
        position=size(config, "qk_rope_head_dim"),
        value=size(config, "v_head_dim"),
    )
    head_dim = latent.content + latent.position
    if latent.value > head_dim:
        raise MegarlError(
            f"v_head_dim={latent.value}, wider than a head of q and k, is not supported"
        )
    only = NO_BIAS | {
        "num_key_value_heads": size(config, "num_attention_heads"),
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    decoder = _decoder(config | {"head_dim": head_dim}, only, ropes, latent)
    return replace(
        _balanced(decoder, config),
        rotated=latent.position,
        rope_interleaved=config.get("rope_interleave", True),
    )


def _glm4_moe_lite(config: JsonObject) -> Architecture:
    """Read GLM-4.7-Flash: DeepSeek-V3's layers, of which `mlp_layer_types` says to
    transformers, and first_k_dense_replace to SGLang, how many have no experts.
    """
    layers = size(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["dense", *["sparse"] * (layers - 1)]
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise MegarlError(
            "mlp_layer_types is not supported: only dense layers, then sparse ones, one per layer"
        )
    rope: JsonObject = config.get("rope_parameters") or {}
    only = {
        "first_k_dense_replace": dense,
        "n_group": 1,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
    }
    _check_only(config | rope, only)
    return _deepseek_v3(config | {"first_k_dense_replace": dense}, ("default",))


def _balanced(decoder: Architecture, config: JsonObject) -> Architecture:
    """Add the fields that describe the experts of DeepSeek-V3 and the GLMs."""
    chosen = size(config, "num_experts_per_tok")
    experts = size(config, "n_routed_experts")
    groups = size(config, "n_group", 1)
    used_groups = size(config, "topk_group", 1)
    if not config.get("norm_topk_prob", True) or chosen == 1:
        raise MegarlError(
            "norm_topk_prob=false or num_experts_per_tok=1 is not supported: weights are normalised"
        )
    if groups > 1 and (experts % groups or chosen // used_groups != GROUP_BEST):
        raise MegarlError(
            f"n_group={groups}, topk_group={used_groups} with {chosen} of {experts} experts is not"
            " supported: megatron ranks a group by its best num_experts_per_tok / topk_group"
            f" experts, this model by its best {GROUP_BEST}"
        )
    inner = size(config, "moe_intermediate_size")
    predicting_layers = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    return replace(
        decoder,
        experts=experts,
        experts_per_token=chosen,
        expert_feed_forward=inner,
        shared_feed_forward=inner * size(config, "n_shared_experts"),
        expert_layers=tuple(range(int(config["first_k_dense_replace"]), decoder.layers)),
        router="balanced",
        router_scale=config["routed_scaling_factor"],
        router_groups=(groups, used_groups) if groups > 1 else None,
        predicting_layers=predicting_layers or 0,
    )


def _minimax_m2(config: JsonObject) -> Architecture:
    """Read MiniMax-M2, whose intermediate_size is an expert's. How much of a head is
    rotated, released files say by rotary_dim, and those of transformers 5 by a share.
    """
    chosen = size(config, "num_experts_per_tok")
    if chosen == 1:
        raise MegarlError("num_experts_per_tok=1 is not supported: the router has no effect")
    layers = size(config, "num_hidden_layers")
    only = {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "attn_type_list": [1] * layers,  # all of them attention, and none linear
        "tie_word_embeddings": False,
    }
    defaults = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5000000.0}
    decoder = _decoder(defaults | config, only, ("default",))
    rope: JsonObject = config.get("rope_parameters") or {}
    share = (config | rope).get("partial_rotary_factor")
    rotated = size(config, "rotary_dim", int(decoder.head_dim * (share or 1.0)))
    if share is not None and rotated != int(decoder.head_dim * share):
        raise MegarlError(
            f"rotary_dim={rotated} with partial_rotary_factor={share} is not supported: transformers"
            " takes the latter, and SGLang the former"
        )
    return replace(
        decoder,
        rotated=rotated,
        whole_norms=True,
        experts=size(config, "num_local_experts"),
        experts_per_token=chosen,
        expert_feed_forward=decoder.feed_forward,
        expert_layers=tuple(range(layers)),
        router="balanced",
        predicting_layers=config.get("num_mtp_modules") or 0,
    )


def _gpt_oss(config: JsonObject) -> Architecture:
    """Read gpt-oss. Unless `layer_types` says otherwise, every second layer has a
    window, the first included.
    """
    layers = range(size(config, "num_hidden_layers"))
    chosen = size(config, "num_experts_per_tok")
    alternating = ("sliding_attention", "full_attention")
    kinds = config.get("layer_types") or [alternating[i % 2] for i in layers]
    if chosen == 1:
        raise MegarlError("num_experts_per_tok=1 is not supported: the router has no effect")
    if len(kinds) != len(layers) or not set(alternating).issuperset(kinds):
        raise MegarlError(
            "layer_types is not supported: only sliding_attention and full_attention, one per layer"
        )
    windowed = tuple(i for i in layers if kinds[i] == "sliding_attention")
    only = {"attention_bias": True, "swiglu_alpha": 1.702}
    return replace(
        _decoder({"rope_theta": 150000.0, **config}, only, ("default", "yarn")),
        qkv_biases=True,
        biases=True,
        sinks=True,
        window=size(config, "sliding_window") if windowed else None,
        window_layers=windowed,
        glu_limit=float(config.get("swiglu_limit", 7.0)),
        experts=size(config, "num_local_experts"),
        experts_per_token=chosen,
        expert_feed_forward=size(config, "intermediate_size"),
        expert_layers=tuple(layers),
        router="softmax of the chosen",
    )


def _qwen3_5(config: JsonObject) -> Architecture:
    """Read Qwen3.5's dense language model from its own configuration. Every fourth
    layer has attention, with a gate; a part of each head is rotated. For text, the rows
    of its multimodal rotation are equal: it is an ordinary one.
    """
    if config.get("output_gate_type") not in (None, "silu", "swish"):
        raise MegarlError(f"output_gate_type={config['output_gate_type']!r} is not supported")
    # Before transformers 5, these were keys of `config`.
    rope: JsonObject = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share: float = (config | rope).get("partial_rotary_factor", 0.25)
    only = NO_BIAS | {"attn_output_gate": True}
    decoder = _decoder({"head_dim": 256, **config}, only, ("default",))
    return replace(
        decoder,
        rotated=int(decoder.head_dim * share),
        head_norms=True,
        delta=read_delta_layers(config),
        gated_attention=True,
        centered_norms=True,
        predicting_layers=config.get("mtp_num_hidden_layers") or 0,
    )


def _qwen3_5_moe(config: JsonObject) -> Architecture:
    """Read Qwen3.5 with experts in every layer, or Qwen3-Next. No layer has an MLP of
    its own, and config.json may lack an intermediate_size.
    """
    layers = size(config, "num_hidden_layers")
    chosen = size(config, "num_experts_per_tok")
    everywhere = {"norm_topk_prob": True, "decoder_sparse_step": 1}
    for key, value in everywhere.items():
        if config.get(key, value) != value:
            raise MegarlError(f"{key}={config[key]!r} is not supported, only {value!r}")
    if config.get("mlp_only_layers"):
        raise MegarlError("mlp_only_layers is not supported: only experts in every layer")
    if chosen == 1:
        raise MegarlError("num_experts_per_tok=1 is not supported: the router has no effect")
    inner = size(config, "shared_expert_intermediate_size")
    return replace(
        _qwen3_5(config | {"intermediate_size": inner}),
        experts=size(config, "num_experts"),
        experts_per_token=chosen,
        expert_feed_forward=size(config, "moe_intermediate_size"),
        shared_feed_forward=inner,
        gated_shared_expert=True,
        expert_layers=tuple(range(layers)),
        router="softmax of the chosen",
    )


def _qwen3_5_multimodal(config: JsonObject) -> Architecture:
    return _qwen3_5(_text_of(config))


def _qwen3_5_moe_multimodal(config: JsonObject) -> Architecture:
    return _qwen3_5_moe(_text_of(config))


def _text_of(config: JsonObject) -> JsonObject:
    """Return the language model's part of a multimodal config.json, which says outside
    of that part whether embedding and head are one matrix.
    """
    text: JsonObject = config["text_config"]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return text | {"tie_word_embeddings": tied}


GROUP_BEST = 2
"""DeepSeek-V3 ranks a group by the scores of this many experts, its best (arXiv
2412.19437, section 2.1.2).
"""
READERS: dict[str, Callable[[JsonObject], Architecture]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4_multimodal,
    "Qwen3NextForCausalLM": _qwen3_5_moe,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_multimodal,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe_multimodal,
}
"""Readers of config.json by the name in its `architectures`."""
REFUSED = {
    "KimiK25ForConditionalGeneration": (
        "Kimi K2.5 and K2.6 are released in INT4 only, from which nothing here makes bf16; Kimi K2"
        " is supported"
    )
}
"""Why an architecture has no reader, if that says more than its absence."""


def _decoder(
    config: JsonObject,
    only: JsonObject,
    ropes: Sequence[str] = ("default", "llama3"),
    latent: Latent | None = None,
) -> Architecture:
    """Read the fields that most architectures share. only: settings with the one value
    that is implemented. ropes: kinds of rotary embedding that both learner and server
    implement.
    """
    _check_only(config, {"hidden_act": "silu"} | only)
    heads = size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    head_dim = size(config, "head_dim", hidden // heads)
    # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and
    # rope_scaling.
    parameters: JsonObject = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **parameters}
    scaling = _rope_scaling(rope, ropes, latent is not None)
    return Architecture(
        name="",
        layers=size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=size(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        feed_forward=size(config, "intermediate_size"),
        vocabulary=size(config, "vocab_size"),
        context=size(config, "max_position_embeddings"),
        tied=config.get("tie_word_embeddings", False),
        epsilon=config["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rotated=head_dim,
        rope_scaling=scaling,
        latent=latent,
    )


def _check_only(config: JsonObject, only: JsonObject) -> None:
    """Raise MegarlError if a setting has another value than the one in `only`."""
    for key, value in only.items():
        if config.get(key, value) != value:
            raise MegarlError(f"{key}={config[key]!r} is not supported, only {value!r}")


def _rope_scaling(
    rope: JsonObject, ropes: Sequence[str], latent: bool
) -> RopeScaling | Yarn | None:
    """Read the change of the wavelengths, if any. ropes: the supported kinds."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ropes:
        raise MegarlError(f"rope_type {kind!r} is not supported; supported: {', '.join(ropes)}")
    if kind == "yarn":
        return _yarn(rope, latent)
    if kind != "llama3":
        return None
    return RopeScaling(
        factor=rope["factor"],
        low=rope["low_freq_factor"],
        high=rope["high_freq_factor"],
        original=rope["original_max_position_embeddings"],
    )


def _yarn(rope: JsonObject, latent: bool) -> Yarn:
    """Read YaRN as transformers does (modeling_rope_utils.py). latent: also read the
    factor on DeepSeek's attention scores. MegarlError if SGLang (yarn.py) would rotate
    differently.
    """
    factor = rope["factor"]
    scale = rope.get("mscale")
    all_dim = rope.get("mscale_all_dim")
    for key in ("attn_factor", "extrapolation_factor"):
        if rope.get(key, 1) != 1:
            raise MegarlError(
                f"{key}={rope[key]!r} of YaRN is not supported, only 1: transformers ignores it,"
                " SGLang does not"
            )
    if (scale is not None or all_dim is not None) and not (scale and all_dim):
        raise MegarlError(
            f"mscale={scale}, mscale_all_dim={all_dim} of YaRN is not supported: transformers and"
            " SGLang read one without the other differently; set both, or leave both out"
        )

    def grown(coefficient: float) -> float:
        if factor <= 1:
            return 1.0
        return 0.1 * coefficient * math.log(factor) + 1.0

    magnitude = grown(1.0)
    if scale and all_dim:
        magnitude = grown(scale) / grown(all_dim)
    stated = rope.get("attention_factor")
    if stated is not None and not math.isclose(stated, magnitude):
        raise MegarlError(
            f"attention_factor={stated!r} of YaRN is not supported, only {magnitude:.6g}, which"
            " follows from factor: SGLang ignores the key; leave it out"
        )
    return Yarn(
        factor=factor,
        fast=rope.get("beta_fast") or 32,
        slow=rope.get("beta_slow") or 1,
        original=int(rope["original_max_position_embeddings"]),
        truncate=rope.get("truncate", True),
        magnitude=magnitude,
        scores=grown(all_dim) ** 2 if latent and all_dim else 1.0,
    )
