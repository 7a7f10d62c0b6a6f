"""What users' own code imports from megarl stays where their code looks for it."""

import importlib
import subprocess
import sys

import pytest

IMPORTS = {
    "megarl.environments": ("DONE", "Environment", "EnvironmentDown", "Observation", "Setting"),
    "megarl.scaling.points": ("read_points", "curve_of_run"),
    "megarl.scaling.fit": ("fit",),
    "megarl.scaling.extrapolate": ("hours_to", "predict"),
}


@pytest.mark.parametrize("module", IMPORTS)
def test_it_is_found(module: str) -> None:
    assert not [name for name in IMPORTS[module] if not hasattr(importlib.import_module(module), name)]


@pytest.mark.processes
def test_fits_come_without_torch() -> None:
    code = "import sys; from megarl.scaling.fit import fit; assert callable(fit) and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
