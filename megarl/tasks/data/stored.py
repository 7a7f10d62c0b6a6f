"""Prompts on disk: what a run holds of a prompt while it is not drawn is where it lies.

    append(prompt) ─► a file without a name, in $TMPDIR, gone with this process          8 bytes a prompt in memory
    prompts[n]     ◄─ read and decoded, some microseconds

Tokens of a million prompts are gigabytes, and answers that are unit tests reach a megabyte each.
"""

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from megarl.core.base.errors import MegarlError
from megarl.core.base.types import Prompt, decode, encode


@contextmanager
def _room() -> Iterator[None]:
    """MegarlError where the disk has none."""
    try:
        yield
    except OSError as error:
        raise MegarlError(
            f"{tempfile.gettempdir()}: prompts cannot be kept there: {error.strerror}; set TMPDIR to a larger disk"
        ) from None


class Stored(Sequence[Prompt]):
    """Prompts in the order in which they were appended."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as this is)
        self._ends = array("Q", [0])

    def append(self, prompt: Prompt) -> None:
        """MegarlError if the disk is full."""
        data = encode(prompt)
        with _room():
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, n: int) -> Prompt: ...
    @overload
    def __getitem__(self, n: slice) -> list[Prompt]: ...
    def __getitem__(self, n: int | slice) -> Prompt | list[Prompt]:
        if isinstance(n, slice):
            return [self[i] for i in range(*n.indices(len(self)))]
        if not -len(self) <= n < len(self):
            raise IndexError(n)
        begin, end = self._ends[n % len(self)], self._ends[n % len(self) + 1]
        with _room():
            self._file.flush()
        return decode(os.pread(self._file.fileno(), end - begin, begin), Prompt)
