"""`megarl doctor`: shows what this machine can run, and how to fix what it cannot.

    questions (checks/table.py) ──► Finding (good, note, bad) ──► list
                                                               ──► verdict, exit status

A `note` means a disadvantage, or that runs are limited to the CPU; a `bad` finding
prevents every run.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from megarl.checks import making
from megarl.checks.making import Finding
from megarl.checks.table import Command, Need
from megarl.core.base import terminal
from megarl.core.base.device import cudnn_of_torch
from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import load_tokenizer
from megarl.run.devices import bf16_on_cpu, driver, gpus, networks, search_path, toolkit
from megarl.run.process import free_ports
from megarl.tasks.agents.rendering import Rendering, tail_problem
from megarl.tasks.data.chat import load_chat
from megarl.tasks.graders.sandbox import Sandbox

GIB = 1 << 30
DRIVER = 580
"""NVIDIA's first driver (r580) for CUDA 13. Older ones reject the PTX of CUDA 13's
kernels.
"""
PINS = {"torch": "2.14.1", "megatron-core": "0.19.2", "sglang": "0.5.23", "transformers": "5.19.0"}
"""The versions for which this code was written; it relies on internals of all four
packages.
"""
MODULES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "sglang": "sglang",
    "transformers": "transformers",
}
SETUP = "run `make setup` and use .venv/bin/megarl (with GPUs: docs/how-to/install.md)"


def noted(name: str, text: str, advice: str = "") -> Finding:
    """Return a finding with the grade `note` if there is advice, else `good`."""
    return Finding(name, "note" if advice else "good", text, advice)


def main(models: Sequence[Path] = ()) -> int:
    """Print all findings and the verdict; return 0 if any run is possible. models:
    directories whose chat templates to try.
    """
    findings = examine(models)
    console = terminal.console()
    making.show(console, findings)
    text, status = verdict(findings, len(gpus()))
    console.print(f"\n{text}", highlight=False)
    return status


def examine(models: Sequence[Path] = ()) -> list[Finding]:
    """Return what all checks of the doctor find."""
    return list(making.findings(Command.DOCTOR, list(Need), {"models": models}))


def verdict(findings: Sequence[Finding], gpu_count: int) -> tuple[str, int]:
    """Return a sentence on what can be run, and the exit status."""
    bad = [finding.name for finding in findings if finding.grade == "bad"]
    if bad:
        return f"Nothing can be run here yet: {', '.join(bad)}.", 1
    if gpu_count == 0:
        return (
            "Runs on the CPU are possible (tiny models: `make quickstart`). GPU runs need a"
            " machine with GPUs."
        ), 0
    good = {finding.name for finding in findings if finding.grade == "good"}
    missing = [name for name in ("CUDA", KERNELS, COMPILERS) if name not in good]
    if missing:
        return (
            "CPU runs are possible (CUDA_VISIBLE_DEVICES=); GPU runs are not yet:"
            f" {', '.join(missing)}."
        ), 0
    slower = ""
    if "Transformer Engine" not in good:
        slower = ", without Transformer Engine's fused layers and FP8"
    return (
        f"GPU runs are possible on {gpu_count} GPUs{slower} (`megarl recipes` says what each"
        " recipe takes)."
    ), 0


def python() -> Finding:
    """Check that this Python is the one for which the stack has wheels."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 12):
        return noted("Python", version)
    advice = "the stack has wheels only for Python 3.12; `make setup` finds or fetches one"
    return Finding("Python", "bad", version, advice)


def packages() -> list[Finding]:
    """Check each of PINS."""
    return [package(name) for name in PINS]


def package(name: str) -> Finding:
    """Check that a package is installed in the version that this code is for."""
    try:
        version = importlib.metadata.version(name)
        importable = importlib.util.find_spec(MODULES[name]) is not None
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return Finding(name, "bad", "not installed", SETUP)
    if not importable:
        return Finding(name, "bad", f"{version}, but it cannot be imported", SETUP)
    if version.partition("+")[0] == PINS[name]:
        return noted(name, version)
    return noted(name, version, f"made and tested with {PINS[name]}; {SETUP}")


def cuda() -> Finding:
    """Check for GPUs, as seen by the driver and by torch."""
    count = len(gpus())
    if importlib.util.find_spec("torch") is None:
        return noted("CUDA", "unknown: torch is missing", SETUP)
    import torch

    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in devices}))
        return noted("CUDA", f"{torch.version.cuda}, {len(devices)} x {names}", old_driver())
    if count:
        build = (
            "replace torch's build by one for CUDA; it is for"
            f" {torch.version.cuda or 'the CPU only'}"
        )
        return noted("CUDA", f"{count} GPUs that torch cannot use", old_driver() or build)
    return noted(
        "CUDA", "no GPU", "tiny models run on the CPU; for others use a machine with NVIDIA GPUs"
    )


