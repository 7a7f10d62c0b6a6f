"""Parameter counts against the published ones, and against the models that transformers builds of the same config.json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.core.base import architecture
from megarl.core.base.errors import MegarlError
from tests.tiny import tiny_llama, tiny_llama4, tiny_llama4_multimodal, tiny_qwen2, tiny_qwen3, tiny_qwen3_moe


def test_llama_3_1_8b_has_the_published_number_of_parameters() -> None:
    """8,030,261,248: the model card's 8.03B, and the total size of its safetensors index, 16,060,522,496 bytes of bf16."""
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
def test_qwens_have_the_published_numbers_of_parameters(name: str, parameters: int, active: float) -> None:
    """Half the bytes of bf16 in their safetensors indices; active ones by the model cards."""
    shape = architecture.read(name)
    assert shape.parameters == parameters
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


def test_scout_has_the_published_number_of_parameters() -> None:
    """109B in all with the vision tower, which is not counted here (about 1B); 17B active (model card)."""
    shape = architecture.read("llama-4-scout")
    assert 107e9 < shape.parameters < 109e9
    assert 16.5e9 < shape.active_parameters < 17.5e9
    assert shape.local_layers == 36  # every fourth of 48 has no rotation and sees everything


MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, tied": (tiny_llama, {"tie_word_embeddings": True}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {}),
    "qwen3-moe": (tiny_qwen3_moe, {}),
    "qwen3-moe, some layers dense": (tiny_qwen3_moe, {"mlp_only_layers": [1]}),
    "llama4": (tiny_llama4, {}),
    "llama4, multimodal": (tiny_llama4_multimodal, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    make, overrides = MODELS[name]
    model = make(tmp_path, **overrides)
    elsewhere = ("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector.")
    real = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(elsewhere))
    assert architecture.read(str(tmp_path)).parameters == real


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
    with pytest.raises(MegarlError, match="GPT2LMHeadModel is not known"):
        architecture.read(str(tmp_path))
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}))
    with pytest.raises(MegarlError, match="no 'hidden_size' there"):
        architecture.read(str(tmp_path))
