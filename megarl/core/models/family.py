"""A model family, and how its Megatron tensors are made from Hugging Face ones.

    Megatron  decoder.layers.3.self_attention.linear_qkv.weight   (layers, and experts, counted over the whole model)
       │  family.weight(name)
       ▼
    Weight(sources=(…q_proj, …k_proj, …v_proj), split=0, merge=…, unmerge=…)

A source is a Hugging Face tensor or a view of one: an expert's entry where experts are stacked, a half where gate and up
are fused. `merge` and `unmerge` work on whole views and equally on one tensor-parallel shard: TP divides each view into
equal pieces along `split`, and merging a rank's pieces gives that rank's Megatron tensor. So a rank reads and converts only
its own part, and one rule serves loading, export and every layout.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.core.base.architecture import Architecture


def _only(views: Sequence[torch.Tensor]) -> torch.Tensor:
    (view,) = views
    return view


def _alone(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or a view of one.

    expert: its index along dimension 0, if experts are stacked ([experts, …]). part: (k, n), the k-th of n equal parts of
    the last dimension (a fused gate_up_proj).
    """

    name: str
    expert: int | None = None
    part: tuple[int, int] | None = None


@dataclass(frozen=True)
class Weight:
    """How one Megatron tensor corresponds to Hugging Face ones.

    sources: the views it is made from. split: the dimension of each view along which TP (for experts: expert TP) divides it;
    None: every rank holds it whole. vocabulary: rows without the padding that makes them divide by TP; None: no padding.
    """

    sources: tuple[Source, ...]
    split: int | None = None
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _only
    unmerge: Callable[[torch.Tensor], list[torch.Tensor]] = _alone
    vocabulary: int | None = None


@dataclass(frozen=True)
class Family:
    """One model: what its config.json says, and how its tensors correspond. weights: by Megatron name, in the local layer
    spec's spelling. elsewhere: how names of tensors start that are not of the language model and are carried along untouched.
    """

    architecture: Architecture
    weights: Mapping[str, Weight]
    elsewhere: tuple[str, ...] = ()

    def weight(self, name: str) -> Weight:
        """How a Megatron tensor is made, layers and experts counted over the whole model; KeyError if the model has none."""
        for pattern, local in _TRANSFORMER_ENGINE:
            name = pattern.sub(local, name)
        return self.weights[name]

    def names(self) -> set[str]:
        """Return the names of all Hugging Face tensors of the model."""
        return {source.name for weight in self.weights.values() for source in weight.sources}

    def passthrough(self, name: str) -> bool:
        """Return whether this Hugging Face tensor belongs to something that is not trained here, such as a vision tower."""
        return name.startswith(self.elsewhere) if self.elsewhere else False


# Transformer Engine fuses a norm with the projection after it, and has all experts of a rank in one module.
_TRANSFORMER_ENGINE = [
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$"), r".experts.local_experts.\2.\1.weight"),
]


def write_config(hf_dir: Path, config: dict[str, Any]) -> None:
    """Write config.json of a Hugging Face directory."""
    (hf_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
