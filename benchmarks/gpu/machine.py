"""Describes the machine: GPU, driver, versions, commit. `python -m
benchmarks.gpu.machine` prints the facts from torch.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "triton", "numpy")
LIBRARIES = ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
DRIVER = Path("/proc/driver/nvidia/version")
LIMIT_S = 120
ROOT = Path(__file__).parents[2]


def facts(tiny: bool) -> dict[str, Any]:
    """Return facts on the machine. Another process asks for GPU and CUDA, so that this
    one never starts CUDA. tiny: measurements are on the CPU.
    """
    return {
        "gpu": "none: tiny sizes on the CPU",
        "cuda": "unused",
        "driver": "unused" if tiny else _driver(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in (*PACKAGES, *LIBRARIES)},
        "stack": [name for name in (*PACKAGES, *LIBRARIES) if _of_the_stack(name)],
        "commit": _commit(),
    } | ({} if tiny else _gpu())


def slug(facts: dict[str, Any]) -> str:
    """Return the GPU's name in a form for file names."""
    return (
        "cpu"
        if facts["gpu"].startswith("none")
        else re.sub(r"[^A-Za-z0-9.]+", "-", facts["gpu"]).strip("-")
    )


def _gpu() -> dict[str, Any]:
    done = _output([sys.executable, "-m", "benchmarks.gpu.machine"])
    return json.loads(done.splitlines()[-1]) if done else {"gpu": "unknown", "cuda": "unknown"}


def _driver() -> str:
    found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if found:
        return found.splitlines()[0]
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER.read_text()) if DRIVER.exists() else None
    return match[0] if match else "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _of_the_stack(name: str) -> bool:
    """Return whether run.sh --stack installed this package."""
    stack = os.environ.get("MEGARL_STACK")
    if not stack or _version(name) == "not installed":
        return False
    return (
        Path(str(importlib.metadata.distribution(name).locate_file(""))).resolve()
        == Path(stack).resolve()
    )


def _commit() -> str:
    commit = _output(["git", "rev-parse", "HEAD"])
    if not commit:
        return "unknown"
    return (
        f"{commit} and changes"
        if _output(["git", "status", "--porcelain", "--untracked-files=no"])
        else commit
    )


def _output(words: list[str]) -> str:
    """Return a command's output, or "" if the command is missing or fails."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    import torch

    properties = torch.cuda.get_device_properties(0)
    found = {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory": properties.total_memory,
        "cuda": torch.version.cuda,
    }
    print(json.dumps(found))
