"""The Triton kernels without a GPU: run by the interpreter, and compiled for the GPUs
that people have.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from megarl.core.models.head import kernels

ROOT = Path(__file__).parents[4]
POINTERS = {"labels": "*i64", "out": "*bf16"}
SIZES = {"columns": "i32", "stride": "i32", "temperature": "fp32", "BLOCK": "constexpr"}


def test_interpreted_kernels_are_the_formula() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.core.learner.interpreted_kernels"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("interpreted\n")


def compiled(
    kernel: triton.JITFunction, logits: str, capability: int, block: int, warps: int
) -> CompiledKernel:
    signature = {
        name: ({"logits": logits} | POINTERS | SIZES).get(name, "*fp32")
        for name in kernel.arg_names
    }
    return triton.compile(
        ASTSource(kernel, signature, constexprs={"BLOCK": block}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )


def spilled(ptx: str, folder: Path) -> int:
    """Bytes that a thread writes to memory because it has no registers left, as the
    assembler says.
    """
    (folder / "kernel.ptx").write_text(ptx)
    target = next(
        line.split()[1] for line in ptx.splitlines() if line.startswith(".target")
    ).rstrip(",")
    assembler = (
        triton.knobs.nvidia.ptxas_blackwell
        if target.startswith("sm_10")
        else triton.knobs.nvidia.ptxas
    )
    words = [
        assembler.path,
        "-v",
        f"--gpu-name={target}",
        str(folder / "kernel.ptx"),
        "-o",
        os.devnull,
    ]
    said = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True).stderr
    return int(re.findall(r"(\d+) bytes spill stores", said)[0])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
@pytest.mark.parametrize("kernel", [kernels._reduce, kernels._gradient], ids=["reduce", "gradient"])
def test_kernels_compile(
    kernel: triton.JITFunction,
    logits: str,
    capability: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For A100, H100 and H200, B200: to machine code, by the compiler that comes with
    Triton, and all of it in registers.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(kernel, logits, capability, kernels.BLOCK, kernels.WARPS)
    assert f"sm_{capability}" in made.asm["ptx"]
    assert made.asm["cubin"].startswith(b"\x7fELF")
    assert spilled(made.asm["ptx"], tmp_path) == 0


def test_a_kernel_that_spills_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = compiled(kernels._reduce, "*fp32", 90, block=4 * kernels.BLOCK, warps=1)
    assert spilled(made.asm["ptx"], tmp_path) > 0
