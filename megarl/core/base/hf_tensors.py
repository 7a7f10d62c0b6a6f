"""The tensors that a model's Hugging Face directory must have: names and shapes by
family.

They follow from the Architecture alone. megarl/core/models/families.py says what
megatron makes of them; a test compares both, and the files that transformers writes.

Qwen3-MoE, GLM-4.5, DeepSeek-V3   gate_proj, up_proj, down_proj of each expert.
                                  transformers can also write stacks of them
                                  (`save_original_format=False`), which
                                  `with_experts_apart` divides without reading a value
Llama 4, gpt-oss                  always stacks, transposed
"""

from collections.abc import Iterator, Mapping

from megarl.core.base.architecture import Architecture
from megarl.core.base.safetensors_header import TensorInFile

type Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""

MULTIMODAL = "Llama4ForConditionalGeneration"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
"""Old versions of transformers stored them."""


def text_prefix(model: Architecture) -> str:
    """Return what precedes the names of the language model's tensors."""
    return "language_model." if model.name == MULTIMODAL else ""


def carried_prefixes(model: Architecture) -> tuple[str, ...]:
    """Return how the names of tensors begin that are not trained, but kept bit for bit:
    a vision tower, and layers for multi-token prediction, which follow the last one.
    """
    if model.name == MULTIMODAL:
        return ("vision_model.", "multi_modal_projector.")
    following = range(model.layers, model.layers + model.predicting_layers)
    return tuple(f"model.layers.{layer}." for layer in following)


def expected_shapes(model: Architecture) -> Shapes:
    """Return the shape of each tensor of the language model. A tied head is not among
    them.
    """
    prefix = text_prefix(model)
    shapes: Shapes = {
        f"{prefix}model.{EMBEDDING}": (model.vocabulary, model.hidden),
        f"{prefix}model.norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes[f"{prefix}{HEAD}"] = (model.vocabulary, model.hidden)
    with_experts = frozenset(model.expert_layers)
    for layer in range(model.layers):
        start = f"{prefix}model.layers.{layer}."
        shapes[start + "input_layernorm.weight"] = (model.hidden,)
        shapes[start + "post_attention_layernorm.weight"] = (model.hidden,)
        parts = _attention(model) | _feed_forward(model, layer in with_experts)
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
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _projections(model: Architecture) -> Shapes:
    """Return the shapes of a layer's projections to q, k and v."""
    widths = {"q": model.query, "k": model.key, "v": model.value}
    shapes: Shapes = {}
    for name, width in widths.items():
        shapes[f"{name}_proj.weight"] = (width, model.hidden)
    if model.qkv_biases:
        for name, width in widths.items():
            shapes[f"{name}_proj.bias"] = (width,)
    return shapes


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
    shared_name = "shared_expert."
    router_name = "router" if is_llama4 else "gate"
    shapes: Shapes = {f"{start}{router_name}.weight": (model.experts, model.hidden)}
    if model.router == "balanced":
        shared_name = "shared_experts."
        shapes[f"{start}gate.e_score_correction_bias"] = (model.experts,)
    if model.shared_feed_forward:
        shapes |= _gated_mlp(start + shared_name, model.shared_feed_forward, model.hidden)
    if is_llama4:
        return shapes | _llama4_stacks(model, start)
    return shapes | _separate_experts(model, start)


def _gated_mlp(start: str, inner: int, hidden: int) -> Shapes:
    """Return the shapes of an MLP. start: how its tensors' names begin."""
    return {
        f"{start}gate_proj.weight": (inner, hidden),
        f"{start}up_proj.weight": (inner, hidden),
        f"{start}down_proj.weight": (hidden, inner),
    }


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
    if model.biases or model.name.startswith("Llama4"):
        return
    for layer in model.expert_layers:
        start = f"model.layers.{layer}.mlp.experts."
        yield start, f"{start}gate_up_proj"
        yield start, f"{start}down_proj"
