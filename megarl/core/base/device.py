"""Which machine, GPUs and cores a process uses. This decides which processes can share
memory, and which NCCL cannot group.
"""

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYS = Path("/sys")
CORES = len(os.sched_getaffinity(0))
"""How many cores this process could use when it started. `bind_to_gpu` leaves it those
of one NUMA node, which it shares with some of the machine's ranks, not with all.
"""


class DeviceIdentity(msgspec.Struct, frozen=True):
    """A process's devices. machine: the boot id of its kernel; gpus: UUIDs of its GPUs,
    empty without one.
    """

    machine: str
    gpus: tuple[str, ...] = ()


def of_process() -> DeviceIdentity:
    """Identify this process with all GPUs that it sees."""
    from torch import cuda

    properties = map(cuda.get_device_properties, range(cuda.device_count()))
    uuids = tuple(str(gpu.uuid) for gpu in properties)
    return DeviceIdentity(BOOT_ID.read_text().strip(), uuids)


def of_rank() -> DeviceIdentity:
    """Identify this process with the GPU that it computes on."""
    from torch import cuda

    identity = of_process()
    if not identity.gpus:
        return identity
    return DeviceIdentity(identity.machine, (identity.gpus[cuda.current_device()],))


def bind_to_gpu() -> None:
    """Keep this thread, and the threads that it starts from now on, on the cores that
    are nearest to the GPU it computes on. A core's memory is then near, too: Linux
    takes a page from the node of the core that first writes it. Without a GPU nothing
    changes, nor where fewer cores are near than `fair_share`: far memory costs less
    than a learner whose threads share a core.
    """
    from torch import cuda

    if not cuda.is_available():
        return
    gpu = cuda.get_device_properties(cuda.current_device())
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    allowed = os.sched_getaffinity(0)
    nearest = cores_near(address) & allowed
    if len(nearest) >= fair_share(len(allowed), cuda.device_count()):
        os.sched_setaffinity(0, nearest)


FEWEST_CORES = 2
"""A rank's threads and its backward pass want a core each."""
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""How the kernel names the vendor of a GPU, and its class of PCI devices begins."""


def fair_share(cores: int, visible_gpus: int) -> int:
    """Return how many of `cores` a rank has if the machine's GPUs share them, at least
    FEWEST_CORES. The machine may have more GPUs than this process sees.
    """
    gpus = 0
    for device in (SYS / "bus/pci/devices").glob("*"):
        with suppress(OSError):  # it has no such file, as in a sandbox
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text()
            if vendor == NVIDIA and kind.startswith(DISPLAY):
                gpus += 1
    return max(FEWEST_CORES, cores // max(gpus, visible_gpus, 1))


def cores_near(address: str) -> set[int]:
    """Return the cores of a PCI device's NUMA node, such as that of `0000:3b:00.0`.

    Empty if the machine has one node only, or the kernel does not say which is near (a
    numa_node of -1, as in many virtual machines). The files: Linux,
    Documentation/ABI/testing/sysfs-bus-pci and
    Documentation/ABI/stable/sysfs-devices-node.
    """
    try:
        node = int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:
            return set()
        return _cores((SYS / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _cores(listed: str) -> set[int]:
    """Return the cores of the kernel's list, such as `0-15,32-47`."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def cudnn_of_torch() -> dict[str, str]:
    """Return the environment variable by which Transformer Engine finds torch's cuDNN,
    if torch's package has one.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return {}
    cudnn = Path(torch.origin).parents[1] / "nvidia" / "cudnn"
    return {"CUDNN_HOME": str(cudnn)} if cudnn.is_dir() else {}
