"""Hugging Face directories: tensors read one at a time by memory map, files written piece by piece.

    file = 8 bytes: length of the header | header: {name: {dtype, shape, data_offsets}} | values

safetensors' own reader maps a whole file and keeps the pages it has touched; its writer needs all tensors of a file in memory.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Set
from copy import copy
from pathlib import Path

import torch
from safetensors.torch import _TYPES as DTYPES
from torch import Tensor

from checkpoints_tools.region import Region, Shape, write_all
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import weight_files

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Directory(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory by name. Files are checked when opened; values are read on access."""

    def __init__(self, hf_dir: Path) -> None:
        self.path = hf_dir
        self.regions: dict[str, Region] = {}
        for path in weight_files(hf_dir):
            self.regions |= _regions(path)

    def only(self, names: Set[str]) -> "Directory":
        """Return the same directory with only these tensors."""
        fewer = copy(self)
        fewer.regions = {name: region for name, region in self.regions.items() if name in names}
        return fewer

    def __getitem__(self, name: str) -> Tensor:
        return self.regions[name].tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self.regions)

    def __len__(self) -> int:
        return len(self.regions)


class SafetensorsFile:
    """One safetensors file being written. Its header is written first; values can be written in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, Shape]) -> None:
        self._tensors = tensors
        self._begin: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            self._begin[name], end = end, end + tensor.nbytes
            offsets = [self._begin[name], end]
            header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._values = 8 + len(text)
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
        beginning = bytearray(struct.pack("<Q", len(text)) + text)
        write_all(self._descriptor, torch.frombuffer(beginning, dtype=torch.uint8), 0)

    def write(self, name: str, value: Tensor, entry: int = 0) -> None:
        """Write the values of a tensor, or of its `entry`-th equal part along dimension 0."""
        if NAMES[value.dtype] != NAMES[self._tensors[name].dtype]:
            raise MegarlError(f"{name}: {value.dtype} instead of {self._tensors[name].dtype}")
        write_all(self._descriptor, value, self._values + self._begin[name] + entry * value.nbytes)

    def close(self) -> None:
        os.close(self._descriptor)


def _regions(path: Path) -> dict[str, Region]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("cut off within its header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        regions = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            region = Region(tuple(entry["shape"]), DTYPES[entry["dtype"]], path, 8 + length + begin)
            if begin < 0 or region.nbytes != end - begin:
                raise ValueError(f"{name} of {entry['shape']} {entry['dtype']} has {end - begin} bytes")
            if 8 + length + end > size:
                raise ValueError(f"cut off: {size} bytes, {name} ends at {8 + length + end}")
            regions[name] = region
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise MegarlError(f"{path}: weights unreadable or incomplete: {error}") from None
    return regions
