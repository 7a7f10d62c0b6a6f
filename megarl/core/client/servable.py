"""Recipes and models that SGLang would refuse late, or serve wrongly without a message.

This module imports no server code, because the supervisor calls it before any server
starts.
"""

import sys
from collections.abc import Collection
from importlib.util import find_spec

from megarl.core.base.architecture import Architecture, in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import PARITY_ROLLOUTS
from megarl.core.recipe import Recipe
from megarl.core.recipe.model import FP8_BLOCK
from megarl.core.recipe.servers import Serving

TEXT_ONLY = "Llama4ForCausalLM"
"""The text-only Llama 4. Our class loads it everywhere, because SGLang's own leaves its
experts empty.
"""
INNER_MULTIPLE = 32
"""On a CPU SGLang pads the inner dimension of a gated MLP to a multiple of this, but
not the experts of gpt-oss, whose biases it would have to pad as well.
"""
DELTA = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
OWN_EVERYWHERE = (
    TEXT_ONLY,
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MiniMaxM2ForCausalLM",
    "GptOssForCausalLM",
    *DELTA,
)
"""Architectures for which servers use our class in sglang_models/ even on a GPU."""


def check(recipe: Recipe, cuda: bool) -> None:
    """Raise MegarlError, naming the recipe's key, if SGLang cannot serve this
    correctly. cuda: the servers have GPUs.
    """
    path = recipe.model.path
    model = in_directory(path)
    longest = recipe.length.context_tokens
    _check_qwen(path, model)
    _check_llama4(path, model, longest, cuda)
    if problem := experts_problem(recipe, model, recipe.expert_ranks):
        raise MegarlError(f"serving.expert_parallel: {path}: {problem}")
    if problem := copies_problem(recipe, model):
        raise MegarlError(f"serving.attention_copies: {path}: {problem}")
    ranks = recipe.resources.server_tensor_parallel if cuda else 1
    indivisible = undivided(model, ranks, recipe.serving)
    if indivisible:  # every rank would end with an assertion
        fewer_ranks = range(ranks - 1, 0, -1)
        usable = next(n for n in fewer_ranks if not undivided(model, n, recipe.serving))
        raise MegarlError(
            f"resources.server_tensor_parallel: SGLang cannot divide the {indivisible} of {path}"
            f" among a server's {ranks} GPUs; use {usable} or another divisor"
        )
    check_fp8(recipe, model, ranks, cuda)
    if model.sinks and cuda and recipe.model.dtype != "bf16":
        raise MegarlError(
            f"model.dtype: {recipe.model.dtype}: SGLang's GPU kernels take attention sinks in bf16"
            " only"
        )
    inner = model.expert_feed_forward
    if model.biases and not cuda and inner % INNER_MULTIPLE:
        raise MegarlError(
            f"{path}: SGLang on a CPU cannot load experts of intermediate_size={inner}, which is no"
            f" multiple of {INNER_MULTIPLE}; serve it on a GPU"
        )
    if cuda and recipe.model.dtype == "fp32":
        advice = "set one of them, or CUDA_VISIBLE_DEVICES= to train a tiny model on the CPU"
        raise MegarlError(
            f"model.dtype: fp32: SGLang's attention on a GPU takes bf16 and fp16; {advice}"
        )
    _check_lengths(recipe, model, cuda)
    if recipe.lends_memory and cuda and find_spec("torch_memory_saver") is None:
        raise MegarlError(
            "resources.colocate: to lend memory to the learner needs the package"
            " torch_memory_saver, which is not installed; install it (pip install"
            " torch_memory_saver)"
        )


def _check_lengths(recipe: Recipe, model: Architecture, cuda: bool) -> None:
    """Refuse sequences that are longer than the model's context or a server's cache."""
    serving = recipe.serving
    path = recipe.model.path
    longest = recipe.length.context_tokens
    if model.context < longest:
        raise MegarlError(
            f"length: prompt_tokens + thinking_tokens + answer_tokens is {longest}, but {path} has"
            f" positions for {model.context} (max_position_embeddings in its config.json)"
        )
    if serving.kv_tokens is None and not cuda:
        raise MegarlError(
            "serving.kv_tokens: must be set on a machine without a GPU, or SGLang would take most"
            " of the memory; about serving.max_running_requests x typical length, at least"
            f" {longest}"
        )
    room = serving.sequence_kv_tokens
    if room is not None and room < longest:
        share = ""
        if serving.attention_copies > 1:
            share = f" for each copy of the attention (serving.attention_copies), {room},"
        raise MegarlError(
            f"serving.kv_tokens: {serving.kv_tokens}{share} cannot hold one longest sequence of"
            f" {longest} tokens (length.*)"
        )


