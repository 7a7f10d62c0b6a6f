"""Reads files that a stranger or a crash may have left in a run directory.

    opened      a regular file, open for reading
    contents    all of it, up to a limit
    lines_of    line by line, each up to a limit

To all of them a FIFO or a device is an error, and so is more than anybody's memory
holds.

A FIFO would let its reader wait for ever; /dev/zero, and a sparse file of many
gigabytes, would use up the memory.
"""

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megarl.core.base.errors import MegarlError

LARGEST_BYTES = 256 << 20
"""Bytes of a file that is read as a whole."""
LONGEST_LINE_BYTES = 64 << 20
"""Bytes of a line. The longest that a run writes, a rollout of a skipped step, has a
few MiB.
"""


def opened(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. OSError if that fails; MegarlError if it is no
    regular file.
    """
    file = io.open(path, "rb", buffering, opener=_without_waiting)  # noqa: UP020, SIM115
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise MegarlError(f"{path}: a pipe or a device, where a regular file belongs; remove it")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of a FIFO without a writer, too, return at once."""
    return os.open(path, flags | os.O_NONBLOCK)


def contents(path: Path, limit: int = LARGEST_BYTES) -> bytes:
    """Return all bytes of a regular file. MegarlError if it has more than `limit`; else
    as `opened`.
    """
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size <= limit:
            data = file.read(limit + 1)
            if len(data) <= limit:
                return data
    raise MegarlError(
        f"{path}: larger than {limit >> 20} MiB, which no file of its kind is; remove it"
    )


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their ends. Errors as `opened`, and of
    `next_line`.
    """
    with opened(path) as file:
        while line := next_line(file, path):
            yield line


def next_line(file: BinaryIO, path: Path) -> bytes:
    """Return the next line with its end, b"" after the last. MegarlError if it is too
    long.
    """
    line = file.readline(LONGEST_LINE_BYTES + 1)
    if len(line) > LONGEST_LINE_BYTES:
        raise MegarlError(
            f"{path}: a line of more than {LONGEST_LINE_BYTES >> 20} MiB, so it is not a file of"
            " lines; remove it"
        )
    return line