def old_driver() -> str:
    """Return advice if the driver is too old for the kernels that the pinned stack
    compiles at run time, else "".
    """
    version = driver()
    if not version or int(version.partition(".")[0]) >= DRIVER:
        return ""
    return f"the driver is {version}; update it to {DRIVER} or newer, CUDA 13's first"


KERNELS = "SGLang's kernels"


def kernels() -> Finding:
    """Check for the package without which no SGLang server starts on a GPU; `make
    setup` does not install it.
    """
    try:
        version = importlib.metadata.version("sglang-kernel")
    except importlib.metadata.PackageNotFoundError:
        advice = "install requirements/gpu.txt (docs/how-to/install.md)" if gpus() else ""
        return noted(KERNELS, "not installed", advice)
    if loads("libnuma.so.1"):
        return noted(KERNELS, version)
    return noted(KERNELS, version, "they need libnuma.so.1: install libnuma1 or numactl-libs")


COMPILERS = "compilers"


def compilers() -> Finding:
    """Check for what compiles kernels as roles with GPUs start, SGLang's and Triton's.
    nvcc is looked for as SGLang does.
    """
    home = (os.environ | toolkit()).get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    nvcc = shutil.which(f"{home}/bin/nvcc") if home else usual
    # without nvcc, only that is named as missing
    has_runtime = not nvcc or Path(nvcc).parents[1].joinpath("lib64/libcudart.so").exists()
    parts = {
        "nvcc": nvcc,
        "lib64/libcudart.so above nvcc": has_runtime,
        "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
        "ninja": shutil.which("ninja", path=search_path()["PATH"]),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    missing = ", ".join(name for name, part in parts.items() if not part)
    if missing:
        advice = (
            "install them (docs/how-to/install.md), or use the container; CUDA_HOME says where the"
            " toolkit is"
        )
        return noted(COMPILERS, f"no {missing}", advice if gpus() else "")
    # nvcc prints `Cuda compilation tools, release 13.0, V13.0.48`
    release = _printed([str(nvcc), "--version"]).partition("release ")[2].partition(",")[0]
    advice = ""
    if gpus() and not release.startswith("13."):
        advice = f"{nvcc} is not of torch's CUDA 13: set CUDA_HOME to a toolkit 13.0"
    return noted(COMPILERS, f"nvcc {release}", advice)


def _printed(words: Sequence[str]) -> str:
    """Return what a program prints."""
    return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout


IMPORT_S = 120
"""Time limit for the import of Transformer Engine, in seconds; it takes six on two busy
cores.
"""


def transformer_engine() -> Finding:
    """Check that the learner's fused GPU layers can be imported. Another process does
    it, since a faulty library may crash.
    """
    name = "Transformer Engine"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return noted(
            name,
            "not installed",
            "only needed with GPUs: docs/how-to/install.md says how to build it",
        )
    words = [sys.executable, "-W", "ignore", "-c", "import torch, transformer_engine.pytorch"]
    environment = os.environ | cudnn_of_torch()  # as for a learner
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return noted(name, f"not imported within {IMPORT_S} s", "try again; is its disk slow?")
    if done.returncode == 0:
        return noted(name, version)
    lines = done.stderr.strip().splitlines() or [f"Python ended with {done.returncode}"]
    return noted(
        name,
        "cannot be imported",
        f"{lines[-1]}; build it again for this torch, or uninstall it (docs/how-to/install.md)",
    )


def bytecode() -> Finding:
    """Check for .pyc files. Without them every role compiles the whole stack at each
    start, which takes tens of seconds.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return noted("bytecode", "unknown: transformers is missing", SETUP)
    if any((Path(spec.origin).parent / "__pycache__").glob(f"*{sys.implementation.cache_tag}.pyc")):
        return noted("bytecode", "compiled")
    advice = (
        "run `python -m compileall -q -j 0` on site-packages, and unset PYTHONDONTWRITEBYTECODE"
    )
    return noted("bytecode", "not compiled", advice)


def machine() -> Iterator[Finding]:
    """Check cores, memory, disk, ports, and /dev/shm, through which a server's
    processes, NCCL and PyTorch pass tensors.
    """
    yield cores()
    yield bf16()
    yield memory()
    yield shared_memory()
    yield disk()
    yield ports()


def cores() -> Finding:
    """Check for a core for each of server and learner."""
    count = len(os.sched_getaffinity(0))
    advice = "server and learner share one core: expect half the speed" if count == 1 else ""
    return noted("cores", str(count), advice)


def bf16() -> Finding:
    """Check whether a CPU that has to multiply in bf16 can."""
    unit = bf16_on_cpu()
    advice = ""
    if not unit and not gpus():
        advice = "model.dtype=bf16 is emulated on this CPU; fp32 may be quicker"
    return noted("bf16 on the CPU", unit or "emulated", advice)


def memory() -> Finding:
    """Check for the quickstart's memory."""
    free = psutil.virtual_memory().available / GIB
    advice = "the quickstart's roles take about 6 GiB together; end other programs"
    return noted("memory", f"{free:.0f} GiB available", advice if free < 6 else "")


def shared_memory() -> Finding:
    """Check the size of /dev/shm."""
    if not os.access("/dev/shm", os.W_OK):
        return Finding("/dev/shm", "bad", "not writable", "mount a tmpfs there")
    size = shutil.disk_usage("/dev/shm").total / GIB
    needed = 8 if gpus() else 1
    text = f"{size:.1f} GiB" if size >= 1 else f"{size * 1024:.0f} MiB"
    advice = f"in a container: --shm-size={needed}g or --ipc=host"
    is_small = size < 0.95 * needed  # a mount may have a little less than it was given
    return noted("/dev/shm", text, advice if is_small else "")


def disk() -> Finding:
    """Check the room in this folder, in which runs are by default."""
    free = shutil.disk_usage(".").free / GIB
    advice = (
        "checkpoints take about 16 bytes a parameter; free some, or set run.dir to another disk"
    )
    return noted("disk", f"{free:.0f} GiB free here", advice if free < 10 else "")


def ports() -> Finding:
    """Check that roles can talk over loopback."""
    try:
        free_ports(8)
    except OSError as error:
        problem = f"cannot listen on 127.0.0.1: {error.strerror}"
        return Finding("ports", "bad", problem, "the roles talk over it; allow it")
    return noted("ports", "free on 127.0.0.1")


SLOW = 10_000
"""Mb/s below which sending an 8B run's batches (50 to 100 MB per step, ten times that
with routing replay) takes seconds.
"""
INFINIBAND = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


def loads(library: str) -> bool:
    """Return whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def fabric() -> Iterator[Finding]:
    """Check the connections between nodes and GPUs: the network that carries batches,
    InfiniBand, NVLink. What a machine does not have is left out.
    """
    speeds = networks()
    if speeds:
        yield network(speeds)
    adapters = sorted(path.name for path in INFINIBAND.glob("*"))
    if adapters:
        yield noted("InfiniBand", ", ".join(adapters), infiniband_advice())
    if len(gpus()) > 1:
        yield nvlink()


def network(speeds: Mapping[str, int]) -> Finding:
    """Check that no network slower than SLOW is beside a faster one, which Slurm may
    not use. speeds: Mb/s by interface.
    """
    fastest = max(speeds, key=speeds.__getitem__)
    interfaces = ", ".join(
        f"{name} {speed / 1000:g} Gb/s" for name, speed in sorted(speeds.items())
    )
    advice = ""
    if min(speeds.values()) < min(SLOW, speeds[fastest]):
        advice = (
            f"by default batches go over the network that Slurm uses; set run.interface={fastest}"
        )
    return noted("network", interfaces, advice)


def infiniband_advice() -> str:
    """Return what keeps NCCL from using InfiniBand; empty if nothing does."""
    if not any(DEVICES.glob("uverbs*")):
        return (
            "NCCL cannot use it here, and falls back to TCP; in a container:"
            " --device=/dev/infiniband"
        )
    if not loads("libibverbs.so.1"):
        return (
            "NCCL finds no libibverbs, and falls back to TCP; install libibverbs1 and"
            " ibverbs-providers, or rdma-core"
        )
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        return (
            "memory cannot be locked for it; in a container: --ulimit memlock=-1, else `ulimit"
            " -l unlimited`"
        )
    return ""


def nvlink() -> Finding:
    """Check whether GPUs are connected with each other."""
    if "GB/s" in _printed(["nvidia-smi", "nvlink", "--status"]):
        return noted("NVLink", "between the GPUs")
    advice = "tensor and expert parallelism go over PCIe; keep model.tensor_parallel at 1"
    return noted("NVLink", "none", advice)


def chat_templates(models: Sequence[Path]) -> list[Finding]:
    """Check each model's chat template."""
    return [chat_template(model) for model in models]


def chat_template(model: Path) -> Finding:
    """Check that a model's chat template suits agents: it must write messages after an
    answer alone as in a conversation.
    """
    name = f"{model.name}: template"
    try:
        chat = load_chat(model)
        chat.render([{"role": "user", "content": "?"}])  # MegarlError if it loops
        rendering = Rendering(chat, load_tokenizer(model), "sampled")
    except MegarlError as error:
        return noted(name, "agents cannot use it", str(error))
    problem = tail_problem(chat, rendering)
    if problem:
        return noted(name, "agents can use it, but", problem)
    advice = ""
    if not rendering.calls:
        advice = "its tool calls cannot be read; agents find them in the text"
    return noted(name, "agents can use it", advice)


def sandbox() -> Finding:
    """Check the sandbox in which agents and the policy's programs run."""
    try:
        Sandbox("bubblewrap", 1).check()
        return noted("bubblewrap", "isolates programs")
    except MegarlError as error:
        advice = (
            "only needed by the grader code, the environment python and agents:"
            f" {str(error).partition('; ')[2]}"
        )
        return noted("bubblewrap", "no program can be run in it", advice)
