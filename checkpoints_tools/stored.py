"""Finds the model at a path, and gives its Hugging Face tensors by name, one Megatron
parameter at a time.

value_of      Hugging Face tensors ──views──► this part's pieces ──merge──► parameter
                  ──► its shards
TensorGroup   shards ──► parameter ──unmerge──► views
                  ──► Hugging Face tensors, or entries of stacked ones
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout import WHOLE, Dtype, StoredPart, parts
from checkpoints_tools.safetensors_files import Directory
from checkpoints_tools.shards import DISTCP, OPTIMIZER, Box, Shards
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import gguf_advice
from megarl.core.base.model_directory import few, open_model
from megarl.core.models import Family, checkpoint, family_of
from megarl.core.models.families import SourceView, joined_rows
from megarl.core.models.hf import read_view
from megarl.core.models.region import Shape, check_finite

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedTensor

NEAREST: dict[str, Dtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp32",
}
"""The precision in which megatron keeps most digits of values of a type."""


@dataclass(frozen=True)
class TensorGroup:
    """Megatron parameters and the Hugging Face tensors made from them: one parameter,
    or a layer's stacked experts.
    """

    parts: tuple[StoredPart, ...]
    tensors: dict[str, Shape]

    @property
    def nbytes(self) -> int:
        """The bytes of all its Hugging Face tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def box_of(shard: ShardedTensor) -> Box:
    """Return the box of a shard within the stored tensor, in the stored tensor's
    dimensions: in front of a parameter's own, such as one for all layers.
    """
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple(shard.global_offset), sizes


def value_of(part: StoredPart, family: Family, tensors: Directory) -> Tensor:
    """Return the part's parameter, assembled from Hugging Face tensors. MegarlError if
    a value is not finite.
    """
    weight = family.weight(part.name)
    pieces = []  # of this part's rank
    for source in weight.sources:
        tensor = tensors[source.name]
        piece = read_view(tensor, tensor.shape, source, weight, *part.place)
        check_finite(piece, [source.name], tensors.path)
        pieces.append(piece)
    value = weight.merge(pieces)
    value = value.to(part.dtype).contiguous()
    assert value.shape == part.shape, (part.name, value.shape, part.shape)
    return value


def groups(hf_dir: Path, family: Family, dtype: Dtype) -> list[TensorGroup]:
    """Return the groups of the whole model, in megatron's order: parameters of which
    the first Hugging Face tensor is the same are a group. A head that is tied to the
    embedding has no tensor of its own.
    """
    members: dict[str, list[StoredPart]] = {}
    for part in parts(hf_dir, WHOLE, dtype):
        if not (family.architecture.tied and part.name == "output_layer.weight"):
            first_source = family.weight(part.name).sources[0]
            members.setdefault(first_source.name, []).append(part)
    return [_group(tuple(of_group), family) for of_group in members.values()]


def views(part: StoredPart, family: Family, value: Tensor) -> Iterator[tuple[SourceView, Tensor]]:
    """Yield the Hugging Face tensors (or experts' entries) of a whole parameter, each
    with its source. Pieces of the same tensor are joined along its last dimension.
    """
    weight = family.weight(part.name)
    pieces_of: dict[tuple[str, int | None], list[Tensor]] = {}
    for source, view in joined_rows(zip(weight.sources, weight.unmerge(value), strict=True)):
        without_padding = view[: weight.vocabulary]
        pieces_of.setdefault((source.name, source.expert), []).append(without_padding)
    for (name, expert), pieces in pieces_of.items():
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
        yield SourceView(name, expert), tensor


def check_keys(shards: Shards, needed: Sequence[StoredPart]) -> None:
    """Raise MegarlError if the checkpoint lacks any of these parameters, or holds
    others.
    """
    expected = {shard.key: shard for part in needed for shard in part.shards()}
    present = {key for key in shards.tensors if not key.startswith(OPTIMIZER)}
    problems = [f"missing {key}" for key in sorted(expected.keys() - present)]
    problems += [f"not of this model: {key}" for key in sorted(present - expected.keys())]
    for key in sorted(expected.keys() & present):
        shape = shards.tensors[key].shape
        shard = expected[key]
        # A padded vocabulary may differ.
        if shape != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
            problems.append(f"{key} is {list(shape)} instead of {list(shard.global_shape)}")
    if problems:
        raise MegarlError(f"{shards.path}: tensors do not fit its config.json: {few(problems)}")


