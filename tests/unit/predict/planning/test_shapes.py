"""Parameter counts against the published ones, and against the models that transformers
builds of the same config.json.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from megarl.core.base import architecture
from megarl.core.base.errors import MegarlError
from megarl.predict.planning.memory import kv_bytes
from tests.tiny import (
    MOONLIGHT,
    tiny_deepseek_v3,
    tiny_glm4_moe,
    tiny_glm4_moe_lite,
    tiny_gpt_oss,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_minimax_m2,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5,
    tiny_qwen3_5_moe,
    tiny_qwen3_5_moe_multimodal,
    tiny_qwen3_5_multimodal,
    tiny_qwen3_moe,
    tiny_qwen3_next,
)


def test_llama_3_1_8b_has_the_published_number_of_parameters() -> None:
    """8,030,261,248: the model card's 8.03B, and the total size of its safetensors
    index, 16,060,522,496 bytes of bf16.
    """
    shape = architecture.read("llama-3.1-8b")
    assert shape.parameters == 16_060_522_496 // 2
    assert shape.active_parameters == shape.parameters


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("qwen2.5-7b", 15_231_233_024 // 2, 7.62e9),
        ("qwen3-8b", 16_381_470_720 // 2, 8.2e9),
        ("qwen3-30b-a3b", 61_064_245_248 // 2, 3.3e9),
    ],
)
def test_qwens_have_the_published_numbers_of_parameters(
    name: str, parameters: int, active: float
) -> None:
    """Half the bytes of bf16 in their safetensors indices; active ones by the model
    cards.
    """
    shape = architecture.read(name)
    assert shape.parameters == parameters
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("gpt-oss-20b", 20.91e9, 3.61e9), ("gpt-oss-120b", 116.83e9, 5.13e9)],
)
def test_gpt_oss_have_the_published_numbers_of_parameters(
    name: str, parameters: float, active: float
) -> None:
    """Table 1 of the model card (arXiv 2508.10925), to all digits; the embedding is not
    counted as active there.
    """
    shape = architecture.read(name)
    assert shape.parameters == pytest.approx(parameters, abs=0.005e9)
    assert shape.active_parameters - shape.embedding_parameters == pytest.approx(
        active, abs=0.005e9
    )
    assert (shape.local_layers, shape.local_positions) == (shape.layers // 2, 128)


def test_scout_has_the_published_number_of_parameters() -> None:
    """109B in all with the vision tower, which is not counted here (about 1B); 17B
    active (model card).
    """
    shape = architecture.read("llama-4-scout")
    assert 107e9 < shape.parameters < 109e9
    assert 16.5e9 < shape.active_parameters < 17.5e9
    assert shape.local_layers == 36  # every fourth of 48 has no rotation and sees everything


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("glm-4.5", 355e9, 32e9),
        ("glm-4.5-air", 106e9, 12e9),
        ("deepseek-v3", 671e9, 37e9),
        ("moonlight-16b-a3b", 16e9, 3e9),
        ("kimi-k2", 1.03e12, 32e9),
        ("minimax-m2", 230e9, 10e9),
    ],
)
def test_balanced_models_have_the_published_numbers_of_parameters(
    name: str, parameters: float, active: float
) -> None:
    """In all and active, by the model cards (Kimi K2's says 1T), without the layers for
    multi-token prediction. Some cards count embedding and head as active and some do
    not.
    """
    shape = architecture.read(name)
    assert shape.parameters == pytest.approx(parameters, rel=0.015)
    assert shape.body_parameters <= 1.02 * active
    assert shape.active_parameters >= 0.97 * active


def test_glm_4_7_flash_is_a_30b_a3b() -> None:
    """As the model card calls it; without embedding and head 3.3 billion are active."""
    shape = architecture.read("glm-4.7-flash")
    assert round(shape.parameters / 1e9) == 30
    assert round(shape.body_parameters / 1e9) == 3


@pytest.mark.parametrize(
    ("name", "parameters", "body", "state_mib", "cached_kib"),
    [
        ("qwen3.5-9b", 9e9, 6.92e9, 49.1, 32),
        ("qwen3.5-27b", 27e9, 24.35e9, 146.8, 64),
        ("qwen3.5-35b-a3b", 35e9, 2.44e9, 61.4, 20),
        ("qwen3-next-80b-a3b", 80e9, 3.25e9, 73.7, 24),
    ],
)
def test_models_with_delta_networks_have_about_as_many_parameters_as_their_names_say(
    name: str, parameters: float, body: float, state_mib: float, cached_kib: float
) -> None:
    """Sizes of 9B, 35B-A3B and Next are transformers' defaults, those of 27B by slime's
    script for training it. The other figures were counted by hand from the sizes: what
    multiplies a token, MiB of a sequence's state in bf16, KiB of k and v a token.
    """
    shape = architecture.read(name)
    assert shape.parameters == pytest.approx(parameters, rel=0.015)
    assert shape.body_parameters == pytest.approx(body, rel=0.003)
    assert shape.state_bytes(2) / 2**20 == pytest.approx(state_mib, abs=0.05)
    assert kv_bytes(shape, 1, 2) == cached_kib * 1024


def test_deepseek_v3_has_exactly_the_published_number_of_parameters() -> None:
    """671,026,419,200 in the released files without layer 61, among them the routers'
    biases, which are not counted here.
    """
    assert architecture.read("deepseek-v3").parameters + 58 * 256 == 671_026_419_200


def test_narrow_keys_and_values_are_cached_as_they_are() -> None:
    """DeepSeek-V3: 512 + 64 numbers a token and layer (arXiv 2412.19437, section 4.2),
    on every GPU of a server.
    """
    shape = architecture.read("deepseek-v3")
    assert kv_bytes(shape, 1, 2) == kv_bytes(shape, 8, 2) == 61 * 576 * 2
    assert kv_bytes(architecture.read("glm-4.5"), 4, 2) == 92 * 2 * (8 // 4) * 128 * 2


MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, tied": (tiny_llama, {"tie_word_embeddings": True}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {}),
    "qwen3-moe": (tiny_qwen3_moe, {}),
    "qwen3-moe, some layers dense": (tiny_qwen3_moe, {"mlp_only_layers": [1]}),
    "qwen3-moe, every second layer": (tiny_qwen3_moe, {"decoder_sparse_step": 2}),
    "glm-4.5": (tiny_glm4_moe, {"first_k_dense_replace": 2}),
    "glm-4.5-air": (tiny_glm4_moe, {"use_qk_norm": False}),
    "glm-4.7-flash": (tiny_glm4_moe_lite, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}),
    "deepseek-v3": (tiny_deepseek_v3, {}),
    "moonlight": (tiny_deepseek_v3, MOONLIGHT),
    "minimax-m2": (tiny_minimax_m2, {}),
    "gpt-oss": (tiny_gpt_oss, {}),
    "gpt-oss, windows in no layer": (tiny_gpt_oss, {"layer_types": ["full_attention"] * 4}),
    "qwen3.5": (tiny_qwen3_5, {}),
    "qwen3.5, attention in every second layer": (tiny_qwen3_5, {"full_attention_interval": 2}),
    "qwen3.5, multimodal": (tiny_qwen3_5_multimodal, {}),
    "qwen3.5-moe": (tiny_qwen3_5_moe, {}),
    "qwen3.5-moe, multimodal": (tiny_qwen3_5_moe_multimodal, {}),
    "qwen3-next": (tiny_qwen3_next, {}),
    "llama4": (tiny_llama4, {}),
    "llama4, without chunks": (tiny_llama4, {"attention_chunk_size": None}),
    "llama4, multimodal": (tiny_llama4_multimodal, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    make, overrides = MODELS[name]
    model = make(tmp_path, **overrides)
    elsewhere = (
        "vision_model.",
        "multi_modal_projector.",
        "model.vision_model.",
        "model.visual.",
        "model.multi_modal_projector.",
    )
    real = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(elsewhere))
    assert architecture.read(str(tmp_path)).parameters == real


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Which have experts, which do not rotate q and k,
    and which attend within chunks.
    """
    make, overrides = MODELS[name]
    modules = make(tmp_path, **overrides).named_modules()
    layers = [
        module for path, module in modules if re.search(r"^(?!.*vision).*\.layers\.\d+$", path)
    ]
    experts = [
        any(path.endswith("experts") for path, _ in layer.named_modules()) for layer in layers
    ]
    with_delta = [hasattr(layer, "linear_attn") for layer in layers]
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    rotated = [getattr(attention, "use_rope", True) for attention in attentions]
    found = architecture.read(str(tmp_path))
    assert found.layers == len(layers)
    assert found.expert_layers == tuple(i for i, has in enumerate(experts) if has)
    assert found.unrotated_layers == tuple(i for i, turns in enumerate(rotated) if not turns)
    assert found.delta_layers == tuple(i for i, has in enumerate(with_delta) if has)
    assert found.attention_layers == len(layers) - sum(with_delta)
    windows = [getattr(attention, "sliding_window", None) for attention in attentions]
    windowed = [window is not None for window in windows]
    assert found.local_layers == (
        sum(rotated) if name in ("llama4", "llama4, multimodal") else sum(windowed)
    )
    assert found.window_layers == tuple(i for i, has in enumerate(windowed) if has)


SAME = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "epsilon": "rms_norm_eps",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in architecture.CONFIGS.glob("*.json")))
def test_what_is_not_written_is_what_transformers_takes(name: str) -> None:
    """The configurations that come with megarl leave most of a config.json out."""
    config = json.loads((architecture.CONFIGS / f"{name}.json").read_text())
    found = architecture.read(name)
    text = CONFIG_MAPPING[config["model_type"]](**config).get_text_config()
    assert {ours: getattr(found, ours) for ours in SAME} == {
        ours: getattr(text, key) for ours, key in SAME.items()
    }
    if found.latent is None:
        assert found.head_dim == (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
    assert found.rope_theta == text.rope_parameters["rope_theta"]
    if config["model_type"] == "gpt_oss":
        assert (found.glu_limit, found.window) == (text.swiglu_limit, text.sliding_window)
        assert found.window_layers == tuple(
            i for i, kind in enumerate(text.layer_types) if kind == "sliding_attention"
        )
    if found.delta:
        kinds = enumerate(text.layer_types)
        assert found.delta_layers == tuple(i for i, kind in kinds if kind == "linear_attention")
        assert found.rotated == found.head_dim * text.rope_parameters["partial_rotary_factor"]
    if config["model_type"] == "llama4":
        assert found.expert_layers == tuple(text.moe_layers)
        assert found.unrotated_layers == tuple(
            i for i, turns in enumerate(text.no_rope_layers) if not turns
        )
        assert found.temperature == (text.floor_scale, text.attn_scale)
        assert (found.l2_norms, found.attention_chunk) == (
            text.use_qk_norm,
            text.attention_chunk_size,
        )


def test_active_parameters_leave_out_experts_that_are_not_chosen(tmp_path: Path) -> None:
    model = tiny_qwen3_moe(tmp_path)
    shape = architecture.read(str(tmp_path))
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert shape.routed_parameters == experts
    assert shape.parameters - shape.active_parameters == experts * (4 - 2) // 4  # 2 of 4 are chosen


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(MegarlError, match=r"llama-3.1-8b, llama-4-scout"):
        architecture.read("llama-9b")
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(MegarlError, match="not JSON"):
        architecture.read(str(config))
    config.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(
        MegarlError, match=r"GPT2LMHeadModel is not supported; supported: .*LlamaForCausalLM"
    ):
        architecture.read(str(tmp_path))
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}))
    with pytest.raises(MegarlError, match="'hidden_size' is missing"):
        architecture.read(str(tmp_path))
