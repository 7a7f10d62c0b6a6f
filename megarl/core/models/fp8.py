"""FP8 in the learner's layers, by Transformer Engine: the products of their linear maps, forward and backward.

    blockwise    E4M3; a scale for 128 values of an activation or gradient and for 128 x 128 of a weight (arXiv 2412.19437)
    tensorwise   E4M3, gradients E5M2; a scale for each tensor as it is now

Weights stay bf16 and are made FP8 anew in each pass of the schedule, so what is published and stored is as without. Neither
recipe remembers anything between steps (`delayed` scaling does), so log-probs asked for and trained have the same precision.
Norms, attention, router, embedding and head are not touched.
"""

import importlib
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE

from megarl.core.base.errors import MegarlError
from megarl.core.recipe import Model

FORMATS = {"blockwise": "e4m3", "tensorwise": "hybrid"}


def settings(model: Model) -> dict[str, Any]:
    """Arguments of TransformerConfig."""
    return {} if model.fp8 == "none" else {"fp8": FORMATS[model.fp8], "fp8_recipe": model.fp8, "fp8_param": False}


def check(model: Model, transformer_engine: bool) -> None:
    """MegarlError where these layers cannot compute in it. transformer_engine: whether it makes them."""
    if model.fp8 == "none":
        return
    if not transformer_engine:
        missing = "no NVIDIA GPU here" if HAVE_TE else "it is not installed"
        raise MegarlError(f"model.fp8: {model.fp8} needs Transformer Engine, and {missing}; set model.fp8=none")
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    available = engine.is_fp8_block_scaling_available if model.fp8 == "blockwise" else engine.is_fp8_available
    can, reason = available(return_reason=True)
    if not can:
        raise MegarlError(f"model.fp8: {model.fp8} cannot be computed on this GPU: {reason} Set model.fp8=none")
