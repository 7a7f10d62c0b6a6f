"""Which cores are near a GPU, by a /sys that is a fake."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.core.base import device

NEAR = "0000:3b:00.0"
FAR = "0001:af:00.0"


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two NUMA nodes with a GPU each, and devices whose node the kernel
    does not know.
    """
    for address, node in ((NEAR, "0"), (FAR, "1"), ("0000:00:05.0", "-1"), ("0000:00:06.0", "2")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        is_gpu = address in (NEAR, FAR)
        (folder / "vendor").write_text("0x10de\n" if is_gpu else "0x8086\n")
        (folder / "class").write_text("0x030200\n" if is_gpu else "0x020000\n")
    for node, cores in (("0", "0-3,8-11\n"), ("1", "4,5,12\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    monkeypatch.setattr(device, "SYS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("address", "cores"),
    [
        (NEAR, {0, 1, 2, 3, 8, 9, 10, 11}),
        (FAR, {4, 5, 12}),
        ("0000:00:05.0", set()),
        ("0000:00:06.0", set()),
        ("0000:99:00.0", set()),
    ],
)
def test_cores_of_a_device(sys: Path, address: str, cores: set[int]) -> None:
    assert device.cores_near(address) == cores


@pytest.mark.parametrize(
    ("allowed", "bound"),
    [
        ({2, 3, 4, 5}, {4, 5}),
        ({0, 1}, None),
        (set(range(6)), None),
        ({2, 4, 5, 9, 12}, {4, 5, 12}),
        ({4, 8}, None),
        (set(range(16)), None),
    ],
)
def test_a_rank_stays_near_its_gpu_within_what_it_may_use(
    sys: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], bound: set[int] | None
) -> None:
    """Slurm may have given the job no core there, one, or fewer than the rank's share:
    then its cores stay as they are.
    """
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    chosen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(cores))
    device.bind_to_gpu()
    assert chosen == ([bound] if bound else [])


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = os.sched_getaffinity(0)
    device.bind_to_gpu()
    assert os.sched_getaffinity(0) == before
