"""The GPU stack for a machine without a network: its way there, and that it is what is
used.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.benchmarks.test_gpu_benchmark import ROOT, RUN, run_sh
from tests.unit.test_one_architecture import CODE, FATBIN, TEXT, library

pytestmark = pytest.mark.processes


def call(
    script: str, *words: Path, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": path}
    return subprocess.run(
        [RUN.parent / script, *words], env=environment, capture_output=True, text=True, timeout=120
    )


def test_packed_and_unpacked(tmp_path: Path) -> None:
    files = {
        "a/x.so": library(FATBIN),
        "a/x.py": b"x = 1\n",
        "sgl_kernel/sm90/y.py": b"",
        "sgl_kernel/sm100/y.py": b"",
    }
    for name, content in files.items():
        path = tmp_path / "made" / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    done = call("pack.sh", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    pieces = tmp_path / "made" / "pieces"
    there = tmp_path / "there"
    assert sorted(path.name for path in pieces.iterdir()) == ["SHA256SUMS", "stack.tar.xz.00"]
    done = call("unpack.sh", pieces, there)
    assert done.returncode == 0, done.stderr
    found = {
        str(path.relative_to(there)): path.read_bytes()
        for path in there.rglob("*")
        if path.is_file()
    }
    assert found.keys() == files.keys() - {"sgl_kernel/sm100/y.py"}
    assert found["a/x.py"] == files["a/x.py"]
    assert TEXT + CODE[90] in found["a/x.so"]
    assert CODE[80] not in found["a/x.so"]
    tools = tmp_path / "tools"  # all that it calls, but no xz
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "du", "mkdir", "python3", "sha256sum", "tar"):
        (tools / tool).symlink_to(sys.executable if tool == "python3" else str(shutil.which(tool)))
    done = call("unpack.sh", pieces, tmp_path / "again", path=str(tools))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "a" / "x.py").read_bytes() == files["a/x.py"]
    (pieces / "stack.tar.xz.00").write_bytes(b"half")
    assert call("unpack.sh", pieces, tmp_path / "none").returncode != 0
    assert not (tmp_path / "none").exists()


def test_a_piece_travels_with_the_checkout() -> None:
    """As an archive of both, in a call that carries 64 MiB."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    sizes = [
        path.stat().st_size
        for name in listed.split("\0")
        if name and (path := ROOT / name).is_file()
    ]
    piece = re.search(r"split -b (\d+)MB", (RUN.parent / "pack.sh").read_text())
    assert piece is not None
    assert sum(512 + -(-size // 512) * 512 for size in (*sizes, int(piece[1]) * 10**6)) < 64 << 20


def test_the_stack_is_what_is_pinned() -> None:
    gpu = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    tests = (
        (RUN.parent / "wheels.txt").read_text().splitlines()
    )  # what runs the tests is not of the GPU stack
    stack = [
        line
        for line in (RUN.parent / "stack.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert {"torch", "sglang", "sglang-kernel", "transformer-engine-cu13"} <= {
        line.partition("==")[0] for line in stack
    }
    named = {line.partition("==")[0] for line in gpu}
    assert [
        line for line in stack if line not in (gpu if line.partition("==")[0] in named else tests)
    ] == []


def test_the_stack_comes_before_what_is_there(tmp_path: Path) -> None:
    """And is measured as that; libraries of NVIDIA's that it lacks are found beside
    those that it has.
    """
    site = tmp_path / "site"
    venv = tmp_path / "venv"
    out = tmp_path / "out"
    (site / "nvidia" / "nccl" / "lib").mkdir(parents=True)
    (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").write_text("mine")
    (site / "torch.py").write_text('__version__ = "2.14.1"\n')
    (site / "torch-2.14.1.dist-info").mkdir()
    (site / "torch-2.14.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n"
    )
    words = [
        "--tiny",
        "--stack",
        str(site),
        "--venv",
        str(venv),
        "--minutes",
        "0.001",
        "--output",
        str(out),
    ]
    done = run_sh(tmp_path, "2.10.0", *words)
    assert done.returncode == 1, done.stderr  # no part was run
    (text,) = out.glob("*.json")
    assert json.loads(text.read_text())["machine"]["stack"] == ["torch"]
    assert "\nOf the stack: torch; the others were there.\n" in text.with_suffix(".md").read_text()
    look = "import torch, pytest; print(torch.__file__, pytest.__file__)"
    seen = subprocess.run(
        [venv / "bin" / "python", "-c", look], capture_output=True, text=True, check=True
    )
    new, old = map(Path, seen.stdout.split())
    assert new.resolve() == site / "torch.py"
    assert old.is_relative_to(Path(sys.prefix).resolve()) or old.is_relative_to(sys.prefix)
    assert (site / "nvidia" / "nccl" / "lib" / "libnccl.so.2").read_text() == "mine"
    assert (site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9").is_file()
    assert (
        "give one of them"
        in run_sh(tmp_path, "2.14.1", "--stack", str(site), "--wheels", str(site)).stderr
    )
