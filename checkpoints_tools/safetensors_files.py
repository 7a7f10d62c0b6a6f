"""Hugging Face directories: tensors read one at a time by memory map, files written
piece by piece.

    file = 8 bytes: length of the header | header: {name: {dtype, shape, data_offsets}}
    | values

safetensors' own reader maps a whole file and keeps the pages it has touched; its writer
needs all tensors of a file in memory.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.base.safetensors_header import TensorInFile
from megarl.core.base.weight_files import tensors_in_files
from megarl.core.models.region import DTYPES, Region, Shape, write_all

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Directory(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory by name, whose values are read on access.
    tensors: None for all that are stored, as they are stored; the model need not be one
    that is trained.
    """

    def __init__(self, hf_dir: Path, tensors: Mapping[str, TensorInFile] | None = None) -> None:
        self.path = hf_dir
        places = tensors_in_files(hf_dir) if tensors is None else tensors
        self.regions = {name: Region.of(place) for name, place in places.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.regions[name].tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self.regions)

    def __len__(self) -> int:
        return len(self.regions)


class SafetensorsFile:
    """One safetensors file being written. Its header is written first; values can be
    written in any order.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Shape]) -> None:
        self._tensors = tensors
        self._begin: dict[str, int] = {}  # bytes from the first value on
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            self._begin[name] = end
            end = end + tensor.nbytes
            offsets = [self._begin[name], end]
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that values are aligned
        self._values = 8 + len(text)  # where they begin in the file
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
        beginning = bytearray(struct.pack("<Q", len(text)) + text)
        write_all(self._descriptor, torch.frombuffer(beginning, dtype=torch.uint8), 0)

    def write(self, name: str, value: Tensor, entry: int = 0) -> None:
        """Write the values of a tensor, or of its `entry`-th equal part along dimension
        0.
        """
        if NAMES[value.dtype] != NAMES[self._tensors[name].dtype]:
            raise MegarlError(f"{name}: {value.dtype} instead of {self._tensors[name].dtype}")
        write_all(self._descriptor, value, self._values + self._begin[name] + entry * value.nbytes)

    def close(self) -> None:
        """Close the file. What was written may not be on disk yet."""
        os.close(self._descriptor)
