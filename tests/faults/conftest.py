"""Disks that can be filled."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.disks import Disk


@pytest.fixture
def disk() -> Iterator[Callable[[Path, int], Disk]]:
    """disk(path, mebibytes): a file system of that size, mounted there until the test
    ends.
    """
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    mounted: list[Disk] = []

    def mount(path: Path, mebibytes: int) -> Disk:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", path], check=True
        )
        mounted.append(Disk(path))
        return mounted[-1]

    yield mount
    for one in mounted:
        subprocess.run(["umount", "--lazy", one.path], check=True)
