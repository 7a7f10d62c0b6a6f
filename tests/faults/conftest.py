"""Disks that can be filled, and where the time of a fault is said."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import Disk


@pytest.fixture
def disk() -> Iterator[Callable[[Path, int], Disk]]:
    """disk(path, mebibytes): a file system of that size, mounted there until the test ends."""
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    mounted: list[Disk] = []

    def mount(path: Path, mebibytes: int) -> Disk:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", path], check=True)
        mounted.append(Disk(path))
        return mounted[-1]

    yield mount
    for one in mounted:
        subprocess.run(["umount", "--lazy", one.path], check=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was measured, for docs/reliability.md."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}: {name}: {value}")
