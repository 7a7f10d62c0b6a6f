"""Which GPUs this machine has, how fast its networks are, and where kernels that are
compiled here are kept.

It asks `nvidia-smi` and the operating system, so the supervisor need not import torch.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.core.recipe import Recipe


class HostBytes(NamedTuple):
    """Bytes of host memory, as planned. rank: a learner's rank. server: a whole server
    with GPUs.
    """

    rank: float
    server: float


NAME = re.compile(r"\d+$|GPU-|MIG-")
"""What CUDA takes for the name of a GPU."""


def gpus() -> tuple[str, ...]:
    """Return GPU names for CUDA_VISIBLE_DEVICES: its present value if set, else all of
    nvidia-smi's; empty without a GPU. For CUDA the value ends at the first word that
    names none, such as -1 and Slurm's NoDevFiles. UUIDs of whole GPUs, which some sites
    set, become numbers: SGLang takes only these in a server of several GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _query("index")
    words = [word.strip() for word in visible.split(",")]
    names = tuple(takewhile(NAME.match, words))
    if not any(name.startswith("GPU-") for name in names):
        return names
    # not strict: if one of the two queries fails, its answer is empty
    numbers = dict(zip(_query("uuid"), _query("index"), strict=False))
    if not set(names) <= set(numbers):
        return names  # one has no known number, such as a MIG device
    return tuple(numbers[name] for name in names)


def driver() -> str:
    """Return the version of NVIDIA's driver, such as 580.65.06; empty where there is
    none.
    """
    versions = _query("driver_version")
    return versions[0] if versions else ""


def capabilities() -> frozenset[str]:
    """Return the compute capabilities of this machine's GPUs, such as 9.0; empty where
    there are none.
    """
    return frozenset(_query("compute_cap"))


def kinds() -> tuple[str, ...]:
    """Return the different names of this machine's GPUs, such as NVIDIA GB200; empty
    where there are none.
    """
    return tuple(sorted(set(_query("name"))))


def memory() -> float:
    """Return the bytes of this machine's smallest GPU; 0 where there is none."""
    sizes = []
    for text in _query("memory.total"):
        mebibytes = float(text.split()[0])
        sizes.append(mebibytes * 2**20)
    return min(sizes, default=0.0)


CPU_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "Arm's BF16 instructions"}
"""Flags of a CPU that multiplies matrices in bf16, the fastest first, and what it is
called.
"""
CPU_INFO = Path("/proc/cpuinfo")


def bf16_on_cpu() -> str:
    """Return what this machine's CPU has to multiply matrices in bf16, such as AMX;
    empty if it must emulate that in fp32.
    """
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    flags: set[str] = set()
    for line in lines:
        if line.startswith(("flags", "Features")):  # of x86, of Arm
            flags.update(line.split())
    return next((name for flag, name in CPU_FLAGS.items() if flag in flags), "")


def _query(field: str) -> tuple[str, ...]:
    """Return nvidia-smi's answer for each GPU; empty if it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return ()
    if listed.returncode != 0:
        return ()
    lines = [line.strip() for line in listed.stdout.splitlines()]
    return tuple(line for line in lines if line)


def needed(recipe: Recipe) -> int:
    """Return the number of GPUs that the recipe divides among its roles."""
    resources = recipe.resources
    if resources.colocate:  # servers share the learner's
        return resources.learner_ranks
    return resources.servers * resources.server_tensor_parallel + resources.learner_ranks


CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "SGLANG_CACHE_DIR",
    "SGLANG_JIT_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
)
"""The last three are by default in /tmp/USER, which anybody can make first, and
compiled code there is run unseen.
"""


def kernel_caches() -> dict[str, str]:
    """Return variables that keep compiled kernels in a folder of this node; those that
    are set already are left out.

    By default kernels are in the home directory. On a cluster that is one network file
    system, where all servers would compile the same kernels at the same time, or that
    compute nodes cannot write: then no server would start, even on a CPU. Empty if
    there is no folder that only we can write to: with another, we would run others'
    code.
    """
    for folder in _kernel_folders():
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours_alone(folder):
                unset = [name for name in CACHES if name not in os.environ]
                return {name: str(folder / name.lower()) for name in unset}
    return {}


def _is_ours_alone(folder: Path) -> bool:
    """Return whether this is a folder of ours that nobody else can write."""
    stats = folder.lstat()
    is_ours = stats.st_uid == os.getuid()
    return stat.S_ISDIR(stats.st_mode) and is_ours and not stats.st_mode & 0o022


def _kernel_folders() -> Iterator[Path]:
    """Yield folders to try in turn: one among the temporary files, unless nothing may
    be executed there, then one in the home directory, by the node's name.
    """
    temporary = Path(tempfile.gettempdir())
    if not os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        yield temporary / f"megarl-kernels-{os.getuid()}"
    yield Path.home() / ".cache" / f"megarl-kernels-{socket.gethostname()}"


def search_path() -> dict[str, str]:
    """Return a PATH that ends with the folder of this Python's programs. SGLang calls
    one of them, ninja, to compile kernels. Without this it would not find ninja where
    megarl was called by its path, with no environment activated.
    """
    folders = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    return {"PATH": os.pathsep.join(folders)}


TOOLKIT = Path("/usr/local/cuda")


def toolkit() -> dict[str, str]:
    """Return CUDA_HOME where SGLang would take a wrong one; empty where it would not,
    or where CUDA is not found.

    By itself SGLang takes the folder above that of the nvcc in PATH. If this nvcc is a
    link or a script, CUDA's libraries are not there, and no kernel could be linked.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None or "CUDA_HOME" in os.environ or "CUDA_PATH" in os.environ:
        return {}
    taken_by_sglang = Path(nvcc).parents[1]
    for home in (taken_by_sglang, Path(nvcc).resolve().parents[1], TOOLKIT):
        if (home / "lib64" / "libcudart.so").exists():
            return {} if home == taken_by_sglang else {"CUDA_HOME": str(home)}
    return {}


LONGEST_TEMPORARY = 70
"""Sockets of SGLang and multiprocessing lie up to 37 characters deeper, and their paths
have at most 107.
"""


def temporary_folder() -> dict[str, str]:
    """Return TMPDIR for a role, if the present value is of no use here: a folder that
    the container or the node does not have, where nvcc would fail, or a path too long
    for sockets.
    """
    if "TMPDIR" not in os.environ:
        return {}
    # the first of TMPDIR, /tmp and others in which a file can be written
    usable = tempfile.gettempdir()
    if len(os.fsencode(usable)) > LONGEST_TEMPORARY:
        usable = "/tmp"
    return {"TMPDIR": usable}


def networks() -> Mapping[str, int]:
    """Return the known speeds, in Mb/s, of network interfaces that are up and have an
    IPv4 address, except loopback.
    """
    addresses = psutil.net_if_addrs()
    speeds = {}
    for name, stats in psutil.net_if_stats().items():
        is_reachable = any(
            entry.family == socket.AF_INET and not entry.address.startswith("127.")
            for entry in addresses.get(name, ())
        )
        if stats.isup and stats.speed > 0 and is_reachable:
            speeds[name] = stats.speed
    return speeds
