"""The tensors that a model's Hugging Face directory must have: names and shapes by
family.

They follow from the Architecture alone. megarl/core/models/families.py says what
megatron makes of them; a test compares both, and the files that transformers writes.

Qwen3-MoE, GLMs, DeepSeek-V3      gate_proj, up_proj, down_proj of each expert.
                                  transformers can also write stacks of them
                                  (`save_original_format=False`), which
                                  `with_experts_apart` divides without reading a value
MiniMax-M2                        w1, w3, w2 of each expert
Llama 4, gpt-oss                  always stacks, transposed
Qwen3.5                           released either way, with stacks as transformers
                                  writes them for the first line
"""

from collections.abc import Iterator, Mapping

from megarl.core.base.architecture import Architecture
from megarl.core.base.delta_layers import DeltaLayers
from megarl.core.base.safetensors_header import TensorInFile

type Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

MINIMAX_M2 = "MiniMaxM2ForCausalLM"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The maps of an MLP or an expert; MiniMax-M2's are those below."""
MINIMAX_PROJECTIONS = ("w1", "w3", "w2")
DECODER_PREFIXES = {
    "Llama4ForConditionalGeneration": "language_model.model.",
    "Qwen3_5ForConditionalGeneration": "model.language_model.",
    "Qwen3_5MoeForConditionalGeneration": "model.language_model.",
}
HEAD_PREFIXES = {"Llama4ForConditionalGeneration": "language_model."}
CARRIED = {
    "Llama4ForConditionalGeneration": ("vision_model.", "multi_modal_projector."),
    "Qwen3NextForCausalLM": ("mtp.",),
    "Qwen3_5ForCausalLM": ("mtp.",),
    "Qwen3_5ForConditionalGeneration": ("model.visual.", "mtp."),
    "Qwen3_5MoeForCausalLM": ("mtp.",),
    "Qwen3_5MoeForConditionalGeneration": ("model.visual.", "mtp."),
}
"""By the name in `architectures`, what `carried_prefixes` returns."""
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
"""Old versions of transformers stored them."""


def is_multimodal(model: Architecture) -> bool:
    """Return whether a vision tower belongs to the directory."""
    return model.name in DECODER_PREFIXES


def decoder_prefix(model: Architecture) -> str:
    """Return how the names of the language model's tensors begin, but the head's."""
    return DECODER_PREFIXES.get(model.name, "model.")


def head_name(model: Architecture) -> str:
    """Return the name of the head's tensor."""
    return HEAD_PREFIXES.get(model.name, "") + HEAD


def carried_prefixes(model: Architecture) -> tuple[str, ...]:
    """Return how the names of tensors begin that are not trained, but kept bit for bit:
    a vision tower, and layers for multi-token prediction, which follow the last one.
    """
    if model.name in CARRIED:
        return CARRIED[model.name]
    following = range(model.layers, model.layers + model.predicting_layers)
    return tuple(f"model.layers.{layer}." for layer in following)


