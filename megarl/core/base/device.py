"""Which machine and GPUs a process uses. This decides which processes can share memory, and which NCCL cannot group."""

from importlib.util import find_spec
from pathlib import Path

import msgspec

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DeviceIdentity(msgspec.Struct, frozen=True):
    """A process's devices. machine: the boot id of its kernel; gpus: UUIDs of its GPUs, empty without one."""

    machine: str
    gpus: tuple[str, ...] = ()


def here() -> DeviceIdentity:
    """Identify this process with all GPUs that it sees."""
    from torch import cuda

    uuids = (str(cuda.get_device_properties(device).uuid) for device in range(cuda.device_count()))
    return DeviceIdentity(BOOT_ID.read_text().strip(), tuple(uuids))


def of_rank() -> DeviceIdentity:
    """Identify this process with the GPU that it computes on."""
    from torch import cuda

    seen = here()
    return DeviceIdentity(seen.machine, (seen.gpus[cuda.current_device()],) if seen.gpus else ())


def cudnn_of_torch() -> dict[str, str]:
    """Return the environment variable by which Transformer Engine finds torch's cuDNN, if torch's package has one."""
    torch = find_spec("torch")
    cudnn = Path(torch.origin).parents[1] / "nvidia" / "cudnn" if torch and torch.origin else None
    return {"CUDNN_HOME": str(cudnn)} if cudnn and cudnn.is_dir() else {}
