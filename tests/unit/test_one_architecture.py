"""What stays of a GPU library's code: in one made by hand, in one of nvcc's, and on a
GPU. Imports nothing of megarl's.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.one_architecture import MACHINE_CODE, MAGIC, containers, elements, main

pytestmark = pytest.mark.processes
PTX = 1


def element(kind: int, architecture: int, content: bytes) -> bytes:
    return struct.pack("<HHIQ12xI", kind, 0x101, 32, len(content), architecture) + content


def container(*inside: bytes) -> bytes:
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(b"".join(inside))) + b"".join(inside)


def library(fatbin: bytes) -> bytes:
    """A shared library of which only that section can be read."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    sections = [(0, 0, 0), (1, 64, len(fatbin)), (12, 64 + len(fatbin), len(names))]
    table = b"".join(
        struct.pack("<IIQQQQ24x", name, 1, 0, 0, offset, size) for name, offset, size in sections
    )
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack(
        "<Q10xHHH", 64 + len(fatbin) + len(names), 64, len(sections), 2
    )
    return header + fatbin + names + table


CODE = {of: element(MACHINE_CODE, of, bytes([of]) * 8 * of) for of in (80, 86, 90, 100)}
TEXT = element(PTX, 90, b"ptx here")
FIRST = container(CODE[80], CODE[86], TEXT, CODE[90], CODE[100])
FATBIN = (
    FIRST
    + bytes(8)
    + container(element(MACHINE_CODE, 100, bytes(80)), element(MACHINE_CODE, 101, bytes(72)))
)


@pytest.mark.parametrize(
    ("architecture", "kept"), [(90, [TEXT, CODE[90]]), (89, [CODE[80], CODE[86], TEXT])]
)
def test_one_architecture_stays(tmp_path: Path, architecture: int, kept: list[bytes]) -> None:
    """In order, at the begin of a container as large as before; of one without any for
    this GPU the smallest.
    """
    path = tmp_path / "x.so"
    before = library(FATBIN)
    path.write_bytes(before)
    freed = main(architecture, [path])
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after[64 + len(FATBIN) :] == before[64 + len(FATBIN) :]
    whole = b"".join(kept)
    assert after[80 : 64 + len(FIRST)] == whole + bytes(len(FIRST) - 16 - len(whole))
    first, second = ([each for each, _ in elements(after, *ends)] for _, *ends in containers(after))
    assert first == kept
    assert second == [element(MACHINE_CODE, 101, bytes(72))]
    assert freed == len(FIRST) - 16 - len(whole) + 32 + 80


SOURCE = """
__global__ void square(int *x) { *x *= *x; }
extern "C" int squared(int x) {
    int *there, out = -1;
    if (cudaMalloc(&there, sizeof x)) return -2;
    cudaMemcpy(there, &x, sizeof x, cudaMemcpyHostToDevice);
    square<<<1, 1>>>(there);
    cudaMemcpy(&out, there, sizeof x, cudaMemcpyDeviceToHost);
    return cudaGetLastError() ? -3 : out;
}
"""


def compiled(folder: Path, *architectures: int) -> Path:
    """A library with machine code for each of them and no PTX, by nvcc."""
    nvcc = shutil.which(
        "nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    )
    if nvcc is None:
        pytest.skip("no nvcc")
    source = folder / "square.cu"
    path = folder / "square.so"
    source.write_text(SOURCE)
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    words = [nvcc, "-shared", "-Xcompiler", "-fPIC", *codes, "-o", str(path), str(source)]
    subprocess.run(words, check=True, timeout=120)
    return path


def test_of_what_nvcc_makes(tmp_path: Path) -> None:
    path = compiled(tmp_path, 80, 90)
    assert main(90, [path]) > 0
    data = path.read_bytes()
    found = [needs for _, *ends in containers(data) for _, needs in elements(data, *ends)]
    assert found
    assert set(found) == {90}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_what_stays_runs(tmp_path: Path) -> None:
    """In a library whose other architectures were taken out: the first thing to know
    where a packed stack goes to.
    """
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    path = compiled(tmp_path, *sorted({75, 80, 90, here}))
    assert main(here, [path]) > 0
    assert ctypes.CDLL(str(path)).squared(12) == 144
