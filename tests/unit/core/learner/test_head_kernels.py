"""The Triton kernels without a GPU: run by the interpreter, and compiled for the GPUs that people have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megarl.core.learner.head import kernels

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


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
@pytest.mark.parametrize("kernel", [kernels._reduce, kernels._gradient], ids=["reduce", "gradient"])
def test_kernels_compile(
    kernel: triton.JITFunction, logits: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For A100, H100 and H200, B200: to machine code, by the compiler that comes with Triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {name: ({"logits": logits} | POINTERS | SIZES).get(name, "*fp32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs={"BLOCK": kernels.BLOCK}),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernels.WARPS},
    )
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
