"""What torch_memory_saver needs of the machine, with a library of our own in place of
its hook.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.base.errors import MegarlError
from megarl.core.engine import memory_saver
from megarl.core.engine.memory_saver import LIBRARY_PATH, check_preload, library_path

pytestmark = pytest.mark.processes


def compiled(library: Path, *needed: str) -> Path:
    """Compile an empty library that needs others of its folder."""
    source = library.with_suffix(".c")
    source.write_text("int stands_for_nothing;\n")
    name = f"-Wl,-soname,{library.name}"
    needs = [f"-l:{other}" for other in needed]
    words = ["cc", "-shared", "-fPIC", name, "-o", str(library), str(source), "-Wl,--no-as-needed"]
    subprocess.run([*words, f"-L{library.parent}", *needs], check=True, timeout=60)
    return library


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """A fake of the hook, which needs a fake of libcudart that lies in a package of
    torch.
    """
    runtime = compiled(tmp_path / "libfake-cudart.so.13")
    made = compiled(tmp_path / "fake-hook.so", runtime.name)
    packages = tmp_path / "site-packages"
    folder = packages / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    runtime.rename(folder / runtime.name)
    (folder / "libcudart.so.13").touch()
    older = packages / "nvidia" / "cuda_runtime" / "lib"
    older.mkdir(parents=True)
    (older / "libcudart.so.12").touch()
    return made


def test_a_site_may_preload_what_is_missing(hook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader complains of each entry of /etc/ld.so.preload, and goes on."""
    of_site = (
        "ERROR: ld.so: object '/opt/site.so' from /etc/ld.so.preload cannot be preloaded (…):"
        " ignored."
    )
    answer = subprocess.CompletedProcess([], 0, "", of_site)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    check_preload(hook, {})


def test_a_library_that_the_loader_does_not_find_is_named(hook: Path) -> None:
    """The rank would end with status 127 before its first line."""
    environment = {name: value for name, value in os.environ.items() if name != LIBRARY_PATH}
    with pytest.raises(MegarlError, match=r"libfake-cudart\.so\.13.*Add the folder.*LD_LIBRARY"):
        check_preload(hook, environment)
    with pytest.raises(MegarlError, match="cannot be preloaded"):
        check_preload(hook.with_name("nowhere.so"), environment)


def test_it_is_found_in_torchs_package(hook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_PATH, "/first")
    packages = hook.parent / "site-packages"
    added = library_path(packages)
    assert added == {LIBRARY_PATH: f"/first:{packages}/nvidia/cu13/lib"}
    check_preload(hook, os.environ | added)
    monkeypatch.setenv(LIBRARY_PATH, added[LIBRARY_PATH])
    assert library_path(packages) == {}
    assert library_path(hook.parent) == {}


def test_torchs_package_here_has_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBRARY_PATH, raising=False)
    folder = Path(library_path()[LIBRARY_PATH])
    assert list(folder.glob("libcudart.so.13*"))


def test_a_python_that_does_not_start_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_python = tmp_path / "python"
    slow_python.write_text("#!/bin/sh\nexec sleep 60\n")
    slow_python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow_python))
    monkeypatch.setattr(memory_saver, "LIMIT_S", 0.2)
    with pytest.raises(MegarlError, match=r"did not start within 0\.2 s"):
        check_preload(Path(), os.environ)