def _group(members: tuple[StoredPart, ...], family: Family) -> TensorGroup:
    """Return the group of these parameters, with its tensors' shapes by name."""
    tensors: dict[str, Shape] = {}
    for part in members:
        without_data = torch.empty(part.shape, dtype=part.dtype, device="meta")
        for source, view in views(part, family, without_data):
            stack = () if source.expert is None else (family.architecture.experts,)
            tensors[source.name] = Shape((*stack, *view.shape), view.dtype)
    return TensorGroup(members, tensors)


@dataclass(frozen=True)
class StoredModel:
    """A model on disk. hf_dir: the directory with configuration and tokenizer. meta:
    None for a Hugging Face directory.
    """

    path: Path
    hf_dir: Path
    meta: checkpoint.CheckpointMeta | None

    @property
    def dtype(self) -> Dtype:
        """The precision of a checkpoint; of a directory, that of most of its values."""
        if self.meta is not None:
            written: Dtype = self.meta.model["dtype"]
            return written
        return NEAREST[open_model(self.hf_dir).dtype]


def stored(path: Path) -> StoredModel:
    """Return the model at a path: a Hugging Face directory if it has a config.json,
    else a checkpoint, or a run's latest.

    MegarlError if a file is damaged. Shards are not checked here: `Shards` checks those
    that it reads.
    """
    if (path / "config.json").is_file():
        return StoredModel(path, path, None)
    if advice := gguf_advice(path):
        raise MegarlError(f"{path}: {advice}")
    folder = checkpoint.find(path)
    meta = checkpoint.read_meta(folder)
    other_files = {name: meta.files[name] for name in meta.files if not name.endswith(DISTCP)}
    checkpoint.check(folder, other_files)
    return StoredModel(folder, folder / "hf", meta)


class HuggingFaceTensors(Mapping[str, Tensor]):
    """A checkpoint's tensors in Hugging Face's format, assembled on access. Those of
    the last group are cached.
    """

    def __init__(self, source: StoredModel) -> None:
        self.family = family_of(source.hf_dir)
        self._shards = Shards(source.path)
        self.groups = groups(source.hf_dir, self.family, source.dtype)
        check_keys(self._shards, [part for group in self.groups for part in group.parts])
        self._group_of = {name: group for group in self.groups for name in group.tensors}
        self._last: tuple[TensorGroup | None, dict[str, Tensor]] = (None, {})

    def views_of(self, group: TensorGroup) -> Iterator[tuple[SourceView, Tensor]]:
        """Yield the tensors of a group; for stacked tensors, their entries."""
        for part in group.parts:
            value = part.value(
                lambda shard: self._shards.read(shard.key, box_of(shard)).view(shard.local_shape)
            )
            yield from views(part, self.family, value)

    def __getitem__(self, name: str) -> Tensor:
        group = self._group_of[name]
        if self._last[0] is not group:
            self._last = (None, {})  # frees the last group before another is assembled
            self._last = (group, self._assembled(group))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)

    def _assembled(self, group: TensorGroup) -> dict[str, Tensor]:
        """Return the whole tensors of a group by name."""
        tensors: dict[str, Tensor] = {}
        for source, view in self.views_of(group):
            if source.expert is None:
                tensors[source.name] = view
            else:
                if source.name not in tensors:
                    stacked = group.tensors[source.name]
                    tensors[source.name] = torch.empty(stacked.shape, dtype=stacked.dtype)
                tensors[source.name][source.expert] = view
        return tensors


def tensors_of(source: StoredModel, everything: bool) -> Mapping[str, Tensor]:
    """Return a model's tensors by Hugging Face name. everything: include a directory's
    tensors that are not trained (a vision tower); a checkpoint has none.
    """
    if source.meta is not None:
        return HuggingFaceTensors(source)
    if everything:
        return Directory(source.path)
    return Directory(source.path, open_model(source.path).trained())
