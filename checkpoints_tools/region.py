"""A tensor's bytes within a file, read through a memory map: nothing is copied, and dropping the view frees everything."""

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Region(Shape):
    path: Path
    offset: int

    def tensor(self) -> Tensor:
        """Return a view of the file, private to this process. The file's length must have been checked when it was opened."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            length = self.offset + self.nbytes - start
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=self.nbytes, offset=self.offset - start)
        if flat.data_ptr() % self.dtype.itemsize:  # safetensors aligns to 8 bytes, other writers may not
            flat = flat.clone()
        return flat.view(self.dtype).view(self.shape)


def write_all(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write the values of a tensor to a file, at this offset."""
    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
