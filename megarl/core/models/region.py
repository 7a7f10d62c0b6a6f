"""A tensor's bytes within a file, read through a memory map: nothing is copied, and
dropping the view frees everything. safetensors' own reader keeps all pages that it has
touched.
"""

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import _TYPES
from torch import Tensor

from megarl.core.base.errors import MegarlError
from megarl.core.base.safetensors_header import TensorInFile

DTYPES: dict[str, torch.dtype] = _TYPES | {"F8_E8M0": torch.float8_e8m0fnu}
"""torch's types by their names in safetensors."""


@dataclass(frozen=True)
class Shape:
    """A tensor's shape and type, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Region(Shape):
    """A tensor in a file. offset: of its first byte."""

    path: Path
    offset: int

    @classmethod
    def of(cls, place: TensorInFile) -> "Region":
        """Return the tensor at a place in a safetensors file."""
        if place.dtype not in DTYPES:
            raise MegarlError(f"{place.path}: torch cannot read the type {place.dtype} in it")
        return cls(place.shape, DTYPES[place.dtype], place.path, place.offset)

    def tensor(self) -> Tensor:
        """Return a view of the file, private to this process. The file's length must
        have been checked when it was opened.
        """
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        position = self.offset % mmap.ALLOCATIONGRANULARITY  # within the mapped part
        with self.path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(),
                position + self.nbytes,
                access=mmap.ACCESS_COPY,
                offset=self.offset - position,
            )
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=self.nbytes, offset=position)
        # safetensors aligns to 8 bytes, other writers may not
        if data.data_ptr() % self.dtype.itemsize:
            data = data.clone()
        return data.view(self.dtype).view(self.shape)


def is_finite(value: Tensor) -> bool:
    """Return whether no value is infinite or NaN, in one pass and without a copy."""
    if not value.numel() or not value.is_floating_point() or value.dtype.itemsize == 1:
        return True
    smallest, largest = torch.aminmax(value)
    return bool(smallest.isfinite() and largest.isfinite())


def check_finite(value: Tensor, names: Sequence[str], path: Path) -> None:
    """Raise MegarlError if a value of the tensor made from `names` is infinite or NaN.
    path: named in the error.
    """
    if is_finite(value):
        return
    tensor_names = ", ".join(dict.fromkeys(names))
    count = int((~value.isfinite()).sum())
    raise MegarlError(
        f"{path}: {count} of {value.numel()} values of {tensor_names} are NaN or infinite; no model works"
        " with those, so take another one"
    )


def write_all(descriptor: int, tensor: Tensor, offset: int) -> None:
    """Write the values of a tensor to a file, at this offset."""
    values = tensor.contiguous().reshape(-1)
    data = memoryview(values.view(torch.uint8).numpy())
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written
