"""The whole GPU benchmark at its tiny sizes, with nothing to import but what PyTorch
requires and benchmarks/gpu/wheels.txt.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "benchmarks" / "gpu" / "wheels.txt"
BARE = """
import sys
from importlib.machinery import PathFinder
HIDDEN = set({hidden!r})
class Bare:
    find_distributions = PathFinder.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in HIDDEN else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""As sitecustomize.py: top-level names that are not to be found."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str, found: set[str]) -> set[str]:
    """`found` and this distribution and all that it requires here."""
    if canonical(name) in found:
        return found
    found.add(canonical(name))
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            required(need.name, found)
    return found


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_whole(tmp_path: Path) -> None:
    wheels = {
        canonical(line.partition("==")[0])
        for line in WHEELS.read_text().splitlines()
        if not line.startswith("#")
    }
    there = required("torch", set()) | wheels | {"megarl", "pip"}
    # Asked of a new process: what has imported setuptools also finds the packages that
    # it brings along.
    listing = (
        "import importlib.metadata, json;"
        " print(json.dumps(importlib.metadata.packages_distributions()))"
    )
    distributions = json.loads(subprocess.check_output([sys.executable, "-c", listing]))
    hidden = {name for name, of in distributions.items() if not there & set(map(canonical, of))}
    assert {"datasets", "sglang", "rich"} <= hidden
    (tmp_path / "sitecustomize.py").write_text(BARE.format(hidden=sorted(hidden)))
    environment = {
        "PATH": "/usr/bin:/bin",
        "MEGARL_PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_timeout",
    }
    script = ROOT / "benchmarks" / "gpu" / "run.sh"
    words = [str(script), "--tiny", "--output", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    (text,) = tmp_path.glob("gpu-*-cpu.json")
    parts = {part["part"]: part for part in json.loads(text.read_text())["parts"]}
    assert {name: (part["ending"], part["why"]) for name, part in parts.items()} == {
        **dict.fromkeys(
            ("checksum", "tests", "head", "learner", "precision", "moe", "checkpoint"),
            ("measured", ""),
        ),
        **dict.fromkeys(
            ("publication", "parity", "server", "run"), ("absent", "SGLang is not installed")
        ),
        "fp8": ("absent", parts["fp8"]["why"]),
    }
    assert done.returncode == 0, done.stderr
    assert all(row["figure"] >= 0 for part in parts.values() for row in part["rows"])
    assert any(remark.endswith("skipped: no NVIDIA GPU") for remark in parts["tests"]["remarks"])
    assert len(parts["learner"]["rows"]) == 9
    log_probs = {row["what"]: row["figure"] for row in parts["precision"]["rows"]}
    assert 0 < log_probs["bf16 to FP32: largest difference of a log-prob"] < 0.2