def expected_shapes(model: Architecture) -> Shapes:
    """Return the shape of each tensor of the language model. A tied head is not among
    them.
    """
    prefix = decoder_prefix(model)
    shapes: Shapes = {
        f"{prefix}{EMBEDDING}": (model.vocabulary, model.hidden),
        f"{prefix}norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes[head_name(model)] = (model.vocabulary, model.hidden)
    with_experts = frozenset(model.expert_layers)
    for layer in range(model.layers):
        start = f"{prefix}layers.{layer}."
        shapes[start + "input_layernorm.weight"] = (model.hidden,)
        shapes[start + "post_attention_layernorm.weight"] = (model.hidden,)
        mixer = _attention(model)
        if model.delta and layer in model.delta.layers:
            mixer = _delta_network(model, model.delta)
        parts = mixer | _feed_forward(model, layer in with_experts)
        for name, shape in parts.items():
            shapes[start + name] = shape
    return shapes


def _attention(model: Architecture) -> Shapes:
    """Return the shapes of a layer's attention, by name within the layer."""
    shapes = _latent_projections(model) if model.latent else _projections(model)
    shapes["o_proj.weight"] = (model.hidden, model.attended)
    if model.biases:
        shapes["o_proj.bias"] = (model.hidden,)
    if model.sinks:
        shapes["sinks"] = (model.heads,)
    if model.head_norms:
        shapes |= {"q_norm.weight": (model.head_dim,), "k_norm.weight": (model.head_dim,)}
    if model.whole_norms:
        shapes |= {"q_norm.weight": (model.query,), "k_norm.weight": (model.key,)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _projections(model: Architecture) -> Shapes:
    """Return the shapes of a layer's projections to q, k and v."""
    query = 2 * model.query if model.gated_attention else model.query
    widths = {"q": query, "k": model.key, "v": model.value}
    shapes: Shapes = {}
    for name, width in widths.items():
        shapes[f"{name}_proj.weight"] = (width, model.hidden)
    if model.qkv_biases:
        for name, width in widths.items():
            shapes[f"{name}_proj.bias"] = (width,)
    return shapes


def _delta_network(model: Architecture, delta: DeltaLayers) -> Shapes:
    """Return the shapes of a layer's gated delta network, by name within the layer."""
    heads = delta.value_heads
    if model.name == "Qwen3NextForCausalLM":
        inputs = {"qkvz": delta.convolved + delta.value, "ba": 2 * heads}
    else:
        inputs = {"qkv": delta.convolved, "z": delta.value, "b": heads, "a": heads}
    shapes: Shapes = {
        "conv1d.weight": (delta.convolved, 1, delta.taps),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (delta.value_dim,),
        "out_proj.weight": (model.hidden, delta.value),
    }
    for name, width in inputs.items():
        shapes[f"in_proj_{name}.weight"] = (width, model.hidden)
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _latent_projections(model: Architecture) -> Shapes:
    """Return the shapes of the projections to q, k and v in latent attention, and of
    the norms between them.
    """
    latent = model.latent
    assert latent is not None
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (latent.shared + latent.position, model.hidden),
        "kv_a_layernorm.weight": (latent.shared,),
        "kv_b_proj.weight": (model.heads * (latent.content + latent.value), latent.shared),
    }
    if latent.query is None:
        return shapes | {"q_proj.weight": (model.query, model.hidden)}
    return shapes | {
        "q_a_proj.weight": (latent.query, model.hidden),
        "q_a_layernorm.weight": (latent.query,),
        "q_b_proj.weight": (model.query, latent.query),
    }


def _feed_forward(model: Architecture, with_experts: bool) -> Shapes:
    """Return the shapes of a layer's MLP, or of its router and experts, by name within
    the layer.
    """
    is_llama4 = model.name.startswith("Llama4")
    start = "feed_forward." if is_llama4 else "mlp."
    if not with_experts:
        return _gated_mlp(start, model.feed_forward, model.hidden)
    if model.biases:
        return _gpt_oss_experts(model, start)
    if model.name == MINIMAX_M2:
        return _minimax_experts(model)
    shared_name = "shared_expert."
    router_name = "router" if is_llama4 else "gate"
    shapes: Shapes = {f"{start}{router_name}.weight": (model.experts, model.hidden)}
    if model.router == "balanced":
        shared_name = "shared_experts."
        shapes[f"{start}gate.e_score_correction_bias"] = (model.experts,)
    if model.shared_feed_forward:
        shapes |= _gated_mlp(start + shared_name, model.shared_feed_forward, model.hidden)
    if model.gated_shared_expert:
        shapes[f"{start}shared_expert_gate.weight"] = (1, model.hidden)
    if is_llama4:
        return shapes | _llama4_stacks(model, start)
    return shapes | _separate_experts(model, start)


def _gated_mlp(
    start: str, inner: int, hidden: int, names: tuple[str, str, str] = PROJECTIONS
) -> Shapes:
    """Return the shapes of an MLP's gate, up and down, which have these names. start:
    how its tensors' names begin.
    """
    gate, up, down = names
    return {
        f"{start}{gate}.weight": (inner, hidden),
        f"{start}{up}.weight": (inner, hidden),
        f"{start}{down}.weight": (hidden, inner),
    }


def _minimax_experts(model: Architecture) -> Shapes:
    start = "block_sparse_moe."
    shapes: Shapes = {
        f"{start}gate.weight": (model.experts, model.hidden),
        f"{start}e_score_correction_bias": (model.experts,),
    }
    inner = model.expert_feed_forward
    for expert in range(model.experts):
        prefix = f"{start}experts.{expert}."
        shapes |= _gated_mlp(prefix, inner, model.hidden, MINIMAX_PROJECTIONS)
    return shapes


def _separate_experts(model: Architecture, start: str) -> Shapes:
    """Return the shapes of a layer's experts, each an MLP with tensors of its own."""
    shapes: Shapes = {}
    for expert in range(model.experts):
        shapes |= _gated_mlp(f"{start}experts.{expert}.", model.expert_feed_forward, model.hidden)
    return shapes


def _llama4_stacks(model: Architecture, start: str) -> Shapes:
    """Return the shapes of a layer's experts as stacks, transposed: [experts, input,
    output].
    """
    experts = model.experts
    hidden = model.hidden
    inner = model.expert_feed_forward
    return {
        f"{start}experts.gate_up_proj": (experts, hidden, 2 * inner),
        f"{start}experts.down_proj": (experts, inner, hidden),
    }


def _gpt_oss_experts(model: Architecture, start: str) -> Shapes:
    """Return the shapes of gpt-oss's router and stacked experts, with their biases.
    start: how their names begin.
    """
    experts = model.experts
    hidden = model.hidden
    inner = model.expert_feed_forward
    return _llama4_stacks(model, start) | {
        f"{start}router.weight": (experts, hidden),
        f"{start}router.bias": (experts,),
        f"{start}experts.gate_up_proj_bias": (experts, 2 * inner),
        f"{start}experts.down_proj_bias": (experts, hidden),
    }


def has_stacks_to_divide(model: Architecture, tensors: Mapping[str, TensorInFile]) -> bool:
    """Return whether experts are stacked that this family usually stores apart."""
    return any(name in tensors for _, name in _divisible_stacks(model))


def with_experts_apart(
    model: Architecture, tensors: Mapping[str, TensorInFile]
) -> dict[str, TensorInFile]:
    """Return the tensors with each stack of experts replaced by the tensors that it
    consists of. A stack of another shape than config.json says stays, and
    `expected_shapes` misses its parts.

    gate_up_proj [experts, 2 inner, hidden] has rows of gate before rows of up;
    down_proj is [experts, hidden, inner].
    """
    divided = dict(tensors)
    inner = model.expert_feed_forward
    hidden = model.hidden
    for start, name in _divisible_stacks(model):
        stack = tensors.get(name)
        is_down = name.endswith("down_proj")
        rows, columns = (hidden, inner) if is_down else (2 * inner, hidden)  # of one expert
        if stack is None or stack.shape != (model.experts, rows, columns):
            continue
        del divided[name]
        for expert in range(model.experts):
            first = expert * rows
            prefix = f"{start}{expert}."
            if is_down:
                divided[prefix + "down_proj.weight"] = stack.rows(first, (hidden, inner))
            else:
                divided[prefix + "gate_proj.weight"] = stack.rows(first, (inner, hidden))
                divided[prefix + "up_proj.weight"] = stack.rows(first + inner, (inner, hidden))
    return divided


def _divisible_stacks(model: Architecture) -> Iterator[tuple[str, str]]:
    """Yield the beginning of the experts' names and the name of a stack, for each there
    can be.
    """
    if model.biases or model.name == MINIMAX_M2 or model.name.startswith("Llama4"):
        return
    for layer in model.expert_layers:
        start = f"{decoder_prefix(model)}layers.{layer}.mlp.experts."
        yield start, f"{start}gate_up_proj"
        yield start, f"{start}down_proj"
