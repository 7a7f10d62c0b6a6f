"""Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v. DeepSeek-R1-Distill-Qwen is the same architecture."""

from pathlib import Path
from typing import Any

from megarl.core.models import decoder
from megarl.core.models.family import Family


def qwen2(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, {"hidden_act": "silu", "use_sliding_window": False})
    sizes = decoder.Sizes.read(config, where)

    def attention(hf: str) -> decoder.Weights:
        return decoder.attention(sizes, hf) | decoder.qkv_biases(sizes, hf)

    return decoder.dense(sizes, attention, add_qkv_bias=True)


ARCHITECTURES = {"Qwen2ForCausalLM": qwen2}
