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
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not is_flag(value) and 0 < value < math.inf


def is_number_or_zero(value: object) -> bool:
    return (value == 0 and not is_flag(value)) or is_number(value)


def is_count(value: object) -> bool:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return isinstance(value, int) and not is_flag(value) and value >= 0


def is_list(value: object) -> bool:
    return isinstance(value, list)


def is_object(value: object) -> bool:
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
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "use_sliding_window"), FLAG),
    "rope_interleave": FLAG,
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), NUMBER),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit", "attn_scale"), NUMBER),
    **dict.fromkeys(("partial_rotary_factor", "floor_scale"), NUMBER),
    **dict.fromkeys(("first_k_dense_replace",), COUNT),
}
NULLABLE: dict[str, ValueKind] = {
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), COUNT),
    **dict.fromkeys(("mlp_only_layers", "layer_types", "moe_layers", "no_rope_layers"), LIST),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), OBJECT),
}
"""Values that may be null, which means the same as their absence."""
ROPE: dict[str, ValueKind] = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), NUMBER),
    **dict.fromkeys(("original_max_position_embeddings", "partial_rotary_factor"), NUMBER),
    "truncate": FLAG,
}
NULLABLE_ROPE: dict[str, ValueKind] = {
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), NUMBER_OR_ZERO),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER_OR_ZERO),
}


def check_values(config: JsonObject) -> None:
    """Raise MegarlError if a value in config.json (of Llama 4: in its text_config) is
    of another type than its key asks for.
    """
    _check(config, KINDS, NULLABLE)
    for name in ("rope_parameters", "rope_scaling"):
        _check(config.get(name) or {}, ROPE, NULLABLE_ROPE, f"{name}.")
    given = config.get("rope_parameters"), config.get("rope_scaling")
    if all(given) and given[0] != given[1]:
        what = "rope_scaling beside rope_parameters is not supported"
        why = "transformers takes the former and drops rope_theta from the latter"
        raise MegarlError(f"{what}: {why}; move its values into rope_parameters")


def _check(
    values: JsonObject,
    kinds: dict[str, ValueKind],
    nullable: dict[str, ValueKind],
    prefix: str = "",
) -> None:
    for key in values.keys() & (kinds.keys() | nullable.keys()):
        value = values[key]
        if value is None and key in nullable:
            continue
        kind = kinds.get(key) or nullable[key]
        if not kind.fits(value):
            raise MegarlError(f"{prefix}{key} is {_shown(value)}, not {kind.words}")


def size(config: JsonObject, key: str, otherwise: int | None = None) -> int:
    """Return the whole number above 0 under `key`, or `otherwise` if there is none."""
    value = config[key] if otherwise is None else config.get(key) or otherwise
    if not is_count(value) or not value:
        raise MegarlError(f"{key} is {_shown(value)}, not a whole number above 0")
    if key == "num_hidden_layers" and value > MOST_LAYERS:
        raise MegarlError(f"{key} is {value:,}, more than the {MOST_LAYERS:,} of any model")
    return int(value)


def names(config: JsonObject) -> list[str]:
    """Return the names in `architectures`."""
    given = config.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        what = f"architectures is {_shown(given)}, not a list of names"
        raise MegarlError(f'{what}; write ["LlamaForCausalLM"]')
    return given


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) < 60 else text[:60] + "…"
