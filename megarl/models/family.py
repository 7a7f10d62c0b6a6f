"""What a family of models is, and how its Megatron tensors are made of Hugging Face ones.

    Megatron  decoder.layers.3.self_attention.linear_qkv.weight   (layer counted over the whole model)
       │  family.weight(name)
       ▼
    Weight(names=(…q_proj, …k_proj, …v_proj), split=0, merge=…, unmerge=…)

`merge` and `unmerge` work on whole tensors and equally on one tensor-parallel shard: TP divides each Hugging Face tensor
into equal pieces along `split`, and merging a rank's pieces gives that rank's Megatron tensor. So a rank reads and
converts no more than its own part, and one rule serves loading, export and every layout.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.errors import MegarlError


def _only(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    (piece,) = pieces
    return piece


def _alone(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor]


@dataclass(frozen=True)
class Weight:
    """How one Megatron tensor corresponds to Hugging Face ones.

    names: the Hugging Face tensors it is made of. split: the dimension along which TP divides each of them; None: every TP
    rank holds it whole. vocabulary: rows without the padding that makes them divide by TP; None: nothing is padded.
    """

    names: tuple[str, ...]
    split: int | None = None
    merge: Callable[[Sequence[torch.Tensor]], torch.Tensor] = _only
    unmerge: Callable[[torch.Tensor], list[torch.Tensor]] = _alone
    vocabulary: int | None = None


class Family(Protocol):
    """One architecture, configured by one config.json."""

    vocabulary: int  # rows of the embedding, without padding
    tied: bool  # the embedding is the LM head
    context: int  # longest position the model knows

    def architecture(self) -> dict[str, Any]:
        """Arguments of TransformerConfig that describe the model (not the layout, not the precision)."""
        ...

    def inverse_frequencies(self) -> torch.Tensor:
        """Of the rotary embedding, [head_dim / 2] float32, as transformers computes them."""
        ...

    def block_spec(self, config: Any, transformer_engine: bool, vp_stage: int | None) -> Any:
        """TransformerBlockSubmodules of this rank's layers of chunk `vp_stage`."""
        ...

    def weight(self, name: str) -> Weight:
        """Of a Megatron tensor, its layer counted over the whole model; KeyError if the family has no such tensor."""
        ...

    def names(self) -> set[str]:
        """Every Hugging Face tensor of the model."""
        ...


def read_config(hf_dir: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise MegarlError(f"{hf_dir}: no Hugging Face model there (no config.json); give a directory that has one")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise MegarlError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise MegarlError(f"{path}: not a model configuration")
    return config


def write_config(hf_dir: Path, config: dict[str, Any]) -> None:
    """config.json of a Hugging Face directory."""
    (hf_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def family_of(hf_dir: Path) -> Family:
    """The family that can read this Hugging Face directory, configured by it."""
    from megarl.models.llama import Llama

    families: dict[str, Callable[[dict[str, Any], Path], Family]] = {"LlamaForCausalLM": Llama}
    config = read_config(hf_dir)
    architectures = config.get("architectures") or ["none"]
    for architecture in architectures:
        if architecture in families:
            return families[architecture](config, Path(hf_dir))
    raise MegarlError(
        f"{Path(hf_dir) / 'config.json'}: architecture {', '.join(architectures)} is not supported; "
        f"supported: {', '.join(families)}"
    )