WITH_WHOLE_EXPERTS = (
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
"""Architectures whose experts a server's GPUs may have whole. Llama 4 and gpt-oss,
whose directories have stacks of experts, were not tried.
"""


def experts_problem(recipe: Recipe, model: Architecture, ranks: int) -> str:
    """Return why servers of `ranks` GPUs cannot have whole experts of this model on
    each, as the recipe asks; empty if they can.
    """
    if not recipe.serving.expert_parallel:
        return ""
    if not model.experts:
        return "the model has no experts; set it to false"
    if model.name not in WITH_WHOLE_EXPERTS:
        return f"is for {', '.join(WITH_WHOLE_EXPERTS)}, not {model.name}; set it to false"
    if model.experts % ranks:
        return (
            f"SGLang cannot divide {model.experts} experts among a server's {ranks} GPUs; use a"
            " divisor of them (resources.server_tensor_parallel), or set it to false"
        )
    return ""


WITH_COPIES = ("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
"""Architectures of which a server may have several copies of the attention. Others were
not tried.
"""


def copies_problem(recipe: Recipe, model: Architecture) -> str:
    """Return why servers cannot have as many copies of this model's attention as the
    recipe asks for; empty if they can.
    """
    if recipe.serving.attention_copies == 1 or model.name in WITH_COPIES:
        return ""
    return f"is for {', '.join(WITH_COPIES)}, not {model.name}; set it to 1"


IN_FP8 = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose FP8 parameters are joined Hugging Face tensors and nothing else
(served.py). From DeepSeek-V3's kv_b_proj SGLang derives further ones, of Llama 4 it
reorders rows; GLM-4.5 and gpt-oss were not tried.
"""
FP8_CAPABILITY = 8.9
"""The first compute capability with FP8 products. On earlier GPUs SGLang packs FP8
weights for bf16 products (Marlin).
"""


def check_fp8(recipe: Recipe, model: Architecture, ranks: int, cuda: bool) -> None:
    """Raise MegarlError if servers of `ranks` GPUs cannot compute this model in FP8 as
    the recipe asks.
    """
    keys = recipe.serving.fp8_keys
    if keys and not cuda:
        raise MegarlError(
            f"{keys[0]}: SGLang has FP8 only on GPUs, and these servers have none; leave it out"
        )
    if problem := fp8_problem(recipe, model, ranks):
        raise MegarlError(f"{keys[0]}: {recipe.model.path}: {problem}; leave it out")


def fp8_problem(recipe: Recipe, model: Architecture, ranks: int) -> str:
    """Return why servers of `ranks` GPUs cannot have this model in FP8 as the recipe
    asks; empty if they can.
    """
    if recipe.serving.fp8_keys and model.name not in IN_FP8:
        return f"FP8 is for {', '.join(IN_FP8)}, not {model.name}"
    if recipe.serving.quantization != "fp8":
        return ""
    width = unquantisable(model, ranks, recipe.serving.expert_parallel)
    if not width:
        return ""
    return (
        f"{width} on each of a server's GPUs ({ranks}), which is no multiple of a block's"
        f" {FP8_BLOCK}"
    )


def unquantisable(model: Architecture, ranks: int, whole_experts: bool) -> str:
    """Return a width on each of `ranks` GPUs that is no multiple of a block, such as
    `hidden_size is 576`; empty if all are. whole_experts: each GPU has some of the
    experts, and not a part of each. SGLang joins q, k and v, and gate and up, in
    whole blocks (`validate_block_quant_shapes` and `create_fp8_moe_weight_` in its
    fp8.py), and quantises activations in groups of a block
    (`per_token_group_quant_fp8`).
    """
    sizes = [
        ("hidden_size", model.hidden),
        ("the width of q", model.query // ranks),
        ("the width of k", max(model.key // ranks, model.head_dim)),
    ]
    if model.moe_layers < model.layers:
        sizes.append(("the width of an MLP", model.feed_forward // ranks))
    if model.experts:
        expert_parts = 1 if whole_experts else ranks
        sizes.append(("the width of an expert", model.expert_feed_forward // expert_parts))
    return next((f"{name} is {size}" for name, size in sizes if size % FP8_BLOCK), "")


def without_fp8(recipe: Recipe, capabilities: Collection[str]) -> str:
    """Return why GPUs of these compute capabilities cannot serve in FP8 as the recipe
    asks; empty if they can.
    """
    lowest = min(capabilities, key=float, default="")
    if not recipe.serving.fp8_keys or not lowest or float(lowest) >= FP8_CAPABILITY:
        return ""
    advice = f"use GPUs of {FP8_CAPABILITY} or more (L40S, H100, B200), or leave it out"
    return (
        f"{recipe.serving.fp8_keys[0]}: a GPU of compute capability {lowest} has no FP8 products;"
        f" {advice}"
    )


STATES_ON_GPU = 5
STATES_ON_CPU = 3
"""Slots for states that SGLang has for each running request (engine/states.py)."""


def running_requests(recipe: Recipe) -> int:
    """Return how many requests SGLang is to run at once, in all copies of the attention
    together. In none may scoring for parity wait for a place: as a rollout ends, and
    after a publication.
    """
    scorings = 2 * PARITY_ROLLOUTS * recipe.serving.attention_copies
    return recipe.serving.max_running_requests + scorings


def state_slots(recipe: Recipe, cuda: bool) -> int:
    """Return a server's slots for states of delta networks. cuda: it has a GPU."""
    slots = STATES_ON_GPU if cuda else STATES_ON_CPU
    return slots * running_requests(recipe)


def undivided(model: Architecture, ranks: int, serving: Serving) -> str:
    """Return what of the model SGLang cannot divide among a server's GPUs, such as `28
    attention heads`; empty if nothing. It copies heads of k and v to several GPUs if
    there are more of these.
    """
    heads_ranks = max(1, ranks // serving.attention_copies)
    if model.heads % heads_ranks:
        return f"{model.heads} attention heads"
    dense = model.feed_forward if model.moe_layers < model.layers else 0
    sizes = [(dense, "columns of an MLP")]
    if serving.expert_parallel:
        sizes.append((model.experts, "experts"))
    else:
        sizes.append((model.expert_feed_forward, "columns of an expert"))
    sizes.append((model.shared_feed_forward, "columns of a shared expert"))
    if model.delta:
        sizes.append((model.delta.key_heads, "key heads of a delta network"))
    if not model.latent and heads_ranks % model.groups and model.groups % heads_ranks:
        return f"{model.groups} key-value heads"
    return next((f"{size} {name}" for size, name in sizes if size % ranks), "")


def positions(recipe: Recipe) -> int:
    """Return how many tokens of one sequence a server has room for:
    `length.context_tokens` or more (`check`).
    """
    context = in_directory(recipe.model.path).context
    return min(context, recipe.serving.sequence_kv_tokens or sys.maxsize)


def check_kernels() -> None:
    """Raise MegarlError if a server with a GPU could not import its kernels. `make
    setup` does not install them.
    """
    if find_spec("sgl_kernel") is None:
        raise MegarlError(
            "SGLang's kernels for GPUs (the package sglang-kernel) are not installed; install"
            " requirements/gpu.txt or run the roles in the container (docs/how-to/install.md), or set"
            " CUDA_VISIBLE_DEVICES= to train a tiny model on the CPU"
        )


def check_gpus(recipe: Recipe, capabilities: Collection[str]) -> None:
    """Raise MegarlError if SGLang's attention on GPUs of these compute capabilities
    ("9.0") is not the model's, or if they lack the FP8 products that the recipe asks
    for.
    """
    if problem := attention_problem(
        in_directory(recipe.model.path), recipe.length.context_tokens, capabilities
    ):
        raise MegarlError(problem)
    if problem := without_fp8(recipe, capabilities):
        raise MegarlError(problem)


def attention_problem(model: Architecture, longest: int, capabilities: Collection[str]) -> str:
    """Return why SGLang's attention to `longest` tokens is not the model's on such
    GPUs; empty if it is. Of its kernels only those for Hopper divide Llama 4's
    attention into chunks.
    """
    in_one_chunk = not model.attention_chunk or model.attention_chunk >= longest
    others = [capability for capability in capabilities if not capability.startswith("9.")]
    if in_one_chunk or not others:
        return ""
    return (
        f"length: prompt_tokens + thinking_tokens + answer_tokens is {longest}, but on a GPU of"
        f" compute capability {min(others)} SGLang does not divide Llama 4's attention into"
        f" chunks (attention_chunk_size={model.attention_chunk}), only on Hopper (9.0: H100, H200);"
        " serve there, or shorten length.*"
    )


def _check_qwen(path: str, model: Architecture) -> None:
    """Refuse settings in config.json that SGLang ignores."""
    usual = model.hidden // model.heads
    if model.name == "Qwen2ForCausalLM" and model.head_dim != usual:
        raise MegarlError(
            f"{path}: head_dim={model.head_dim} in config.json: SGLang serves Qwen2 with heads of"
            f" hidden_size / num_attention_heads = {usual} and no others"
        )
    if model.name == "Qwen3MoeForCausalLM" and model.moe_layers < model.layers:
        raise MegarlError(
            f"{path}: mlp_only_layers and decoder_sparse_step in config.json: SGLang serves"
            " Qwen3-MoE with experts in every layer and no other arrangement"
        )


def _check_llama4(path: str, model: Architecture, longest: int, cuda: bool) -> None:
    """Refuse Llama 4 directories that SGLang would serve as another model."""
    if not model.name.startswith("Llama4"):
        return
    if model.unrotated_layers != tuple(range(3, model.layers, 4)):
        raise MegarlError(
            f"{path}: no_rope_layers in config.json: SGLang serves Llama 4 with every fourth layer"
            " without RoPE and no other arrangement"
        )
    step = model.expert_step
    chunk = model.attention_chunk
    if model.expert_layers != tuple(range(step - 1, model.layers, step)):
        raise MegarlError(
            f"{path}: moe_layers in config.json: SGLang puts experts where"
            f" interleave_moe_layer_step={step} says"
        )
    if cuda and chunk and chunk < longest and model.name == TEXT_ONLY:
        raise MegarlError(
            f"length: prompt_tokens + thinking_tokens + answer_tokens is {longest}, but on a GPU"
            f" SGLang does not divide the attention of {TEXT_ONLY} into chunks"
            f" (attention_chunk_size={chunk}); start from the whole Llama4ForConditionalGeneration"
            " directory, or shorten length.*"
        )
