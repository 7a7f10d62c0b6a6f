"""What is asked of SGLang for a model with gated delta networks (Qwen3.5, Qwen3-Next).

For each request a server keeps, besides the keys and values of attention layers, a
state of each delta network (base/delta_layers.py), which every token changes. SGLang
calls it a Mamba state, and has a fixed number of slots for it, several a request:

    of the running request              1
    of beginnings that others continue  2    its prefix cache can use a beginning only
                                             where a state was kept
    being written beside the next step  2    on a GPU (`extra_buffer`)

On a CPU it can keep states only where a request has ended (`no_buffer`), and only if
it does not prepare a step while another one runs. So a request that continues another
one finds its beginning there, but one with the same prompt computes it again.
"""

import json
from collections.abc import Sequence

from megarl.core.base.architecture import Architecture
from megarl.core.base.errors import MegarlError
from megarl.core.client.servable import running_requests, state_slots
from megarl.core.recipe import Recipe

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by model.dtype."""
MIB_A_GIB = 1024
TEXT_CLASSES = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""The class that serves the language model of a multimodal directory
(sglang_models/qwen3_5.py).
"""


def state_arguments(recipe: Recipe, model: Architecture, cuda: bool) -> dict[str, object]:
    """Return the ServerArgs for a model with delta networks; empty for others."""
    if model.delta is None:
        return {}
    arguments: dict[str, object] = {
        "json_model_override_args": json.dumps(overrides(model)),
        # Else SGLang would want the image processor of a multimodal directory.
        "enable_multimodal": False,
        # By default SGLang takes nine tenths of the KV cache's memory, on a CPU too.
        "max_mamba_cache_size": state_slots(recipe, cuda),
    }
    if cuda:
        arguments["mamba_radix_cache_strategy"] = "extra_buffer"
        # By default FlashInfer computes prompts on Hopper. Our figures are Triton's.
        arguments["linear_attn_prefill_backend"] = "triton"
    else:
        arguments["mamba_radix_cache_strategy"] = "no_buffer"
        arguments["disable_overlap_schedule"] = True
    return arguments


def overrides(model: Architecture) -> dict[str, object]:
    """Return what SGLang is to read instead of config.json's values.

    It needs full_attention_interval, which transformers 5 does not write; and for our
    class the name of the text model, and whether head and embedding are one, which
    multimodal directories say in one of two places. Of Qwen3-Next it ignores
    rope_parameters, where transformers 5 writes base and share of the rotation.
    """
    interval = {"full_attention_interval": model.delta.interval} if model.delta else {}
    changed: dict[str, object] = {
        "architectures": [TEXT_CLASSES.get(model.name, model.name)],
        "tie_word_embeddings": model.tied,
    }
    if model.name in TEXT_CLASSES:
        return changed | {"text_config": interval}
    if model.name == "Qwen3NextForCausalLM":
        changed["rope_theta"] = model.rope_theta
        changed["partial_rotary_factor"] = model.rotated / model.head_dim
    return changed | interval


def state_environment(recipe: Recipe, model: Architecture) -> dict[str, str]:
    """Return environment variables for a model with delta networks, none for others."""
    if model.delta is None:
        return {}
    return {
        # The kept inputs of the convolution: bfloat16 by default, whatever the model's
        # type is.
        "SGLANG_MAMBA_CONV_DTYPE": DTYPES[recipe.model.dtype],
        # Whatever config.json says: the error of a state in bf16 grows with each token.
        "SGLANG_MAMBA_SSM_DTYPE": "float32",
        # Else other slots per request than `state_slots` counts.
        "SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "0",
    }


def check_state_room(
    recipe: Recipe, model: Architecture, memory: Sequence[tuple[int, int]]
) -> None:
    """Raise MegarlError if weights and slots for states alone do not fit on a server's
    GPUs. memory: (free, total) MiB of each.
    """
    slots = state_slots(recipe, cuda=True)
    ranks = recipe.resources.server_tensor_parallel
    width = WIDTHS[recipe.model.dtype]
    states = slots * model.state_bytes(width) / ranks / 2**30
    weights = model.parameters * width / ranks / 2**30
    free = min(mebibytes for mebibytes, _ in memory) / MIB_A_GIB
    if states + weights < free:
        return
    raise MegarlError(
        f"serving.max_running_requests: {running_requests(recipe)} requests at once, those for"
        f" parity included, need {slots} slots for states of delta networks, {states:.1f} GiB of"
        f" each GPU beside {weights:.1f} GiB of weights, and {free:.1f} GiB are free; lower it, or"
        " raise resources.server_tensor_parallel"
    )


def check_states(recipe: Recipe, model: Architecture, most_running: int) -> None:
    """Raise MegarlError if SGLang has states for fewer requests than it is to run at
    once, about which it only warns. most_running: requests that it runs at most.
    """
    needed = running_requests(recipe)
    if model.delta is None or most_running >= needed:
        return
    raise MegarlError(
        f"serving.max_running_requests: SGLang runs at most {most_running} requests at once, not"
        f" {needed}: its slots for states of delta networks are too few; is its version the one in"
        " requirements/?"
    )
