"""Llama 3.x, dense: grouped queries, llama3 rope scaling, tied and untied embeddings."""

from functools import partial
from pathlib import Path
from typing import Any

from megarl.core.models import decoder
from megarl.core.models.family import Family


def llama(config: dict[str, Any], where: Path) -> Family:
    decoder.refuse_others(config, where, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    sizes = decoder.Sizes.read(config, where)
    return decoder.dense(sizes, partial(decoder.attention, sizes))


ARCHITECTURES = {"LlamaForCausalLM": llama}
