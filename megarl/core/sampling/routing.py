"""The experts that a server chose, from its reply to what a rollout carries (model.moe.routing_replay).

reply    base64 of int32 [rows, all layers, experts a token]     rows: tokens from `routing_from` on, but the last
rollout  Routing, layers with experts only, a byte a choice      rows of one request follow on those of the one before
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config
from megarl.core.base.types import Routing
from megarl.core.recipe import Recipe


def layers_of(model_path: str) -> "RoutedLayers | None":
    """Of the model in this directory; None for a dense one."""
    return RoutedLayers.of(read_config(model_path))


def routed_layers(recipe: Recipe) -> "RoutedLayers | None":
    """What to record in a run of this recipe; None if it does not ask for it."""
    if not recipe.model.moe.routing_replay:
        return None
    routed = layers_of(recipe.model.path)
    if routed is None:
        raise MegarlError(f"model.moe.routing_replay: {recipe.model.path} has no experts; leave it out")
    return routed


@dataclass(frozen=True)
class RoutedLayers:
    """Of a model: how many layers, which of them have experts (from 0), how many experts there are and a token gets."""

    layers: int
    with_experts: tuple[int, ...]
    experts: int
    chosen: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """From a config.json; None for a dense model."""
        text = config.get("text_config", config)
        experts = text.get("num_experts") or text.get("num_local_experts")
        if not experts:
            return None
        layers = text["num_hidden_layers"]
        step = text.get("interleave_moe_layer_step", 1)
        with_experts = text.get("moe_layers") or range(step - 1, layers, step)
        return cls(layers, tuple(with_experts), experts, text["num_experts_per_tok"])

    def decoded(self, reply: str) -> np.ndarray:
        """[rows, layers with experts, chosen] uint8, or int16 where there are more experts."""
        if not reply:
            raise MegarlError(
                "a server did not say which experts it chose: was it started with model.moe.routing_replay?"
            )
        table = np.frombuffer(base64.b64decode(reply), "<i4").reshape(-1, self.layers, self.chosen)
        return table[:, self.with_experts].astype(np.uint8 if self.experts <= 256 else np.int16)

    def joined(self, tables: Sequence[np.ndarray]) -> Routing:
        """Of a rollout, from the tables of its requests."""
        return Routing(choices=np.concatenate(tables).reshape(-1), layers=len(self.with_experts), chosen=self.chosen)
