"""Weights between Hugging Face directories and this rank's chunks: load, export (for
publication), save.

    load      safetensors ──slices of this rank──► merge ──► parameter
    export    parameter ──all-gather over TP, EP──► unmerge ──► (name, whole tensor)
              one parameter at a time
    save      export of every stage ──► files, index, config, tokenizer ──► rename
              a directory is complete or absent

Values are copied, never computed: export after load gives the same bits if the model
has the directory's dtype.
"""

import itertools
import json
import logging
import os
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import description_files, read_config
from megarl.core.base.model_directory import ModelDirectory, few, open_model
from megarl.core.base.ranks import gathered
from megarl.core.base.safetensors_header import TensorInFile
from megarl.core.base.weight_files import INDEX, tensors_in_files
from megarl.core.models.families import Family, SourceView, Weight, joined_rows
from megarl.core.models.region import DTYPES, Region, check_finite

log = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


def load(chunks: Sequence[Module], family: Family, hf_dir: Path) -> None:
    """Fill this rank's parameters from `hf_dir`, reading only its part. MegarlError if
    the directory is not the model's, or if a value that this rank reads is not finite.
    Rank 0 logs which tensors are rounded to the model's type.
    """
    directory = open_model(hf_dir)
    types: dict[str, torch.dtype] = {}
    for name, parameter in named_tensors(chunks):
        weight = family.weight(name)
        value = _read(directory, weight, *shard_of(name))
        assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
        with torch.no_grad():
            parameter.copy_(value)
        types |= {source.name: parameter.dtype for source in weight.sources}
    losses = rounded(directory.tensors, types)
    if losses and dist.get_rank() == 0:
        log.info("%s: %s", hf_dir, losses)


def _read(directory: ModelDirectory, weight: Weight, rank: int, size: int) -> Tensor:
    """Return the part of rank `rank` of `size` of megatron's tensor."""
    names = [source.name for source in weight.sources]
    try:
        tensors = [Region.of(directory.tensors[name]).tensor() for name in names]
    except (OSError, ValueError) as error:  # the file has become shorter, or cannot be mapped
        text = ", ".join(dict.fromkeys(names))
        raise MegarlError(f"{directory.path}: cannot read {text}: {error}") from None
    views = []
    for tensor, source in zip(tensors, weight.sources, strict=True):
        views.append(read_view(tensor, tensor.shape, source, weight, rank, size))
    for name, view in zip(names, views, strict=True):
        check_finite(view, [name], directory.path)
    return weight.merge(views)


def rounded(stored: Mapping[str, TensorInFile], types: Mapping[str, torch.dtype]) -> str:
    """Return which tensors lose digits when they are stored with these types; empty if
    none do.
    """
    names_of: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, dtype in types.items():
        stored_dtype = DTYPES[stored[name].dtype]
        if torch.promote_types(stored_dtype, dtype) != dtype:
            names_of.setdefault((stored_dtype, dtype), []).append(name)
    texts = []
    for (stored_dtype, dtype), names in names_of.items():
        plural = "" if len(names) == 1 else "s"
        texts.append(
            f"{len(names)} tensor{plural} of {plain(stored_dtype)} are rounded to {plain(dtype)}"
            f" ({few(names, ', ')})"
        )
    return "; ".join(texts)


def plain(dtype: torch.dtype) -> str:
    """Return a type's name as config.json has it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def export(
    chunks: Sequence[Module], family: Family, stacked: bool = True, part: int = 0, parts: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Yield this pipeline stage's weights as (Hugging Face name, whole tensor), one at
    a time, always in the same order.

    part: which of `parts` parts of the stage to yield: whole layers of about equal
    size. All ranks of a tensor-parallel group take the same one; a number that no part
    has yields nothing. stacked: yield a layer's experts as one tensor if the family
    stores them so (Llama 4). Otherwise yield each under a name of its own, in the type
    in which servers store it, since a delta is added to its bits: Scout's stack alone
    has 2.7 GB, more than any bucket.

    COLLECTIVE over the stage's tensor-parallel group and, if experts are divided, its
    expert-parallel groups, and so over every data-parallel copy: each rank must run the
    iterator to its end. A tensor has its parameter's device, and may share its memory:
    copy what must outlast an update. A tied head is not exported.
    """
    stacks = _Stacks(family.architecture.experts)
    part_of = _parts(chunks, family, parts)
    divided = experts_divided()
    for name, parameter in named_tensors(chunks):
        if family.architecture.tied and name == "output_layer.weight":
            continue
        gathered_shards = _gathered(name, parameter.detach(), family)
        if part_of[_unit(name)] != part:
            if divided and _EXPERT.fullmatch(name):
                deque(gathered_shards, maxlen=0)  # for copies of the model that yield it
            continue
        for full_name, shards in gathered_shards:
            weight = family.weight(full_name)
            served_dtype = None if stacked else weight.served_dtype
            for source, view in _views(weight, shards):
                dtype = served_dtype or view.dtype
                if source.expert is None:
                    yield source.name, view[: weight.vocabulary].contiguous().to(dtype)
                elif not stacked:
                    yield source.separate_name, view.t().contiguous().to(dtype)
                elif (stack := stacks.add(source, view)) is not None:
                    yield source.name, stack
    stacks.check_empty()


