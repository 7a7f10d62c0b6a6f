"""What users' own code imports from megarl stays where their code looks for it."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

IMPORTS = {
    "megarl.environments": (
        "DONE",
        "Environment",
        "EnvironmentDown",
        "Observation",
        "Setting",
        "Verdict",
    ),
    "megarl.scaling.points": ("read_points", "curve_of_run"),
    "megarl.scaling.fit": ("fit",),
    "megarl.scaling.extrapolate": ("hours_to", "predict"),
}


@pytest.mark.parametrize("module", IMPORTS)
def test_it_is_found(module: str) -> None:
    assert not [
        name for name in IMPORTS[module] if not hasattr(importlib.import_module(module), name)
    ]


@pytest.mark.processes
def test_fits_come_without_torch() -> None:
    code = (
        "import sys; from megarl.scaling.fit import fit; assert callable(fit) and 'torch' not in"
        " sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


LIGHT = """
import re, sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

wanted, todo = set(), sys.argv[1:]
while todo:
    name = plain(todo.pop())
    if name not in wanted:
        wanted.add(name)
        needed = map(Requirement, requires(name) or [])
        todo += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
import megarl.checks.inputs, megarl.tools.submit, megarl.run.train
tops = {name.partition(".")[0] for name in sys.modules}
print(*sorted(tops & {top for top, by in packages_distributions().items() if not wanted & set(map(plain, by))} - {"megarl"}))
"""


@pytest.mark.processes
def test_a_host_whose_roles_run_in_a_container_needs_no_more_than_setup_asks_for() -> None:
    setup = (
        (Path(__file__).parents[2] / "setup.py")
        .read_text()
        .split("install_requires=[")[1]
        .split("]")[0]
    )
    words = [sys.executable, "-c", LIGHT, *re.findall(r'"([a-z0-9-]+)', setup)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stdout + done.stderr
