"""The types of the values in config.json that `architecture` reads.

transformers writes the file, but people edit it. A value of another type would be taken
for something else ("false" is true in Python) or would fail where nobody can tell why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject

MOST_LAYERS = 1_000
MOST_EXPERTS = 200_000
"""Experts of all layers together. Kimi K2 has 23,000; much larger numbers are no
model's, and listing the tensors would take all memory.
"""


def is_flag(value: object) -> bool:
    """Return whether this is true or false."""
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether this is a finite number above 0."""
    if is_flag(value) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf


def is_number_or_zero(value: object) -> bool:
    """Return whether this is a finite number that is not negative."""
    return (value == 0 and not is_flag(value)) or is_number(value)


def is_count(value: object) -> bool:
    """Return whether this is a whole number that is not negative; 4.0 is one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return isinstance(value, int) and not is_flag(value) and value >= 0


def is_list(value: object) -> bool:
    """Return whether this is a JSON array."""
    return isinstance(value, list)


def is_object(value: object) -> bool:
    """Return whether this is a JSON object."""
    return isinstance(value, dict)


@dataclass(frozen=True)
class ValueKind:
    """words: what a value must be, for messages. fits: whether one is."""

    words: str
    fits: Callable[[object], bool]


FLAG = ValueKind("true or false", is_flag)
NUMBER = ValueKind("a number above 0", is_number)
NUMBER_OR_ZERO = ValueKind("a number that is not negative", is_number_or_zero)
COUNT = ValueKind("a whole number that is not negative", is_count)
LIST = ValueKind("a list", is_list)
OBJECT = ValueKind("a JSON object", is_object)

KINDS: dict[str, ValueKind] = {
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "norm_topk_prob": FLAG,
    "use_qk_norm": FLAG,
    "use_routing_bias": FLAG,
    "use_sliding_window": FLAG,
    "rope_interleave": FLAG,
    "attn_output_gate": FLAG,
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    "routed_scaling_factor": NUMBER,
    "swiglu_alpha": NUMBER,
    "swiglu_limit": NUMBER,
    "attn_scale": NUMBER,
    "partial_rotary_factor": NUMBER,
    "floor_scale": NUMBER,
    "first_k_dense_replace": COUNT,
}
NULLABLE: dict[str, ValueKind] = {
    "num_nextn_predict_layers": COUNT,
    "num_mtp_layers": COUNT,
    "num_mtp_modules": COUNT,
    "mtp_num_hidden_layers": COUNT,
    "mlp_only_layers": LIST,
    "layer_types": LIST,
    "mlp_layer_types": LIST,
    "moe_layers": LIST,
    "no_rope_layers": LIST,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
}
"""Values that may be null, which means the same as their absence."""
ROPE: dict[str, ValueKind] = {
    "rope_theta": NUMBER,
    "factor": NUMBER,
    "low_freq_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "original_max_position_embeddings": NUMBER,
    "partial_rotary_factor": NUMBER,
    "truncate": FLAG,
}
NULLABLE_ROPE: dict[str, ValueKind] = {
    "beta_fast": NUMBER_OR_ZERO,
    "beta_slow": NUMBER_OR_ZERO,
    "attention_factor": NUMBER_OR_ZERO,
    "mscale": NUMBER_OR_ZERO,
    "mscale_all_dim": NUMBER_OR_ZERO,
}


def check_values(config: JsonObject) -> None:
    """Raise MegarlError if a value in config.json (of a multimodal model: in its
    text_config) is of another type than its key asks for.
    """
    _check(config, KINDS, NULLABLE)
    for name in ("rope_parameters", "rope_scaling"):
        _check(config.get(name) or {}, ROPE, NULLABLE_ROPE, f"{name}.")
    parameters = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise MegarlError(
            "rope_scaling beside rope_parameters is not supported: transformers takes the former"
            " and drops rope_theta from the latter; move its values into rope_parameters"
        )


def _check(
    values: JsonObject,
    kinds: dict[str, ValueKind],
    nullable: dict[str, ValueKind],
    prefix: str = "",
) -> None:
    """Raise MegarlError if a value is not of its key's kind. Unknown keys pass."""
    for key, value in values.items():
        kind = kinds.get(key) or nullable.get(key)
        if kind is None:
            continue
        if value is None and key in nullable:
            continue
        if not kind.fits(value):
            raise MegarlError(f"{prefix}{key} is {_text(value)}, not {kind.words}")


def size(config: JsonObject, key: str, otherwise: int | None = None) -> int:
    """Return the whole number above 0 under `key`, or `otherwise` if there is none."""
    if otherwise is None:
        value = config[key]
    else:
        value = config.get(key) or otherwise
    if not is_count(value) or not value:
        raise MegarlError(f"{key} is {_text(value)}, not a whole number above 0")
    if key == "num_hidden_layers" and value > MOST_LAYERS:
        raise MegarlError(f"{key} is {value:,}, more than the {MOST_LAYERS:,} of any model")
    return int(value)


def names(config: JsonObject) -> list[str]:
    """Return the names in `architectures`."""
    listed = config.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise MegarlError(
            f'architectures is {_text(listed)}, not a list of names; write ["LlamaForCausalLM"]'
        )
    return listed


def _text(value: object) -> str:
    """Return a value as config.json has it, for a message; at most its beginning."""
    text = "null" if value is None else repr(value)
    if len(text) < 60:
        return text
    return text[:60] + "…"