def _views(weight: Weight, shards: Sequence[Tensor]) -> Iterator[tuple[SourceView, Tensor]]:
    """Yield each source of a weight, made from the shards of all ranks."""
    views_of_shards = [weight.unmerge(shard) for shard in shards]
    views = []
    for source, *pieces in zip(weight.sources, *views_of_shards, strict=True):
        view = pieces[0] if len(pieces) == 1 else torch.cat(pieces, weight.split)
        views.append((source, view))
    return joined_rows(views)


class _Stacks:
    """Stacks of a layer's experts [experts, …], filled view by view."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._stacks: dict[str, Tensor] = {}
        self._missing: Counter[str] = Counter()

    def add(self, source: SourceView, view: Tensor) -> Tensor | None:
        """Fill in one view; return the stack if this was the last one."""
        name = source.name
        position, views = source.part or (0, 1)
        if name not in self._stacks:
            *others, length = view.shape
            self._stacks[name] = view.new_empty(self._experts, *others, length * views)
            self._missing[name] = self._experts * views
        expert = self._stacks[name][source.expert]
        expert.chunk(views, -1)[position].copy_(view)
        self._missing[name] -= 1
        if self._missing[name]:
            return None
        return self._stacks.pop(name)

    def check_empty(self) -> None:
        """Assert that every stack that was begun is full."""
        assert not self._stacks, f"never filled: {', '.join(self._stacks)}"


def experts_divided() -> bool:
    """Return whether ranks of other data-parallel copies have parts of this rank's
    experts, so that all must gather these.
    """
    with_experts = parallel_state.get_expert_tensor_and_model_parallel_group()
    own_copy = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    return not set(dist.get_process_group_ranks(with_experts)) <= set(own_copy)


def _parts(chunks: Sequence[Module], family: Family, parts: int) -> dict[str, int]:
    """Return the part of each layer and of each tensor outside layers. The largest
    comes first, each into the smallest part.
    """
    sizes: Counter[str] = Counter()
    expert_shards = parallel_state.get_expert_tensor_and_model_parallel_group().size()
    for name, tensor in named_tensors(chunks):
        shards = 1
        if _EXPERT.fullmatch(name):
            shards = expert_shards
        elif family.weight(name).split is not None:
            _, shards = shard_of(name)
        sizes[_unit(name)] += tensor.nbytes * shards
    part_sizes = [0] * parts
    part_of = {}
    for unit, size in sizes.most_common():
        smallest = part_sizes.index(min(part_sizes))
        part_of[unit] = smallest
        part_sizes[smallest] += size
    return part_of


def _unit(name: str) -> str:
    """Return the layer of a tensor, or the name of one outside layers."""
    match = _LAYER.fullmatch(name)
    return f"{match[1]}{match[2]}" if match else name


class _WrittenFile(NamedTuple):
    """A written file of weights."""

    path: Path
    sizes: dict[str, int]  # in bytes, of each tensor in it


def save(chunks: Sequence[Module], family: Family, source: Path, destination: Path) -> None:
    """Write the model as a Hugging Face directory, with configuration, tokenizer and
    tensors outside the language model from `source`. `destination` must not exist; it
    appears once everything is written. If any rank fails, all raise MegarlError and no
    files are left. COLLECTIVE over all ranks; one data-parallel copy of the model
    writes.
    """
    dtype = next(p.dtype for c in chunks for p in c.parameters())
    partial = prepared_partial(
        destination, lambda partial: copy_description(source, partial, dtype)
    )
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    writes = tensor_rank == 0 and parallel_state.get_data_parallel_rank(True) == 0
    stage = parallel_state.get_pipeline_model_parallel_rank()

    def write_stage() -> list[_WrittenFile]:
        return _write(partial, export(chunks, family), f"stage-{stage:04}", writes)

    def write_elsewhere() -> list[_WrittenFile]:
        if dist.get_rank() != 0:
            return []
        return _write(partial, _tensors_elsewhere(family, source), "elsewhere", True)

    def finish() -> None:
        if dist.get_rank() == 0:
            _finish_directory(written, partial, destination)

    written = everywhere(write_stage, partial)
    if family.elsewhere:
        written += everywhere(write_elsewhere, partial)
    everywhere(finish, partial)


def partial_of(path: Path) -> Path:
    """Return where `path` is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


