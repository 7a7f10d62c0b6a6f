"""What a directory holds: architecture, size, and of a checkpoint its step and the layout it was written at."""

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints_tools.model import stored
from megarl.errors import MegarlError
from megarl.models import hf
from megarl.models.family import read_config

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def inspect(directory: Path, list_tensors: bool) -> None:
    """Print it. No weights stay in memory."""
    what = stored(directory)
    config = read_config(what.hf_dir)
    print(what.path)
    print(f"  architecture  {', '.join(config.get('architectures') or ['unknown'])}")
    if what.meta is not None:
        layout = {k: v for k, v in what.meta.model.items() if k.endswith("_parallel") and v not in (1, False)}
        print(f"  checkpoint    step {what.meta.step}, weights of version {what.meta.version}")
        print(f"  written at    {', '.join(f'{k}={v}' for k, v in layout.items()) or 'one rank a copy'}")
        tensors = _of_checkpoint(what.path)
        optimizer = {k: v for k, v in tensors.items() if k.startswith("optimizer.")}
        tensors = {k: v for k, v in tensors.items() if k not in optimizer}
        print(f"  optimiser     {_size(optimizer) if optimizer else 'none'}")
    else:
        with ExitStack() as stack:
            opened = hf.Tensors(what.path, stack)
            tensors = {name: (tuple(opened[name].shape), opened[name].dtype) for name in opened}
    print(f"  weights       {_size(tensors)}")
    if list_tensors:
        for name, (shape, dtype) in sorted(tensors.items()):
            print(f"  {name}  {list(shape)}  {str(dtype).removeprefix('torch.')}")


def _of_checkpoint(path: Path) -> Described:
    try:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle that is cut off or foreign can fail in any way
        raise MegarlError(f"{path / '.metadata'}: unreadable: {error}") from None
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _size(tensors: Described) -> str:
    count = sum(math.prod(shape) for shape, _ in tensors.values())
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
    types = sorted({str(dtype).removeprefix("torch.") for _, dtype in tensors.values()})
    return f"{len(tensors)} tensors, {count:,} values, {size / 2**20:,.1f} MiB, {', '.join(types)}"
