"""Removes from shared libraries the kernels that a GPU of one architecture does not
run, so that they compress well.

    python one_architecture.py 90 LIBRARY…

A library made by nvcc holds its kernels once per architecture, of which the driver
loads one: linked kernels in the section `.nv_fatbin`, the parts from which they were
linked in `__nv_relfatbin`. The others are removed: within its container, the rest moves
together, the container's size is set to match, and zeros fill the gap. Nothing else
moves.

Layout (as `cuobjdump` shows it): containers of a header (u32 0xBA55ED50, u16 version,
u16 header bytes, u64 content bytes) and of elements, each a header (u16 kind, u16
version, u32 header bytes, u64 content bytes, …, u32 architecture at byte 28) and its
content.
"""

import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MAGIC = 0xBA55ED50
MACHINE_CODE = 2
"""The kind of an element with machine code; PTX is 1."""


def main(architecture: int, libraries: list[Path]) -> int:
    """Shrink the containers of each library (ELF, 64 bits) in place; return how many
    bytes are zeros now.
    """
    freed = 0
    for library in libraries:
        with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for begin, content, end in list(containers(data)):
                found = list(elements(data, content, end))
                # A container without elements would be invalid, rather than one without
                # a kernel for this GPU.
                kept = [
                    each for each, needs in found if needs is None or _runs(needs, architecture)
                ]
                kept = b"".join(kept or [min((each for each, _ in found), key=len)])
                struct.pack_into("<Q", data, begin + 8, len(kept))
                data[content:end] = kept + bytes(end - content - len(kept))
                freed += end - content - len(kept)
    return freed


def _runs(code: int, architecture: int) -> bool:
    """Return whether a GPU of `architecture` (90 for sm_90) can run machine code for
    architecture `code`.
    """
    return code // 10 == architecture // 10 and code <= architecture


def containers(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, int]]:
    """Yield for each container that is not empty the offsets in bytes at which it and
    its content begin, and its end.
    """
    for begin, end in _fatbins(data):
        while begin + 16 <= end:
            magic, _, header, size = struct.unpack_from("<IHHQ", data, begin)
            if magic != MAGIC:  # padding
                begin += 8
                continue
            if size:
                yield begin, begin + header, begin + header + size
            begin += header + size


def elements(data: mmap.mmap | bytes, at: int, end: int) -> Iterator[tuple[bytes, int | None]]:
    """Yield the elements of a container, each with the architecture of its machine
    code, or None if it has none.
    """
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        yield data[at : at + header + size], architecture if kind == MACHINE_CODE else None
        at += header + size


def _fatbins(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """Yield the range of bytes of each section in SECTIONS."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, table + n * entry) for n in range(count)]
    for name, _, _, _, offset, size in sections:
        start = sections[names][4] + name
        if data[start : data.find(b"\0", start)] in SECTIONS:
            yield offset, offset + size


if __name__ == "__main__":
    print(
        f"{main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]]) / 1e6:,.0f} MB for other"
        " architectures taken out"
    )
