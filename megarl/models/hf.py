"""Weights between Hugging Face directories and this rank's chunks: load, export (for publication), save.

    load      safetensors ──slices of this TP rank──► merge ──► parameter
    export    parameter ──all-gather over TP──► unmerge ──► (name, whole tensor)         one parameter at a time
    save      export of every stage ──► files, index, config, tokenizer ──► rename       a directory is whole or not there

Values are copied, never computed with: export after load gives the same bits if the model has the directory's dtype.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module, Parameter

from megarl.errors import MegarlError
from megarl.models.family import Family, Weight, read_config, write_config

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pth|pt|gguf|h5|msgpack)(\.index\.json)?|\..*")


class Tensors(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory by name, each read when asked for. Open until `stack` is closed."""

    def __init__(self, hf_dir: Path, stack: ExitStack) -> None:
        if not hf_dir.is_dir():
            raise MegarlError(f"{hf_dir}: no such directory")
        index = hf_dir / INDEX
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
            paths = [hf_dir / n for n in names] if names else sorted(hf_dir.glob("*.safetensors"))
            if not paths:
                raise MegarlError(f"{hf_dir}: no *.safetensors there (other formats: convert with transformers first)")
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise MegarlError(f"{hf_dir}: weights unreadable or incomplete: {error}") from None
        self._file_of: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def slice(self, name: str) -> Any:
        """safetensors' view of a tensor, which reads what is indexed."""
        return self._file_of[name].get_slice(name)


def load(chunks: Sequence[Module], family: Family, hf_dir: Path) -> None:
    """Fill this rank's parameters from `hf_dir`, reading only its part. MegarlError names all missing and extra tensors."""
    rank, size = _tp_place()
    with ExitStack() as stack, torch.no_grad():
        tensors = Tensors(Path(hf_dir), stack)
        _check_names(Path(hf_dir), set(tensors), family)
        for name, parameter in named_parameters(chunks):
            weight = family.weight(name)
            try:
                pieces = [_read_piece(tensors.slice(n), weight, rank, size) for n in weight.names]
                value = weight.merge(pieces)
            except (SafetensorError, RuntimeError, OSError) as error:
                raise MegarlError(f"{hf_dir}: cannot read {', '.join(weight.names)}: {error}") from None
            if value.shape != parameter.shape:
                raise MegarlError(
                    f"{hf_dir}: {', '.join(weight.names)} do not have the shapes config.json says: "
                    f"{tuple(value.shape)} instead of {tuple(parameter.shape)} for {name}"
                )
            parameter.copy_(value)


def export(chunks: Sequence[Module], family: Family) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's weights as (Hugging Face name, whole tensor), one at a time, always in the same order.

    COLLECTIVE over the tensor-parallel group of the stage: each of its ranks must run the iterator to its end. Every rank gets
    whole tensors in the parameters' dtype and device. A tensor may share memory with its parameter: copy what must outlast an
    update. A tied head is the first stage's embedding and comes only from there.
    """
    _, size = _tp_place()
    group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in named_parameters(chunks):
        if family.tied and name == "output_layer.weight":
            continue
        weight = family.weight(name)
        shards = [parameter.detach()]
        if weight.split is not None and size > 1:
            shards = [torch.empty_like(shards[0]) for _ in range(size)]
            dist.all_gather(shards, parameter.detach().contiguous(), group=group)
        for hf_name, pieces in zip(weight.names, zip(*map(weight.unmerge, shards), strict=True), strict=True):
            whole = torch.cat(pieces, weight.split) if len(pieces) > 1 else pieces[0]
            yield hf_name, whole[: weight.vocabulary].contiguous()


def save(
    chunks: Sequence[Module], family: Family, source: Path, destination: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the model as a Hugging Face directory. COLLECTIVE over all ranks; one data-parallel copy of the model writes.

    Configuration and tokenizer come from `source`. `destination` must not exist; it appears when all is written. If any rank
    fails, every rank raises MegarlError and nothing stays behind.
    """
    destination = Path(destination)
    partial = destination.with_name(f".{destination.name}.partial")
    everywhere(lambda: _start_directory(Path(source), destination, partial, chunks) if dist.get_rank() == 0 else None)
    writes = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    written = everywhere(lambda: _write_stage(export(chunks, family), partial, stage, shard_bytes, writes), partial)
    everywhere(lambda: _finish_directory(written, partial, destination) if dist.get_rank() == 0 else None, partial)


