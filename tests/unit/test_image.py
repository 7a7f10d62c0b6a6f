"""The Dockerfile, as far as it can be seen without a container engine: hadolint is
content, and its wheel is whole.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

from megarl.checks.doctor import PINS
from megarl.core.recipe import shipped

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
BIN = Path(sys.executable).parent


def test_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=f"{BIN}:{os.environ['PATH']}") or "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nccl_finds_infiniband() -> None:
    """It loads both by name, and says nothing where they are missing; CUDA's images
    have neither.
    """
    stage = DOCKERFILE.read_text().split(" AS cuda\n")[1].split("\nFROM ")[0]
    assert {"libibverbs1", "ibverbs-providers"} <= set(stage.split())


def test_kernels_are_compiled_by_the_toolkit_of_the_base() -> None:
    """A wheel's nvcc is newer, and a driver of CUDA 13.0 refuses its PTX."""
    stage = DOCKERFILE.read_text().split(" AS cuda\n")[1].split("\nFROM ")[0]
    assert re.search(
        r"^ARG CUDA_BASE=nvidia/cuda:13\.0\.\d+-devel-", DOCKERFILE.read_text(), flags=re.MULTILINE
    )
    assert re.search(r"^ENV (.* \\\n)*.*CUDA_HOME=/usr/local/cuda \\\n", stage, flags=re.MULTILINE)


def pinned(name: str) -> dict[str, str]:
    """Versions by package of a lock."""
    lines = [
        line
        for line in (ROOT / "requirements" / name).read_text().splitlines()
        if not line.startswith("#")
    ]
    return dict(re.fullmatch(r"([a-z0-9._-]+)==(\S+)", line).groups() for line in lines)  # type: ignore[union-attr, misc]


def test_both_stacks_are_pinned_and_agree() -> None:
    cpu = pinned("cpu.txt")
    gpu = pinned("gpu.txt")
    setup = (ROOT / "setup.py").read_text()
    asked = re.findall(
        r'^        "([a-z0-9-]+)',
        setup.split("install_requires=[")[1].split("]")[0],
        flags=re.MULTILINE,
    )
    assert "msgspec" in asked
    assert [name for name in asked if name not in gpu or name not in cpu] == []
    assert PINS.keys() == {"sglang", "torch", "megatron-core", "transformers"}
    assert {name: (cpu[name], gpu[name]) for name in PINS} == {
        name: (v, v) for name, v in PINS.items()
    }
    assert gpu["transformer-engine"] == gpu["transformer-engine-cu13"]


def test_extras_ask_for_the_versions_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install "megarl[gpu] @ ."` resolves these; the locks are what was tested."""
    said: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: said.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    asked = (ROOT / "requirements" / "gpu.in").read_text().splitlines()
    for extra in ("cpu", "gpu"):
        packages = said["extras_require"][extra]
        versions = dict(package.split("==") for package in packages if "==" in package)
        assert PINS.items() <= versions.items(), extra
        assert [package for package in packages if package not in asked] == []
    engine = "transformer-engine[core-cu13]"
    assert engine in {p.partition("==")[0] for p in said["extras_require"]["gpu"]}


def test_torch_bounds_cublas() -> None:
    """docs/reference/models.md says why experts' products take the slower way on
    Hopper. When torch asks for a cuBLAS from 13.4 on, they need not, and the page is
    out of date.
    """
    (bound,) = {
        re.search(r"nvidia-cublas==([0-9.]+)\.\*", line)[1]  # type: ignore[index]
        for line in requires("cuda-toolkit") or []
        if line.startswith("nvidia-cublas==") and "extra == 'cublas'" in line
    }
    assert any("cuda-toolkit[cublas" in line for line in requires("torch") or [])
    assert pinned("gpu.txt")["nvidia-cublas"] == bound
    assert tuple(map(int, bound.split("."))) < (13, 4)


def test_kernels_that_blackwell_loads_are_in_the_image() -> None:
    """FlashInfer would fetch them when a server starts, where many clusters have no
    network.
    """
    stage = DOCKERFILE.read_text().split(" AS cuda\n")[1].split("\nFROM ")[0]
    folder = "/opt/flashinfer-cubins"
    assert re.search(rf"FLASHINFER_CUBIN_DIR={folder}$", stage, flags=re.MULTILINE)
    installed = stage.index("--requirements /tmp/gpu.txt")
    assert stage.index("flashinfer download-cubin") > installed
    assert "fmha/trtllm-gen" in stage.split("flashinfer download-cubin")[1]


def test_the_image_compiles_transformer_engine_by_the_script(tmp_path: Path) -> None:
    """With what its stage copies, the script comes to its check of the toolkit; where
    the wheel is, it does nothing.
    """
    stage = DOCKERFILE.read_text().split(" AS compiled\n")[1].split("\nFROM ")[0]
    for source, target in re.findall(r"^COPY (\S+) (\S+)$", stage, flags=re.MULTILINE):
        (tmp_path / target).mkdir()
        shutil.copy(ROOT / source, tmp_path / target)
    assert 'RUN launch/build_te.sh "$VIRTUAL_ENV/bin/python" /wheels' in stage
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)

    def run() -> subprocess.CompletedProcess[str]:
        words = ["launch/build_te.sh", sys.executable, "wheels"]
        environment = os.environ | {"CUDA_HOME": str(tmp_path / "cuda")}
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert "has no nvcc: set CUDA_HOME to a toolkit 13.0" in run().stderr
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.131\n")
    nvcc.chmod(0o755)
    assert "has 12.4: set CUDA_HOME to a toolkit 13.0" in run().stderr
    built_for = (
        f"transformer-engine-torch {pinned('gpu.txt')['transformer-engine']} for torch"
        f" {torch.__version__}\n"
    )
    (tmp_path / "wheels" / "built-for").write_text(built_for)
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_copied_makes_a_whole_wheel(tmp_path: Path) -> None:
    """The steps of the stage `wheel`, the installation from it in a scratch root, and
    the check that ends the CPU image.
    """
    stage = DOCKERFILE.read_text().split(" AS wheel\n")[1].split("\nFROM ")[0]
    source = tmp_path / "src"
    root = tmp_path / "root"
    source.mkdir()
    for line in re.findall(r"^COPY (.+)$", stage, flags=re.MULTILINE):
        *sources, target = line.split()
        for name in sources:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / name, source / target / name)
    assert "uv build --wheel --out-dir /wheels ." in stage
    uv = [str(BIN / "uv"), "--quiet"]
    subprocess.run(
        [
            *uv,
            "build",
            "--wheel",
            "--no-build-isolation",
            "--python",
            sys.executable,
            "--out-dir",
            str(tmp_path),
            ".",
        ],
        cwd=source,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [
            *uv,
            "pip",
            "install",
            "--python",
            sys.executable,
            "--no-deps",
            "--target",
            str(root),
            str(wheel),
        ],
        check=True,
    )
    environment = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "120"}

    def megarl(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "megarl", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    listed = megarl("recipes")
    assert [name for name in shipped() if name not in listed] == []
    assert "&& megarl doctor" in DOCKERFILE.read_text()
    assert "megatron-core" in megarl("doctor")
    made = {
        path.relative_to(root)
        for path in root.glob("megarl/**/*")
        if path.suffix in (".yaml", ".html", ".json")
    }
    assert made == {
        p.relative_to(ROOT)
        for p in ROOT.glob("megarl/**/*")
        if p.suffix in (".yaml", ".html", ".json")
    }
