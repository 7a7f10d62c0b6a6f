"""A small disk that somebody else fills."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Disk:
    """Mounted at `path`."""

    path: Path

    @property
    def filler(self) -> Path:
        return self.path / "somebody-elses"

    def fill(self) -> None:
        """Not a byte is left."""
        with self.filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)
        assert shutil.disk_usage(self.path).free == 0

    def free(self) -> None:
        os.unlink(self.filler)
