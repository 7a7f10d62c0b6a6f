"""Converts between distributed checkpoints and Hugging Face directories, and between
layouts, without changing a bit.

    hf_to_megatron   safetensors ──slices──► parameter of a rank ──► its shards
    megatron_to_hf   shards ──► parameter ──► safetensors
    reshard          shards ──► shards of another layout, including the optimiser's

One process writes the shards of any layout. One parameter is in memory at a time.
Values are only copied, unless --dtype rounds them.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import msgspec
from torch import Tensor

from checkpoints_tools import card
from checkpoints_tools.layout import WHOLE, Dtype, Parallelism, StoredPart, parts
from checkpoints_tools.partial import PROGRESS, Partial, identity, refuse_existing, writing
from checkpoints_tools.safetensors_files import Directory, SafetensorsFile
from checkpoints_tools.shards import OPTIMIZER, Shards, Writer, no_objects, plan_files
from checkpoints_tools.stored import (
    NEAREST,
    HuggingFaceTensors,
    TensorGroup,
    box_of,
    check_keys,
    stored,
    value_of,
)
from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_tensors import is_multimodal
from megarl.core.base.model_directory import open_model
from megarl.core.models import Family, checkpoint, family_of
from megarl.core.models.build import DTYPES
from megarl.core.models.checkpoint import checksums
from megarl.core.models.hf import copy_description, rounded, write_index
from megarl.core.models.region import Region, check_finite

FILE_BYTES = 4 << 30
"""Size of a file, and so the most work that a kill can cost. The files of all ranks
that are open at once share this size.
"""

Shard = tuple[str, Sequence[int], Sequence[int], Tensor]


def hf_to_megatron(
    source: Path,
    destination: Path,
    layout: Parallelism,
    dtype: Dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write `destination` as a checkpoint of weights at step 0, sharded as ranks with
    this layout would shard it.
    """
    refuse_existing(destination)
    model = open_model(source)
    family = family_of(source)
    directory = Directory(source, model.tensors)
    dtype = dtype or NEAREST[model.dtype]
    stored_parts = parts(source, layout, dtype)
    types = {
        view.name: part.dtype for part in stored_parts for view in family.weight(part.name).sources
    }
    if text := rounded(model.tensors, types):
        terminal.say(f"{source}: {text}")
    meta = checkpoint.CheckpointMeta(
        step=0,
        version=0,
        hf_source=str(source.resolve()),
        model=layout.section(source, dtype).model_dump(),
    )

    def shards(part: StoredPart) -> Iterator[Shard]:
        for shard in part.shards(value_of(part, family, directory)):
            offsets, sizes = box_of(shard)
            yield shard.key, offsets, shard.global_shape, shard.data.view(sizes)

    with writing(
        destination, _same("hf-to-megatron", source, layout, dtype, file_bytes)
    ) as partial:
        _write_checkpoint(
            partial, stored_parts, shards, no_objects(), file_bytes // layout.ranks, source, meta
        )


def reshard(
    source: Path, destination: Path, layout: Parallelism, file_bytes: int = FILE_BYTES
) -> None:
    """Write the same checkpoint, including step and optimiser, in the shards of another
    layout.
    """
    model = stored(source)
    if model.meta is None:
        raise MegarlError(
            f"{source}: a Hugging Face directory has no shards; use `convert hf-to-megatron`"
        )
    if model.meta.critic:
        raise MegarlError(
            f"{model.path}: has a critic, whose shards reshard cannot convert; a run can resume it"
            " at any layout"
        )
    refuse_existing(destination)
    shards = Shards(model.path)
    stored_parts = parts(model.hf_dir, layout, model.dtype)
    check_keys(shards, stored_parts)
    states = _optimizer_states(shards, stored_parts)

    def read(part: StoredPart) -> Iterator[Shard]:
        for shard in part.shards():
            for key in (shard.key, *(f"{OPTIMIZER}state.{state}.{shard.key}" for state in states)):
                if key in shards.tensors:
                    yield (
                        key,
                        shard.global_offset,
                        shard.global_shape,
                        shards.read(key, box_of(shard)),
                    )

    section = layout.section(model.hf_dir, model.dtype).model_dump()
    for key in ("path", "fp32_head"):
        if key in model.meta.model:
            section[key] = model.meta.model[key]
    meta = msgspec.structs.replace(model.meta, model=section)
    same = _same("reshard", model.path, layout, model.dtype, file_bytes)
    with writing(destination, same) as partial:
        limit = file_bytes // layout.ranks
        copies = 1 + len(states)
        objects = shards.objects()
        _write_checkpoint(partial, stored_parts, read, objects, limit, model.hf_dir, meta, copies)


def _optimizer_states(shards: Shards, stored_parts: Sequence[StoredPart]) -> list[str]:
    """Return what the optimiser keeps of each weight: exp_avg, …. MegarlError if it has
    tensors of weights that the model lacks.
    """
    start = f"{OPTIMIZER}state."
    keys = {key for key in shards.tensors if key.startswith(OPTIMIZER)}
    states = sorted({key.split(".", 3)[2] for key in keys if key.startswith(start)})
    weights = [shard.key for part in stored_parts for shard in part.shards()]
    strays = sorted(keys - {f"{start}{state}.{weight}" for state in states for weight in weights})
    if strays:
        raise MegarlError(
            f"{shards.path}: {len(strays)} tensors of the optimiser do not belong to any weight of"
            f" the model: {strays[0]}, …"
        )
    return states


