"""Tiny models in Hugging Face directories, made by transformers: the reference side of
the model tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:  # _saved imports it: processes that make no model start four seconds sooner
    from transformers import (
        DeepseekV3ForCausalLM,
        Glm4MoeForCausalLM,
        Glm4MoeLiteForCausalLM,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4ForConditionalGeneration,
        LlamaForCausalLM,
        MiniMaxM2ForCausalLM,
        Qwen2ForCausalLM,
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        Qwen3NextForCausalLM,
    )

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


EAGER: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": LLAMA3_ROPE,
} | EAGER


def tiny_llama(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> LlamaForCausalLM:
    """A Llama with random weights, none of them trivial (norms too), saved in `path`;
    `overrides` go to LlamaConfig.

    llama3 rope scaling, grouped queries and a head_dim other than hidden / heads unless
    overridden.
    """
    return _saved("LlamaForCausalLM", "LlamaConfig", COMMON | overrides, path, dtype, seed)


def tiny_qwen2(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen2ForCausalLM:
    """Likewise a Qwen2, with random biases on q, k and v."""
    return _saved("Qwen2ForCausalLM", "Qwen2Config", COMMON | overrides, path, dtype, seed)


def tiny_qwen3(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3ForCausalLM:
    """Likewise a dense Qwen3."""
    return _saved("Qwen3ForCausalLM", "Qwen3Config", COMMON | overrides, path, dtype, seed)


def tiny_qwen3_moe(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3MoeForCausalLM:
    """Likewise a Qwen3-MoE: 2 of 4 experts, their weights normalised."""
    moe = {
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return _saved(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", COMMON | moe | overrides, path, dtype, seed
    )


def tiny_llama4(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Llama4ForCausalLM:
    """Likewise a Llama 4 text model: 1 of 4 experts, a dense layer first, no rotation
    in the last, chunks of 16 positions, a temperature that grows every 8, queries
    grouped 8:1.
    """
    return _saved(
        "Llama4ForCausalLM", "Llama4TextConfig", COMMON | LLAMA4 | overrides, path, dtype, seed
    )


def tiny_llama4_multimodal(
    path: Path, seed: int = 0, **overrides: Any
) -> Llama4ForConditionalGeneration:
    """The same with a vision tower, as the released models are."""
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vision_output_dim": 16,
        "image_size": 28,
        "patch_size": 14,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = {"text_config": COMMON | LLAMA4 | overrides, "vision_config": vision}
    return _saved(
        "Llama4ForConditionalGeneration", "Llama4Config", config, path, torch.float32, seed
    )


LLAMA4: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [1, 2, 3],
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "rope_parameters": LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0},
}


def tiny_glm4_moe(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Glm4MoeForCausalLM:
    """Likewise a GLM-4.5: a dense layer first, 3 of 8 experts by a random bias and a
    shared one, half of each head rotated, biases of q, k and v, norms of heads.
    """
    config = (
        COMMON
        | BALANCED
        | {
            "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5},
            "n_group": 1,
            "topk_group": 1,
        }
    )
    config |= {"use_qk_norm": True, "attention_bias": True}
    return _saved("Glm4MoeForCausalLM", "Glm4MoeConfig", config | overrides, path, dtype, seed)


def tiny_glm4_moe_lite(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Glm4MoeLiteForCausalLM:
    """Likewise a GLM-4.7-Flash: narrow q, a v as wide as q and k, 3 of 8 experts, an
    epsilon other than its narrow norms', a dense layer first of which config.json says
    so only by `mlp_layer_types`.
    """
    config = COMMON | BALANCED | LATENT | {"v_head_dim": 24, "rope_parameters": PLAIN_ROPE}
    config |= {"n_group": 1, "topk_group": 1}
    del config["first_k_dense_replace"]
    return _saved(
        "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", config | overrides, path, dtype, seed
    )


def tiny_deepseek_v3(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> DeepseekV3ForCausalLM:
    """Likewise a DeepSeek-V3: 4 of 8 experts, in 2 of 4 groups; narrow q; YaRN; an
    epsilon other than its narrow norms'.
    """
    config = (
        COMMON
        | BALANCED
        | LATENT
        | {
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        }
    )
    return _saved(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", config | overrides, path, dtype, seed
    )


def tiny_minimax_m2(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> MiniMaxM2ForCausalLM:
    """Likewise a MiniMax-M2: norms of all heads together, half of each head rotated, 3
    of 8 experts by a random bias, in all layers, and none shared.
    """
    config = COMMON | {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.5},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _saved("MiniMaxM2ForCausalLM", "MiniMaxM2Config", config | overrides, path, dtype, seed)


def tiny_gpt_oss(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> GptOssForCausalLM:
    """Likewise a gpt-oss: 3 of 8 experts, windows of 16 positions in every second
    layer, YaRN from fractions of a pair on, biases and sinks that matter, gates that
    reach the limit.
    """
    oss: dict[str, Any] = {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "sliding_window": 16,
        "swiglu_limit": 0.9,
    }
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    oss["rope_parameters"] = yarn | {"truncate": False, "original_max_position_embeddings": 64}
    return _saved("GptOssForCausalLM", "GptOssConfig", COMMON | oss | overrides, path, dtype, seed)


def tiny_qwen3_5(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3_5ForCausalLM:
    """Likewise a Qwen3.5: gated delta networks in three layers, with two key heads for
    six value heads of another width, and gated attention in the fourth.
    """
    config = COMMON | DELTA | overrides
    return _saved_delta("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", config, path, dtype, seed)


def tiny_qwen3_5_multimodal(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3_5ForConditionalGeneration:
    """The same with a vision tower, as the released models are, and tied as the small
    ones are. Tensors for multi-token prediction lie beside the model's.
    """
    text = COMMON | DELTA | overrides
    config = EAGER | {"text_config": text, "vision_config": QWEN_VISION}
    config["tie_word_embeddings"] = True
    name = "Qwen3_5ForConditionalGeneration"
    model = _saved_delta(name, "Qwen3_5Config", config, path, dtype, seed)
    _release(path)
    return model


def tiny_qwen3_5_moe(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3_5MoeForCausalLM:
    """Likewise a Qwen3.5 with experts: 3 of 8 and a shared one, which has a gate."""
    config = COMMON | DELTA | GATED_EXPERTS | overrides
    del config["intermediate_size"]
    name = "Qwen3_5MoeForCausalLM"
    return _saved_delta(name, "Qwen3_5MoeTextConfig", config, path, dtype, seed)


def tiny_qwen3_5_moe_multimodal(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3_5MoeForConditionalGeneration:
    """The same with a vision tower, and as Qwen3.5-35B-A3B is released: experts in
    stacks, and tensors for multi-token prediction with experts one by one.
    """
    text = COMMON | DELTA | GATED_EXPERTS | overrides
    del text["intermediate_size"]
    config = EAGER | {"text_config": text, "vision_config": QWEN_VISION}
    name = "Qwen3_5MoeForConditionalGeneration"
    model = _saved_delta(name, "Qwen3_5MoeConfig", config, path, dtype, seed)
    _release(path)
    return model


def tiny_qwen3_next(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Qwen3NextForCausalLM:
    """Likewise a Qwen3-Next, whose directory has the same maps fused otherwise."""
    config = COMMON | DELTA | GATED_EXPERTS | overrides
    return _saved_delta("Qwen3NextForCausalLM", "Qwen3NextConfig", config, path, dtype, seed)


def _saved_delta(
    name: str, config_name: str, config: dict[str, Any], path: Path, dtype: torch.dtype, seed: int
) -> Any:
    """A model with gated delta networks, whose A_log and norm are in FP32 whatever the
    rest is, as in Qwen3.5's releases. Its weights are moderate: with wide ones
    transformers' float32 is 1e-4 from its own float64.
    """
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config_name)(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            if tensor_name.endswith("A_log"):
                parameter.uniform_(-4, 0, generator=generator)
            elif tensor_name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif tensor_name.endswith("norm.weight"):  # 1 + weight is the factor
                parameter.uniform_(-0.5, 0.5, generator=generator)
            elif tensor_name.endswith("dt_bias"):
                parameter.normal_(0, 0.5, generator=generator)
            elif "conv1d" in tensor_name:
                parameter.normal_(0, 0.4, generator=generator)
            else:
                parameter.normal_(0, 0.08, generator=generator)
    exact = {name: p.detach().clone() for name, p in model.named_parameters() if _is_exact(name)}
    model.to(dtype)
    for name, values in exact.items():
        model.get_parameter(name).data = values
    model.save_pretrained(path)
    # transformers 5.19 does not write the interval, and SGLang reads nothing else.
    stored = json.loads((path / "config.json").read_text())
    text = stored.get("text_config", stored)
    text["full_attention_interval"] = text["layer_types"].index("full_attention") + 1
    text["dtype"] = stored["dtype"]
    (path / "config.json").write_text(json.dumps(stored, indent=2))
    return model.eval()


def _is_exact(name: str) -> bool:
    return name.endswith(("A_log", "linear_attn.norm.weight"))


def _release(path: Path) -> None:
    """Rewrite a directory's tensors as those of the released models are: see
    `tiny_qwen3_5_moe_multimodal`.
    """
    stored = load_file(path / "model.safetensors")
    experts: dict[str, dict[str, torch.Tensor]] = {}
    released = {}
    for name, tensor in stored.items():
        layer, among_experts, rest = name.partition(".mlp.experts.")
        if among_experts:
            experts.setdefault(layer, {})[rest] = tensor
        else:
            released[name] = tensor
    for layer, parts in experts.items():
        count = 1 + max(int(rest.partition(".")[0]) for rest in parts)
        fused = []
        for e in range(count):
            halves = [parts[f"{e}.{kind}_proj.weight"] for kind in ("gate", "up")]
            fused.append(torch.cat(halves))
        down = [parts[f"{e}.down_proj.weight"] for e in range(count)]
        released[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(fused)
        released[f"{layer}.mlp.experts.down_proj"] = torch.stack(down)
        for rest, tensor in parts.items():
            released[f"mtp.layers.0.mlp.experts.{rest}"] = tensor + 1
    dtype = released["model.language_model.norm.weight"].dtype
    released["mtp.norm.weight"] = torch.full((8,), 0.25, dtype=dtype)
    save_file(released, path / "model.safetensors", metadata={"format": "pt"})


def stored_apart(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory with one file of weights, `with_experts_apart`."""
    return with_experts_apart(load_file(path / "model.safetensors"))


