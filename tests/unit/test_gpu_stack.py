"""The GPU stack for a machine without a network: what stays of its libraries, its way there, and that it is what is used."""

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.one_architecture import MACHINE_CODE, MAGIC, containers, elements, main
from tests.unit.test_gpu_benchmark import ROOT, RUN, run

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
    table = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, offset, size) for name, offset, size in sections)
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q10xHHH", 64 + len(fatbin) + len(names), 64, len(sections), 2)
    return header + fatbin + names + table


CODE = {of: element(MACHINE_CODE, of, bytes([of]) * 8 * of) for of in (80, 86, 90, 100)}
TEXT = element(PTX, 90, b"ptx here")
FIRST = container(CODE[80], CODE[86], TEXT, CODE[90], CODE[100])
FATBIN = FIRST + bytes(8) + container(element(MACHINE_CODE, 100, bytes(80)), element(MACHINE_CODE, 101, bytes(72)))


@pytest.mark.parametrize(("architecture", "kept"), [(90, [TEXT, CODE[90]]), (89, [CODE[80], CODE[86], TEXT])])
def test_one_architecture_stays(tmp_path: Path, architecture: int, kept: list[bytes]) -> None:
    """In order, at the begin of a container as large as before; of one without any for this GPU the smallest."""
    path, before = tmp_path / "x.so", library(FATBIN)
    path.write_bytes(before)
    freed = main(architecture, [path])
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after[64 + len(FATBIN) :] == before[64 + len(FATBIN) :]
    whole = b"".join(kept)
    assert after[80 : 64 + len(FIRST)] == whole + bytes(len(FIRST) - 16 - len(whole))
    (first, second) = ([each for each, _ in elements(after, *ends)] for _, *ends in containers(after))
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
    nvcc = shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if nvcc is None:
        pytest.skip("no nvcc")
    source, path = folder / "square.cu", folder / "square.so"
    source.write_text(SOURCE)
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    words = [nvcc, "-shared", "-Xcompiler", "-fPIC", *codes, "-o", path, source]
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
    """In a library whose other architectures were taken out: the first thing to know where a packed stack goes to."""
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    path = compiled(tmp_path, *sorted({75, 80, 90, here}))
    assert main(here, [path]) > 0
    assert ctypes.CDLL(str(path)).squared(12) == 144


def call(script: str, *words: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUN.parent / script, *words], capture_output=True, text=True, timeout=120)


def test_packed_and_unpacked(tmp_path: Path) -> None:
    files = {"a/x.so": library(FATBIN), "a/x.py": b"x = 1\n", "sgl_kernel/sm90/y.py": b"", "sgl_kernel/sm100/y.py": b""}
    for name, content in files.items():
        path = tmp_path / "made" / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    done = call("pack.sh", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    pieces, there = tmp_path / "made" / "pieces", tmp_path / "there"
    assert sorted(path.name for path in pieces.iterdir()) == ["SHA256SUMS", "stack.tar.xz.00"]
    done = call("unpack.sh", pieces, there)
    assert done.returncode == 0, done.stderr
    found = {str(path.relative_to(there)): path.read_bytes() for path in there.rglob("*") if path.is_file()}
    assert found.keys() == files.keys() - {"sgl_kernel/sm100/y.py"}
    assert found["a/x.py"] == files["a/x.py"]
    assert TEXT + CODE[90] in found["a/x.so"]
    assert CODE[80] not in found["a/x.so"]
    (pieces / "stack.tar.xz.00").write_bytes(b"half")
    assert call("unpack.sh", pieces, tmp_path / "none").returncode != 0
    assert not (tmp_path / "none").exists()


def test_the_stack_is_what_is_pinned() -> None:
    gpu = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    tests = (RUN.parent / "wheels.txt").read_text().splitlines()  # what runs the tests is not of the GPU stack
    stack = [line for line in (RUN.parent / "stack.txt").read_text().splitlines() if not line.startswith("#")]
    assert {"torch", "sglang", "sglang-kernel", "transformer-engine-cu13"} <= {
        line.partition("==")[0] for line in stack
    }
    named = {line.partition("==")[0] for line in gpu}
    assert [line for line in stack if line not in (gpu if line.partition("==")[0] in named else tests)] == []


def test_the_stack_comes_before_what_is_there(tmp_path: Path) -> None:
    """And is measured as that; libraries of NVIDIA's that it lacks are found beside those that it has."""
    site, venv, out = tmp_path / "site", tmp_path / "venv", tmp_path / "out"
    (site / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_text("mine")
    (site / "torch.py").write_text('__version__ = "2.14.1"\n')
    (site / "torch-2.14.1.dist-info").mkdir()
    (site / "torch-2.14.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    words = ["--tiny", "--stack", str(site), "--venv", str(venv), "--minutes", "0.001", "--output", str(out)]
    done = run(tmp_path, "2.10.0", *words)
    assert done.returncode == 1, done.stderr  # no part was run
    (text,) = out.glob("*.json")
    assert json.loads(text.read_text())["machine"]["stack"] == ["torch"]
    assert "\nOf the stack: torch; the others were there.\n" in text.with_suffix(".md").read_text()
    look = "import torch, pytest; print(torch.__file__, pytest.__file__)"
    seen = subprocess.run([venv / "bin" / "python", "-c", look], capture_output=True, text=True, check=True)
    new, old = map(Path, seen.stdout.split())
    assert new.resolve() == site / "torch.py"
    assert old.is_relative_to(Path(sys.prefix).resolve()) or old.is_relative_to(sys.prefix)
    assert (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").read_text() == "mine"
    assert (site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").is_file()
    assert "give one of them" in run(tmp_path, "2.14.1", "--stack", str(site), "--wheels", str(site)).stderr
