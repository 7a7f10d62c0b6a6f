"""Between the two forms, one Megatron parameter at a time.

Hugging Face tensors  ──views──►  this part's pieces  ──merge──►  parameter  ──►  its shards      (value_of)
shards  ──►  parameter  ──unmerge──►  views  ──►  Hugging Face tensors, or entries of stacked ones  (TensorGroup)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.layout import WHOLE, StoredPart, parts
from checkpoints_tools.region import Shape
from checkpoints_tools.shards import OPTIMIZER, Box, Shards
from megarl.core.base.errors import MegarlError
from megarl.core.models.families import Family, SourceView
from megarl.core.models.hf import read_view

# isort: split
from megatron.core.dist_checkpointing.mapping import ShardedTensor


@dataclass(frozen=True)
class TensorGroup:
    """Megatron parameters and the Hugging Face tensors they make: one parameter, or the experts of a layer's stacked tensor."""

    parts: tuple[StoredPart, ...]
    tensors: dict[str, Shape]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def box_of(shard: ShardedTensor) -> Box:
    """Return where a shard lies in the stored tensor, in that one's dimensions."""
    return tuple(shard.global_offset), (1,) * shard.prepend_axis_num + tuple(shard.local_shape)


def value_of(part: StoredPart, family: Family, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the part's parameter, made from Hugging Face tensors."""
    weight = family.weight(part.name)
    views = [(source, tensors[source.name]) for source in weight.sources]
    value = weight.merge([read_view(t, t.shape, s, weight, *part.place) for s, t in views])
    value = value.to(part.dtype).contiguous()
    assert value.shape == part.shape, (part.name, value.shape, part.shape)  # `check` has compared them
    return value


def stored_value(part: StoredPart, shards: Shards) -> Tensor:
    """Return the part's parameter, read from a checkpoint."""
    return part.value(lambda shard: shards.read(shard.key, box_of(shard)).view(shard.local_shape))


def groups(hf_dir: Path, family: Family, dtype: str) -> list[TensorGroup]:
    """Return the whole model, in megatron's order."""
    members: dict[str, list[StoredPart]] = {}
    for part in parts(hf_dir, WHOLE, dtype):
        if not (family.architecture.tied and part.name == "output_layer.weight"):
            members.setdefault(family.weight(part.name).sources[0].name, []).append(part)
    return [_group(tuple(same), family) for same in members.values()]


def views(part: StoredPart, family: Family, value: Tensor) -> Iterator[tuple[SourceView, Tensor]]:
    """Yield the Hugging Face side of a whole parameter: each tensor, or each expert's entry, with its equal parts joined."""
    weight = family.weight(part.name)
    joined: dict[tuple[str, int | None], list[Tensor]] = {}
    for source, view in zip(weight.sources, weight.unmerge(value), strict=True):
        joined.setdefault((source.name, source.expert), []).append(view[: weight.vocabulary])
    for (name, expert), pieces in joined.items():
        yield SourceView(name, expert), pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def check_names_and_shapes(hf_dir: Path, present: Mapping[str, tuple[int, ...]], found: Sequence[TensorGroup]) -> None:
    """Raise MegarlError that names every tensor without the shape that config.json says."""
    expected = {name: tensor.shape for group in found for name, tensor in group.tensors.items()}
    wrong = [
        f"{name} {list(present[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in present and present[name] != shape
    ]
    if wrong:
        raise MegarlError(f"{hf_dir}: tensors do not have the shapes config.json says: {_few(wrong)}")


def check_keys(shards: Shards, needed: Sequence[StoredPart]) -> None:
    """Raise MegarlError if the checkpoint does not hold these parameters, or holds others."""
    wanted = {shard.key: shard for part in needed for shard in part.shards()}
    present = {key for key in shards.tensors if not key.startswith(OPTIMIZER)}
    problems = [f"missing {key}" for key in sorted(wanted.keys() - present)]
    problems += [f"not of this model: {key}" for key in sorted(present - wanted.keys())]
    for key in sorted(wanted.keys() & present):
        shape, shard = shards.tensors[key].shape, wanted[key]
        if shape != tuple(shard.global_shape) and not shard.allow_shape_mismatch:  # a padded vocabulary may differ
            problems.append(f"{key} is {list(shape)} instead of {list(shard.global_shape)}")
    if problems:
        raise MegarlError(f"{shards.path}: tensors do not fit its config.json: {_few(problems)}")


def _few(problems: Sequence[str]) -> str:
    return "; ".join(problems[:8]) + (f"; … ({len(problems)} in all)" if len(problems) > 8 else "")


def _group(members: tuple[StoredPart, ...], family: Family) -> TensorGroup:
    shapes: dict[str, Shape] = {}
    experts: dict[str, int] = {}
    for part in members:
        for source, view in views(part, family, torch.empty(part.shape, dtype=part.dtype, device="meta")):
            shapes[source.name] = Shape(tuple(view.shape), view.dtype)
            if source.expert is not None:
                experts[source.name] = max(experts.get(source.name, 0), source.expert + 1)
    stacked = {name: Shape((count, *shapes[name].shape), shapes[name].dtype) for name, count in experts.items()}
    return TensorGroup(members, shapes | stacked)
