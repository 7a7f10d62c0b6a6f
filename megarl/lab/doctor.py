"""`megarl doctor`: shows what this machine can run, and how to fix what it cannot.

    questions ──► Finding (good, note, bad) ──► table; exit 0 if a CPU or a GPU run is possible

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.table import Column, Table
from rich.text import Text

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
SETUP = "run `make setup` and use .venv/bin/megarl (with GPUs: docs/install.md)"


@dataclass(frozen=True)
class Finding:
    """The answer to one question. advice: what to do, empty if all is well."""

    what: str
    grade: Literal["good", "note", "bad"]
    found: str
    advice: str = ""


def noted(what: str, found: str, advice: str = "") -> Finding:
    """Return a finding with the grade `note` if there is advice, else `good`."""
    return Finding(what, "note" if advice else "good", found, advice)


def main(models: Sequence[Path] = ()) -> int:
    """Print all findings and the verdict; return 0 if any run is possible. models:
    directories whose chat templates to try.
    """
    findings = [*examine(), *map(chat_template, models)]
    columns = [*(Column(no_wrap=True) for _ in range(3)), Column(ratio=1)]
    table = Table(*columns, box=None, padding=(0, 2), pad_edge=False, show_header=False)
    marks = {"good": Text("✓", "green"), "note": Text("•", "yellow"), "bad": Text("✗", "red")}
    for f in findings:
        table.add_row(marks[f.grade], f.what, f.found, Text(f.advice))
    console = terminal.console()
    console.print(table)
    text, status = verdict(findings, len(gpus()))
    console.print(f"\n{text}", highlight=False)
    return status


def examine() -> list[Finding]:
    stack = (
        python(),
        *map(package, PINS),
        cuda(),
        kernels(),
        compilers(),
        transformer_engine(),
        bytecode(),
    )
    return [*stack, *machine(), *fabric(), sandbox()]


def verdict(findings: Sequence[Finding], gpu_count: int) -> tuple[str, int]:
    """Return a sentence on what can be run, and the exit status."""
    if bad := [f.what for f in findings if f.grade == "bad"]:
        return f"Nothing can be run here yet: {', '.join(bad)}.", 1
    good = {f.what for f in findings if f.grade == "good"}
    if gpu_count == 0:
        return (
            (
                "Runs on the CPU are possible (tiny models: `make quickstart`). GPU runs need a"
                " machine with GPUs."
            ),
            0,
        )
    if missing := [what for what in ("CUDA", KERNELS, COMPILERS) if what not in good]:
        return (
            (
                "CPU runs are possible (CUDA_VISIBLE_DEVICES=); GPU runs are not yet:"
                f" {', '.join(missing)}."
            ),
            0,
        )
    slower = (
        ""
        if "Transformer Engine" in good
        else ", without Transformer Engine's fused layers and FP8"
    )
    return (
        (
            f"GPU runs are possible on {gpu_count} GPUs{slower} (`megarl recipes` says what each"
            " recipe takes)."
        ),
        0,
    )


def python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    advice = "the stack has wheels only for Python 3.12; `make setup` finds or fetches one"
    good = sys.version_info[:2] == (3, 12)
    return noted("Python", version) if good else Finding("Python", "bad", version, advice)


def package(name: str) -> Finding:
    """Check that a package is installed in the version for which this code was written."""
    try:
        version = importlib.metadata.version(name)
        importable = importlib.util.find_spec(MODULES[name]) is not None
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError):
        return Finding(name, "bad", "not installed", SETUP)
    if not importable:
        return Finding(name, "bad", f"{version}, but it cannot be imported", SETUP)
    same = version.partition("+")[0] == PINS[name]
    return noted(name, version, "" if same else f"made and tested with {PINS[name]}; {SETUP}")


def cuda() -> Finding:
    """Check for GPUs, as seen by the driver and by torch."""
    count = len(gpus())
    if importlib.util.find_spec("torch") is None:
        return noted("CUDA", "unknown: torch is missing", SETUP)
    import torch

    if torch.cuda.is_available():
        names = ", ".join(
            sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        )
        return noted(
            "CUDA", f"{torch.version.cuda}, {torch.cuda.device_count()} x {names}", old_driver()
        )
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
        return noted(
            KERNELS,
            "not installed",
            "install requirements/gpu.txt (docs/install.md)" if gpus() else "",
        )
    advice = "they need libnuma.so.1: install libnuma1 or numactl-libs"
    return noted(KERNELS, version, "" if loads("libnuma.so.1") else advice)


COMPILERS = "compilers"


def compilers() -> Finding:
    """Check for what compiles kernels as roles with GPUs start, SGLang's and Triton's.
    nvcc is looked for as SGLang does.
    """
    home = (os.environ | toolkit()).get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    nvcc = shutil.which(f"{home}/bin/nvcc") if home else usual
    found = {
        "nvcc": nvcc,
        "lib64/libcudart.so above nvcc": (
            not nvcc or Path(nvcc).parents[1].joinpath("lib64/libcudart.so").exists()
        ),
        "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
        "ninja": shutil.which("ninja", path=search_path()["PATH"]),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    if missing := ", ".join(name for name, there in found.items() if not there):
        advice = (
            "install them (docs/install.md), or use the container; CUDA_HOME says where the"
            " toolkit is"
        )
        return noted(COMPILERS, f"no {missing}", advice if gpus() else "")
    said = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, text=True, timeout=30
    ).stdout
    release = said.partition("release ")[2].partition(",")[0]
    advice = f"{nvcc} is not of torch's CUDA 13: set CUDA_HOME to a toolkit 13.0"
    return noted(COMPILERS, f"nvcc {release}", advice if gpus() and release[:3] != "13." else "")


IMPORT_S = 120
"""Time limit for the import of Transformer Engine, in seconds; it takes six on two busy
cores.
"""


def transformer_engine() -> Finding:
    """Check that the learner's fused GPU layers can be imported. Another process does
    it, since a faulty library may crash.
    """
    what = "Transformer Engine"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return noted(
            what, "not installed", "only needed with GPUs: docs/install.md says how to build it"
        )
    words = [sys.executable, "-W", "ignore", "-c", "import torch, transformer_engine.pytorch"]
    try:
        environment = os.environ | cudnn_of_torch()  # as for a learner
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return noted(what, f"not imported within {IMPORT_S} s", "try again; is its disk slow?")
    if done.returncode == 0:
        return noted(what, version)
    why = (done.stderr.strip().splitlines() or [f"Python ended with {done.returncode}"])[-1]
    return noted(
        what,
        "cannot be imported",
        f"{why}; build it again for this torch, or uninstall it (docs/install.md)",
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
    count = len(os.sched_getaffinity(0))
    has_gpus = bool(gpus())
    yield noted(
        "cores",
        str(count),
        "server and learner share one core: expect half the speed" if count == 1 else "",
    )
    computed = bf16_on_cpu()
    emulated = (
        ""
        if computed or has_gpus
        else "model.dtype=bf16 is emulated on this CPU; fp32 may be quicker"
    )
    yield noted("bf16 on the CPU", computed or "emulated", emulated)
    free = psutil.virtual_memory().available / GIB
    advice = (
        "the quickstart's roles take about 6 GiB together; end other programs" if free < 6 else ""
    )
    yield noted("memory", f"{free:.0f} GiB available", advice)
    if os.access("/dev/shm", os.W_OK):
        size = shutil.disk_usage("/dev/shm").total / GIB
        needed = 8 if has_gpus else 1
        advice = (
            f"in a container: --shm-size={needed}g or --ipc=host" if size < needed * 0.95 else ""
        )
        yield noted(
            "/dev/shm", f"{size:.1f} GiB" if size >= 1 else f"{size * 1024:.0f} MiB", advice
        )
    else:
        yield Finding("/dev/shm", "bad", "not writable", "mount a tmpfs there")
    free = shutil.disk_usage(".").free / GIB
    advice = (
        "checkpoints take about 16 bytes a parameter; free some, or set run.dir to another disk"
    )
    yield noted("disk", f"{free:.0f} GiB free here", advice if free < 10 else "")
    try:
        free_ports(8)
        yield noted("ports", "free on 127.0.0.1")
    except OSError as error:
        why = f"cannot listen on 127.0.0.1: {error.strerror}"
        yield Finding("ports", "bad", why, "the roles talk over it; allow it")


SLOW = 10_000
"""Mb/s below which sending an 8B run's batches (50 to 100 MB per step, ten times that
with routing replay) takes seconds.
"""
INFINIBAND = Path("/sys/class/infiniband")
DEVICES = Path("/dev/infiniband")


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def fabric() -> Iterator[Finding]:
    """Check the connections between nodes and GPUs: the network that carries batches,
    InfiniBand, NVLink.
    """
    if speeds := networks():
        slowest = min(speeds.values())
        fastest = max(speeds, key=speeds.__getitem__)
        interfaces = ", ".join(
            f"{name} {speed / 1000:g} Gb/s" for name, speed in sorted(speeds.items())
        )
        advice = (
            f"by default batches go over the network that Slurm uses; set run.interface={fastest}"
        )
        yield noted("network", interfaces, advice if slowest < min(SLOW, speeds[fastest]) else "")
    if adapters := sorted(path.name for path in INFINIBAND.glob("*")):
        advice = ""
        if not any(DEVICES.glob("uverbs*")):
            advice = (
                "NCCL cannot use it here, and falls back to TCP; in a container:"
                " --device=/dev/infiniband"
            )
        elif not loads("libibverbs.so.1"):
            advice = (
                "NCCL finds no libibverbs, and falls back to TCP; install libibverbs1 and"
                " ibverbs-providers, or rdma-core"
            )
        elif resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
            advice = (
                "memory cannot be locked for it; in a container: --ulimit memlock=-1, else `ulimit"
                " -l unlimited`"
            )
        yield noted("InfiniBand", ", ".join(adapters), advice)
    if len(gpus()) > 1:
        said = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=30
        ).stdout
        advice = (
            ""
            if "GB/s" in said
            else "tensor and expert parallelism go over PCIe; keep model.tensor_parallel at 1"
        )
        yield noted("NVLink", "between the GPUs" if not advice else "none", advice)


def chat_template(model: Path) -> Finding:
    """Check that a model's chat template suits agents: it must write messages after an
    answer alone as in a conversation.
    """
    what = f"{model.name}: template"
    try:
        chat = load_chat(model)
        chat.render([{"role": "user", "content": "?"}])  # MegarlError if it loops
        rendering = Rendering(chat, load_tokenizer(model), "sampled")
    except MegarlError as error:
        return noted(what, "agents cannot use it", str(error))
    if problem := tail_problem(chat, rendering):
        return noted(what, "agents can use it, but", problem)
    advice = (
        "" if rendering.calls else "its tool calls cannot be read; agents find them in the text"
    )
    return noted(what, "agents can use it", advice)


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