def named_parameters(chunks: Sequence[Module]) -> Iterator[tuple[str, Parameter]]:
    """This rank's parameters by Megatron's name, with layers counted over the whole model instead of the chunk."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            match = _LAYER.fullmatch(name)
            if match:
                layer = chunk.decoder.layers[int(match[2])].layer_number - 1
                name = f"{match[1]}{layer}{match[3]}"
            yield name, parameter


def _tp_place() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _check_names(hf_dir: Path, present: set[str], family: Family) -> None:
    needed = family.names()
    # Left by old versions of transformers; a tied head may be stored a second time.
    ignored = {n for n in present if n.endswith("rotary_emb.inv_freq") or (family.tied and n == "lm_head.weight")}
    missing, extra = sorted(needed - present), sorted(present - needed - ignored)
    if missing or extra:
        parts = [
            f"{what} {_few(names)}" for what, names in (("missing", missing), ("not of this model", extra)) if names
        ]
        raise MegarlError(f"{hf_dir}: weights do not fit config.json: {'; '.join(parts)}")


def _few(names: list[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})"


def _read_piece(tensor: Any, weight: Weight, rank: int, size: int) -> Tensor:
    """This TP rank's part of one Hugging Face tensor; zeros where the vocabulary is padded."""
    if weight.split is None:
        return tensor[:]
    rows = tensor.get_shape()[weight.split]
    part = -(-rows // size)
    start, stop = rank * part, min((rank + 1) * part, rows)
    if weight.split == 1:
        return tensor[:, start:stop]
    piece = tensor[min(start, rows) : stop]
    if weight.vocabulary is not None and len(piece) < part:
        piece = torch.cat([piece, piece.new_zeros(part - len(piece), *piece.shape[1:])])
    return piece


def everywhere[T](work: Callable[[], T], partial: Path | None = None) -> list[T]:
    """Each rank's result of `work()`. If it failed anywhere, every rank raises and rank 0 removes `partial`. COLLECTIVE."""
    value, failure = None, ""
    try:
        value = work()
    except (MegarlError, OSError, SafetensorError) as error:
        failure = str(error)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (value, failure))
    errors = list(dict.fromkeys(error for _, error in results if error))
    if errors:
        if partial is not None and dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise MegarlError("\n".join(errors))
    return [value for value, _ in results]


def copy_description(source: Path, destination: Path, dtype: torch.dtype | None = None) -> None:
    """Configuration, generation configuration, tokenizer: every file of `source` that holds no weights. `dtype` is noted."""
    config = read_config(source)
    destination.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not _WEIGHT_FILES.fullmatch(path.name):
            shutil.copyfile(path, destination / path.name)
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        write_config(destination, config)


def _start_directory(source: Path, destination: Path, partial: Path, chunks: Sequence[Module]) -> None:
    if destination.exists():
        raise MegarlError(f"{destination}: exists already; remove it or name another directory")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    copy_description(source, partial, next(p.dtype for c in chunks for p in c.parameters()))


def _write_stage(
    tensors: Iterator[tuple[str, Tensor]], partial: Path, stage: int, shard_bytes: int, writes: bool
) -> list[tuple[str, list[str], int]]:
    """Write this stage's tensors to files of at most `shard_bytes` (or one tensor): [(file, names, bytes)]."""
    written: list[tuple[str, list[str], int]] = []
    error: Exception | None = None
    held: dict[str, Tensor] = {}

    def flush() -> None:
        nonlocal error
        if held and error is None:
            file = f"stage-{stage:04}-{len(written):05}.safetensors"
            try:
                save_file(held, partial / file, metadata={"format": "pt"})
                written.append((file, list(held), sum(t.nbytes for t in held.values())))
            except (OSError, SafetensorError) as failed:
                error = failed  # the other ranks of the tensor-parallel group still expect this one in the all-gathers
        held.clear()

    for name, tensor in tensors:
        if writes:
            if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > shard_bytes:
                flush()
            held[name] = tensor.to("cpu", copy=True)
    flush()
    if error is not None:
        raise error
    return written


def _finish_directory(written: list[list[tuple[str, list[str], int]]], partial: Path, destination: Path) -> None:
    """Usual names, index, rename."""
    files = list(itertools.chain.from_iterable(written))
    if len(files) == 1:
        os.replace(partial / files[0][0], partial / "model.safetensors")
    else:
        weight_map = {}
        for i, (file, names, _) in enumerate(files, 1):
            usual = f"model-{i:05}-of-{len(files):05}.safetensors"
            os.replace(partial / file, partial / usual)
            weight_map.update(dict.fromkeys(names, usual))
        index = {
            "metadata": {"total_size": sum(size for *_, size in files)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, destination)
