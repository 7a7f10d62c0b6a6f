"""What SGLang would say late, or do wrongly without a word, of a recipe and its model. It imports nothing of a server, for the
supervisor asks it before one is started."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config, text_config
from megarl.core.recipe import Recipe

TEXT_ONLY = "Llama4ForCausalLM"
"""Loaded by our class everywhere: SGLang's own leaves its experts empty."""


def check(recipe: Recipe, cuda: bool) -> None:
    """What SGLang would say late or not at all: one MegarlError that names the key. cuda: servers have a GPU."""
    config = language_config(recipe)
    serving = recipe.serving
    longest = recipe.length.context_tokens
    limit = config.get("max_position_embeddings")
    _check_qwen(recipe, config)
    _check_llama4(recipe, config, longest, cuda)
    if limit is not None and limit < longest:
        raise MegarlError(
            f"length: prompt_tokens + thinking_tokens + answer_tokens is {longest}, but {recipe.model.path} has positions for "
            f"{limit} (max_position_embeddings in its config.json)"
        )
    if serving.kv_tokens is None and not cuda:
        raise MegarlError(
            "serving.kv_tokens: must be set on a machine without a GPU, or SGLang would take most of the memory; "
            f"about serving.max_running_requests x typical length, at least {longest}"
        )
    if serving.kv_tokens is not None and serving.kv_tokens < longest:
        raise MegarlError(
            f"serving.kv_tokens: {serving.kv_tokens} cannot hold one longest sequence of {longest} tokens (length.*)"
        )
    if serving.release_memory and cuda and find_spec("torch_memory_saver") is None:
        raise MegarlError(
            "serving.release_memory: needs the package torch_memory_saver, which is not installed; install it "
            "(pip install torch_memory_saver), or set it to false"
        )


def _check_qwen(recipe: Recipe, config: dict[str, Any]) -> None:
    """SGLang gives every layer of a Qwen3-MoE experts, and every Qwen2 the usual size of heads, whatever config.json says."""
    heads, hidden = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
    if config.get("model_type") == "qwen2" and config.get("head_dim") not in (None, hidden // heads):
        raise MegarlError(
            f"{recipe.model.path}: head_dim={config['head_dim']} in config.json: SGLang serves Qwen2 with heads of "
            f"hidden_size / num_attention_heads = {hidden // heads} and no others"
        )
    if config.get("model_type") == "qwen3_moe" and (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    ):
        raise MegarlError(
            f"{recipe.model.path}: mlp_only_layers and decoder_sparse_step in config.json: SGLang serves Qwen3-MoE with "
            "experts in every layer and no other arrangement"
        )


def _check_llama4(recipe: Recipe, config: dict[str, Any], longest: int, cuda: bool) -> None:
    """Where SGLang would serve another model than the directory has, without a word."""
    if config.get("model_type") != "llama4_text":
        return
    layers = range(config["num_hidden_layers"])
    rope = config.get("no_rope_layers") or [int((i + 1) % config.get("no_rope_layer_interval", 4) != 0) for i in layers]
    if list(rope[: len(layers)]) != [int((i + 1) % 4 != 0) for i in layers]:
        raise MegarlError(
            f"{recipe.model.path}: no_rope_layers in config.json: SGLang serves Llama 4 with every fourth layer without RoPE "
            "and no other arrangement"
        )
    step = config.get("interleave_moe_layer_step", 1)
    experts = config.get("moe_layers")
    if experts is not None and sorted(experts) != [i for i in layers if (i + 1) % step == 0]:
        raise MegarlError(
            f"{recipe.model.path}: moe_layers in config.json: SGLang puts experts where interleave_moe_layer_step={step} says"
        )
    chunk = config.get("attention_chunk_size")
    if cuda and chunk and chunk < longest and TEXT_ONLY in read_config(recipe.model.path).get("architectures", []):
        raise MegarlError(
            f"length: prompt_tokens + thinking_tokens + answer_tokens is {longest}, but on a GPU SGLang does not divide the "
            f"attention of {TEXT_ONLY} into chunks (attention_chunk_size={chunk}); start from the whole "
            "Llama4ForConditionalGeneration directory, or shorten length.*"
        )


def language_config(recipe: Recipe) -> dict[str, Any]:
    """Of the model's config.json, what is about the language model."""
    return text_config(read_config(recipe.model.path), Path(recipe.model.path) / "config.json")
