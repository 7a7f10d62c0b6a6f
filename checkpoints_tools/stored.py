"""What lies at a path, and its Hugging Face tensors by name, read one at a time whichever form it has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from checkpoints_tools.mapping import TensorGroup, check_keys, check_names_and_shapes, groups, stored_value, views
from checkpoints_tools.safetensors_files import Directory
from checkpoints_tools.shards import DISTCP, Shards
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config
from megarl.core.models import Family, checkpoint, family_of
from megarl.core.models.checkpoint import check
from megarl.core.models.hf import check_names

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class StoredModel:
    """A model on disk. hf_dir: where configuration and tokenizer are. meta: None for a Hugging Face directory."""

    path: Path
    hf_dir: Path
    meta: checkpoint.Meta | None

    @property
    def dtype(self) -> Dtype:
        """The precision that the checkpoint or config.json names."""
        if self.meta is not None:
            written: Dtype = self.meta.model["dtype"]
            return written
        config = read_config(self.hf_dir)
        config = config if "dtype" in config or "torch_dtype" in config else config.get("text_config", config)
        name = config.get("dtype", config.get("torch_dtype", "float32"))
        known: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        if name not in known:
            raise MegarlError(
                f"{self.hf_dir / 'config.json'}: dtype {name!r} is not supported; give --dtype to convert to one of "
                f"{', '.join(known.values())}"
            )
        return known[name]


def stored(path: Path) -> StoredModel:
    """Find a Hugging Face directory if there is a config.json, else a checkpoint or a run.

    MegarlError if a file is not as it was written. Shards are not checked here: `Shards` checks what it reads.
    """
    if (path / "config.json").is_file():
        return StoredModel(path, path, None)
    found = checkpoint.find(path)
    meta = checkpoint.read_meta(found)
    check(found, {name: value for name, value in meta.files.items() if not name.endswith(DISTCP)})
    return StoredModel(found, found / "hf", meta)


class HuggingFaceTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors in Hugging Face form, assembled on access; those of the last parameter are kept."""

    def __init__(self, source: StoredModel, family: Family) -> None:
        self._family = family
        self._shards = Shards(source.path)
        found = groups(source.hf_dir, family, source.dtype)
        check_keys(self._shards, [part for group in found for part in group.parts])
        self._groups = {name: group for group in found for name in group.tensors}
        self._last: tuple[TensorGroup | None, dict[str, Tensor]] = (None, {})

    def __getitem__(self, name: str) -> Tensor:
        group = self._groups[name]
        if self._last[0] is not group:
            self._last = (None, {})
            self._last = (group, self._assembled(group))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def _assembled(self, group: TensorGroup) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for part in group.parts:
            for source, view in views(part, self._family, stored_value(part, self._shards)):
                if source.expert is None:
                    tensors[source.name] = view
                else:
                    shape = group.tensors[source.name]
                    whole = tensors.setdefault(source.name, torch.empty(shape.shape, dtype=shape.dtype))
                    whole[source.expert] = view
        return tensors


def tensors_of(source: StoredModel, everything: bool) -> Mapping[str, Tensor]:
    """Return tensors by Hugging Face name. everything: also a directory's tensors that are not trained (a vision tower)."""
    if source.meta is not None:
        return HuggingFaceTensors(source, family_of(source.hf_dir))
    directory = Directory(source.path)
    return directory if everything else directory.only(family_of(source.hf_dir).names())


def checked(directory: Directory, family: Family, dtype: Dtype) -> list[TensorGroup]:
    """Return the model's groups; MegarlError unless the directory holds just their tensors."""
    check_names(directory.path, directory.keys(), family)
    found = groups(directory.path, family, dtype)
    check_names_and_shapes(directory.path, {name: r.shape for name, r in directory.regions.items()}, found)
    return found
