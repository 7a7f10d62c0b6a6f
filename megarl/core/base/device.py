"""Which machine and GPUs a process uses: decides who can share memory there, and which processes NCCL cannot group."""

from pathlib import Path

import msgspec

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DeviceIdentity(msgspec.Struct, frozen=True):
    """A process's devices. machine: the boot id of its kernel; gpus: UUIDs of its GPUs, empty without one."""

    machine: str
    gpus: tuple[str, ...] = ()


def here() -> DeviceIdentity:
    """Identify this process with all GPUs that it sees."""
    import torch

    return DeviceIdentity(BOOT_ID.read_text().strip(), tuple(map(_uuid, range(torch.cuda.device_count()))))


def of_rank() -> DeviceIdentity:
    """Identify this process with the GPU that it computes on."""
    import torch

    mine = (_uuid(torch.cuda.current_device()),) if torch.cuda.is_available() else ()
    return DeviceIdentity(BOOT_ID.read_text().strip(), mine)


def _uuid(device: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