def with_experts_apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These tensors, Qwen3.5's stacks of experts one by one, as they are exported."""
    apart = {}
    for name, tensor in tensors.items():
        start, in_stack, projection = name.partition(".mlp.experts.")
        kinds = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(projection, ())
        if not in_stack or not kinds or not start.startswith("model.language_model."):
            apart[name] = tensor
            continue
        for e, expert in enumerate(tensor):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                apart[f"{start}.mlp.experts.{e}.{kind}_proj.weight"] = part
    return apart


MOONLIGHT: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.446,
}
"""What Moonlight has other than DeepSeek-V3; its rotation is plain, too."""
PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
CARD_YARN = PLAIN_ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""The keys that the model cards of Qwen2.5 and Qwen3 give."""
YARN = CARD_YARN | {
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DELTA: dict[str, Any] = {
    # Outputs of the first tokens can be near 0, and a smaller one would make noise of
    # their norms. It is not that of q and k, which is fixed.
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.25},
}
GATED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
BALANCED: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
}


def _saved(
    name: str, config_name: str, config: dict[str, Any], path: Path, dtype: torch.dtype, seed: int
) -> Any:
    """A model of transformers' class `name`, saved in `path`."""
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config_name)(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                wide = name.endswith(("sinks", "proj_bias", "o_proj.bias", "router.bias"))
                parameter.normal_(0, 0.5 if wide else 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.2, generator=generator)
    biases = {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith("correction_bias")
    }
    model.to(dtype)
    for name, bias in biases.items():  # fp32 in released models, whatever the rest is
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(path)
    return model.eval()


def gradients(model: torch.nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """The model's gradients under the names its tensors have on disk: in memory
    transformers fuses some. `path` is for them.
    """
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        model.save_pretrained(path)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return load_file(path / "model.safetensors")