def megatron_to_hf(
    source: Path, destination: Path, base: Path | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Write a checkpoint, without its optimiser, as a Hugging Face directory.

    source: a checkpoint, or a run or its checkpoints directory (for the latest complete
    one). base: the Hugging Face directory from which tensors that are not trained (a
    vision tower) are taken; None: the one from which the checkpoint was made.
    """
    model = stored(source)
    if model.meta is None:
        raise MegarlError(f"{source}: already a Hugging Face directory")
    refuse_existing(destination)
    trained = HuggingFaceTensors(model)
    untouched = _untouched(base or Path(model.meta.hf_source), trained.family)
    tensors = trained.groups + [
        TensorGroup((), {name: region}) for name, region in untouched.items()
    ]

    def values(group: TensorGroup) -> Iterator[tuple[str, int, Tensor]]:
        for view, value in trained.views_of(group):
            check_finite(value, [view.name], model.path)
            yield view.name, view.expert or 0, value
        for name, shape in group.tensors.items():
            if isinstance(shape, Region):
                yield name, 0, shape.tensor()

    with writing(
        destination, _same("megatron-to-hf", model.path, WHOLE, model.dtype, file_bytes)
    ) as partial:
        write_tensors(partial, tensors, values, file_bytes)
        copy_description(model.hf_dir, partial.path, DTYPES[model.dtype])
        (partial.path / card.FILE).write_text(card.render(model.path, model.meta))


def write_tensors(
    partial: Partial,
    tensors: Sequence[TensorGroup],
    values: Callable[[TensorGroup], Iterable[tuple[str, int, Tensor]]],
    file_bytes: int,
) -> None:
    """Write the weights of a Hugging Face directory, in files of about `file_bytes`,
    and their index. A group is never split.

    values: yields (name, entry along dimension 0 of a stacked tensor or 0, values) for
    all tensors of a group.
    """
    files = _planned(tensors, file_bytes)
    total = sum(group.nbytes for group in tensors)
    partial.expect("safetensors", total)
    gc.freeze()  # existing objects are not searched again, which makes collections quick
    for name, members in files.items():
        if name in partial.finished:
            partial.skip(sum(group.nbytes for group in members))
            continue
        shapes = {tensor: shape for group in members for tensor, shape in group.tensors.items()}
        with closing(SafetensorsFile(partial.unfinished(name), shapes)) as file:
            for group in members:
                # views hold memory maps of the source's files, and only this releases
                # some of them
                gc.collect()
                for tensor, entry, value in values(group):
                    file.write(tensor, value, entry)
                    partial.wrote(name, value.nbytes)
        partial.finish(name, None)
    partial.flush()
    if len(files) > 1:
        file_of = {
            tensor: name
            for name, members in files.items()
            for group in members
            for tensor in group.tensors
        }
        write_index(partial.path, file_of, total)


def _write_checkpoint(
    partial: Partial,
    stored_parts: Sequence[StoredPart],
    read: Callable[[StoredPart], Iterable[Shard]],
    objects: dict[str, bytes],
    file_bytes: int,
    description: Path,
    meta: checkpoint.CheckpointMeta,
    copies: int = 1,
) -> None:
    """Write every part's shards into its rank's files. copies: the number of tensors
    that each part yields, all of its size.
    """
    files = plan_files(stored_parts, copies, file_bytes)
    first = "__0_objects.distcp"
    partial.expect("shards", sum(part.nbytes for part in stored_parts) * copies)
    with closing(Writer(partial, Counter([first, *files]))) as writer:
        if first not in partial.finished:
            writer.write_objects(first, objects)
        for part, file in zip(stored_parts, files, strict=True):
            if file in partial.finished:
                partial.skip(part.nbytes * copies)
            else:
                writer.write(file, read(part))
        writer.complete()
    copy_description(description, partial.path / "hf", DTYPES[meta.model["dtype"]])
    digests = checksums(partial.path)
    checkpoint.seal(
        partial.path, meta, {name: value for name, value in digests.items() if name != PROGRESS}
    )


def _untouched(base: Path, family: Family) -> dict[str, Region]:
    """Return the tensors of the original model that are not trained here. MegarlError
    if they are needed but missing.
    """
    if not family.elsewhere:
        return {}
    untouched = {}
    is_directory = (base / "config.json").is_file()
    if is_directory:
        untouched = {
            name: region
            for name, region in Directory(base).regions.items()
            if family.passthrough(name)
        }
    # transformers drops layers for multi-token prediction, although config.json still
    # mentions them.
    is_lost = family.architecture.predicting_layers and not is_directory
    if not untouched and (is_lost or is_multimodal(family.architecture)):
        raise MegarlError(
            f"{base}: lacks tensors {', '.join(f'{start}*' for start in family.elsewhere)}, which"
            " the exported model needs; give the original model with --base"
        )
    return untouched


def _planned(tensors: Sequence[TensorGroup], file_bytes: int) -> dict[str, list[TensorGroup]]:
    """Divide groups into files; return the groups by file name."""
    filled: list[list[TensorGroup]] = []
    size = 0
    for group in tensors:
        if not filled or size + group.nbytes > file_bytes:
            filled.append([])
            size = 0
        filled[-1].append(group)
        size += group.nbytes
    if len(filled) == 1:
        return {"model.safetensors": filled[0]}
    return {
        f"model-{i:05}-of-{len(filled):05}.safetensors": file for i, file in enumerate(filled, 1)
    }


def _same(
    command: str, source: Path, layout: Parallelism, dtype: Dtype, file_bytes: int
) -> dict[str, object]:
    return identity(command, source, layout=astuple(layout), dtype=dtype, file_bytes=file_bytes)
