"""Qwen3, dense: Llama with an RMS norm of each head's q and k before rotation."""

from functools import partial
from pathlib import Path
from typing import Any

from megarl.core.models import decoder
from megarl.core.models.family import Family

ONLY = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def attention(sizes: decoder.Sizes, hf: str) -> decoder.Weights:
    """Of `hf` (…self_attn.), in the dense and the MoE model alike."""
    return decoder.attention(sizes, hf) | decoder.head_norms(hf)


def qwen3(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, ONLY)
    sizes = decoder.Sizes.read({"head_dim": 128, **config}, where)  # 128 whatever the number of heads
    return decoder.dense(sizes, partial(attention, sizes), qk_layernorm=True)


ARCHITECTURES = {"Qwen3ForCausalLM": qwen3}
