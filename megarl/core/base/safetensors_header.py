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
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one value by the name of its type in a header."""
MOST_HEADER_BYTES = 100_000_000
"""Longer headers are refused by safetensors, too."""


@dataclass(frozen=True)
class TensorInFile:
    """A tensor that begins at byte `offset` of the file `path`. dtype: a key of BITS."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def rows(self, first: int, shape: tuple[int, ...]) -> "TensorInFile":
        """Return the tensor of this shape whose values begin with row `first`, counted
        over all dimensions but the last.
        """
        row_bytes = self.shape[-1] * BITS[self.dtype] // 8
        return replace(self, shape=shape, offset=self.offset + first * row_bytes)


def read_header(path: Path) -> dict[str, TensorInFile]:
    """Return the tensors of a file by name. MegarlError if it is damaged or incomplete."""
    try:
        return _tensors(path)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"weights unreadable or incomplete ({error})"
    except RecursionError:
        why = "weights unreadable or incomplete (its header is nested too deeply)"
    except OSError as error:
        why = f"weights cannot be read ({error.strerror})"
    raise MegarlError(f"{path}: {why}; fetch this file again") from None


def _tensors(path: Path) -> dict[str, TensorInFile]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError("cut off within its header, or no safetensors file")
        header: JsonObject = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end_of_last = 0
    tensors = {}
    spans = [(*entry["data_offsets"], name, entry) for name, entry in header.items()]
    for begin, end, name, entry in sorted(spans, key=itemgetter(0, 1)):
        if entry["dtype"] not in BITS:
            raise ValueError(f"{name} has the unknown type {entry['dtype']}")
        if not all(type(n) is int and n >= 0 for n in (begin, end, *entry["shape"])):
            raise ValueError(f"{name} has the shape {entry['shape']} at {begin} to {end}")
        tensor = TensorInFile(entry["dtype"], tuple(entry["shape"]), path, 8 + length + begin)
        if tensor.nbytes != end - begin:
            raise ValueError(f"{name} of {entry['shape']} {tensor.dtype} has {end - begin} bytes")
        if begin != end_of_last:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        if 8 + length + end > size:
            raise ValueError(f"cut off: {size} bytes, and {name} ends at {8 + length + end}")
        end_of_last = end
        tensors[name] = tensor
    if size != 8 + length + end_of_last:
        raise ValueError(f"{size - 8 - length - end_of_last} bytes follow its last tensor")
    return tensors