def prepared_partial(destination: Path, fill: Callable[[Path], None]) -> Path:
    """Return the folder to write and then rename to `destination`; rank 0 has begun it
    with `fill`. COLLECTIVE.
    """
    partial = partial_of(destination)

    def start() -> None:
        if dist.get_rank() == 0:
            if destination.exists():
                raise MegarlError(
                    f"{destination}: exists already; remove it or name another directory"
                )
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            fill(partial)

    everywhere(start)
    return partial


def stored_tensors(chunk: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and routers' biases, which are FP32 buffers: no optimiser trains
    them, but they belong to the model.
    """
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer


def named_tensors(chunks: Sequence[Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's `stored_tensors` by Megatron's name, with layers and experts
    counted over the whole model.
    """
    for chunk in chunks:
        for name, parameter in stored_tensors(chunk):
            if match := _LAYER.fullmatch(name):
                layer = chunk.decoder.layers[int(match[2])]
                name = f"{match[1]}{layer.layer_number - 1}{match[3]}"
                if _EXPERT.fullmatch(name):
                    name = _of_expert(name, layer.mlp.local_expert_indices[0])
            yield name, parameter


def _of_expert(name: str, by: int) -> str:
    """Return the name of the same tensor of the expert whose number is `by` larger."""
    match = _EXPERT.fullmatch(name)
    assert match is not None, name
    prefix, expert, suffix = match.groups()
    return f"{prefix}{int(expert) + by}{suffix}"


def shard_of(name: str) -> tuple[int, int]:
    """Return this rank's shard of the parameter and the number of shards."""
    if _EXPERT.fullmatch(name):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return group.rank(), group.size()


def _gathered(name: str, parameter: Tensor, family: Family) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (name, shards of all ranks) for this parameter and, if it is an expert's,
    for its counterparts on other ranks.
    """
    if not _EXPERT.fullmatch(name):
        shards = [parameter]
        if family.weight(name).split is not None:
            shards = _all(parameter, parallel_state.get_tensor_model_parallel_group())
        yield name, shards
        return
    experts = parallel_state.get_expert_model_parallel_group()
    _, shards_per_expert = shard_of(name)
    experts_of_a_rank = family.architecture.experts // experts.size()
    # In the order of ranks in this group, the shards of an expert are neighbours.
    shards = _all(parameter, parallel_state.get_expert_tensor_and_model_parallel_group())
    for rank in range(experts.size()):
        first = rank * shards_per_expert
        counterpart = _of_expert(name, (rank - experts.rank()) * experts_of_a_rank)
        yield counterpart, shards[first : first + shards_per_expert]


def _all(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors


def read_view(
    tensor: Tensor, shape: Sequence[int], source: SourceView, weight: Weight, rank: int, size: int
) -> Tensor:
    """Read the part of rank `rank` of `size` of one view of a Hugging Face tensor, with
    zeros for padding of the vocabulary. tensor: of a mapped file, of which only the
    part that is indexed is read.
    """
    bounds = [slice(0, length) for length in shape]
    dimension = weight.split
    if source.rows is not None:
        bounds[0] = slice(*source.rows)
    if source.expert is not None:
        bounds[0] = slice(source.expert, source.expert + 1)
        if dimension is not None:
            dimension += 1  # after that of the experts
    if source.part is not None:
        k, parts = source.part
        length = shape[-1]
        first = k * length // parts
        last = (k + 1) * length // parts
        bounds[-1] = slice(first, last)
    padding = 0
    if dimension is not None:
        start = bounds[dimension].start
        end = bounds[dimension].stop
        shard_length = -(-(end - start) // size)
        first = min(start + rank * shard_length, end)
        last = min(first + shard_length, end)
        bounds[dimension] = slice(first, last)
        padding = shard_length - (last - first)
    view = tensor[tuple(bounds)]
    if source.expert is not None:
        view = view.squeeze(0)
    if weight.vocabulary is not None and padding:
        zeros = view.new_zeros(padding, *view.shape[1:])
        view = torch.cat([view, zeros])
    return view


def everywhere[T](work: Callable[[], T], partial: Path | None = None) -> list[T]:
    """Return each rank's result of `work()`. COLLECTIVE. If any fails, every rank
    raises and rank 0 removes `partial`.
    """
    result: list[T] = []
    failure = ""
    try:
        result.append(work())
    except (MegarlError, OSError, SafetensorError) as error:
        failure = str(error) or repr(error)
    results, failures = zip(*gathered((result, failure)), strict=True)
    errors = list(dict.fromkeys(filter(None, failures)))
    if errors:
        if partial is not None and dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise MegarlError("\n".join(errors))
    return [value for values in results for value in values]


def copy_description(source: Path, destination: Path, dtype: torch.dtype | None = None) -> None:
    """Copy every file without weights. dtype: put it into the config and remove the
    quantisation from it.
    """
    config = read_config(source)
    destination.mkdir(parents=True, exist_ok=True)
    for path in description_files(source):
        shutil.copyfile(path, destination / path.name)
    if dtype is not None:
        config.pop("quantization_config", None)
        for part in (config, config.get("text_config", config)):
            # Readers prefer `dtype` if there are both.
            keys = part.keys() & {"dtype", "torch_dtype"}
            part |= dict.fromkeys(keys or {"dtype"}, plain(dtype))
        write_config(destination, config)


def _tensors_elsewhere(family: Family, source: Path) -> Iterator[tuple[str, Tensor]]:
    for name, place in sorted(tensors_in_files(source).items()):
        if family.passthrough(name):
            yield name, Region.of(place).tensor()


def _write(
    partial: Path, tensors: Iterator[tuple[str, Tensor]], prefix: str, writes: bool
) -> list[_WrittenFile]:
    """Write these tensors to files of at most SHARD_BYTES (or one tensor). Without
    `writes`, only run the iterator.
    """
    written: list[_WrittenFile] = []
    error: Exception | None = None
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        """Write the pending tensors to the next file. After an error, which is kept in
        `error`, drop them instead.
        """
        nonlocal error
        if pending and error is None:
            path = partial / f"{prefix}-{len(written):05}.safetensors"
            sizes = {name: tensor.nbytes for name, tensor in pending.items()}
            try:
                save_file(pending, path, metadata={"format": "pt"})
                written.append(_WrittenFile(path, sizes))
            except (OSError, SafetensorError) as failed:
                # the other ranks of the tensor-parallel group still need this one in
                # the all-gathers
                error = failed
        pending.clear()

    for name, tensor in tensors:
        if not writes:
            continue
        pending_bytes = sum(t.nbytes for t in pending.values())
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor.to("cpu", copy=True)
    flush()
    if error is not None:
        raise error
    return written


def _finish_directory(written: list[list[_WrittenFile]], partial: Path, destination: Path) -> None:
    """Give the files their usual names, write the index if there are several, and
    rename the directory.
    """
    files = list(itertools.chain.from_iterable(written))
    weight_map = {}
    total = 0
    # By the umask; safetensors would let only the owner read weights.
    mode = (partial / "config.json").stat().st_mode
    for i, file in enumerate(files, 1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{i:05}-of-{len(files):05}.safetensors"
        file.path.chmod(mode)
        os.replace(file.path, partial / name)
        weight_map.update(dict.fromkeys(file.sizes, name))
        total += sum(file.sizes.values())
    if len(files) > 1:
        write_index(partial, weight_map, total)
    os.replace(partial, destination)


def write_index(hf_dir: Path, file_of: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of a directory with several files of weights. file_of: the file
    of each tensor.
    """
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
    (hf_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_config(hf_dir: Path, config: Mapping[str, object]) -> None:
    """Write config.json."""
    (hf_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
