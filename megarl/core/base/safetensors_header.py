"""Where each tensor lies in a safetensors file, read from the file's header.

    file = 8 bytes: length of the header | header: {name: {dtype, shape, data_offsets}}
    | values

Needs neither torch nor the values. A header is checked as safetensors' own reader
checks it, so what passes here opens there.
"""

import json
import math
import struct
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import JsonObject

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one value by the name of its type in a header."""
MOST_HEADER_BYTES = 100_000_000
"""Longer headers are refused by safetensors, too."""


@dataclass(frozen=True)
class TensorInFile:
    """A tensor that begins at byte `offset` of the file `path`. dtype: a key of
    BITS.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def rows(self, first: int, shape: tuple[int, ...]) -> "TensorInFile":
        """Return the tensor of this shape that begins `first` rows further on. A row is
        the last dimension.
        """
        row_bytes = self.shape[-1] * BITS[self.dtype] // 8
        return replace(self, shape=shape, offset=self.offset + first * row_bytes)


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a file by name. MegarlError if it is damaged or
    incomplete.
    """
    try:
        return _tensors(path)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"weights unreadable or incomplete ({error})"
    except RecursionError:
        problem = "weights unreadable or incomplete (its header is nested too deeply)"
    except OSError as error:
        problem = f"weights cannot be read ({error.strerror})"
    raise MegarlError(f"{path}: {problem}; fetch this file again") from None


def _tensors(path: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a file by name. ValueError, or another error that
    `read_header` catches, unless their values fill the rest of the file without gaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError("cut off within its header, or no safetensors file")
        header: JsonObject = json.loads(file.read(length))
    header.pop("__metadata__", None)
    values_offset = 8 + length
    entries = [(*entry["data_offsets"], name, entry) for name, entry in header.items()]
    previous_end = 0
    tensors = {}
    for start, end, name, entry in sorted(entries, key=itemgetter(0, 1)):
        if entry["dtype"] not in BITS:
            raise ValueError(f"{name} has the unknown type {entry['dtype']}")
        if not are_counts(start, end, *entry["shape"]):
            raise ValueError(f"{name} has the shape {entry['shape']} at {start} to {end}")
        tensor = TensorInFile(entry["dtype"], tuple(entry["shape"]), path, values_offset + start)
        if tensor.nbytes != end - start:
            raise ValueError(f"{name} of {entry['shape']} {tensor.dtype} has {end - start} bytes")
        if start != previous_end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        if values_offset + end > size:
            raise ValueError(f"cut off: {size} bytes, and {name} ends at {values_offset + end}")
        previous_end = end
        tensors[name] = tensor
    if size != values_offset + previous_end:
        raise ValueError(f"{size - values_offset - previous_end} bytes follow its last tensor")
    return tensors


def are_counts(*values: object) -> bool:
    """Return whether all of these values, read from a file, are integers from 0."""
    return all(type(value) is int and value >= 0 for value in values)
