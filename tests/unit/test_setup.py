"""launch/setup.sh on machines without a Python 3.12 that makes environments: uv fetches
one, here from a folder.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "bash env cat cut dirname id rm mkdir mktemp sha256sum timeout cp chmod"
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "__pycache__",
    "turtledemo",
    "tkinter",
    "pydoc_data",
    "ensurepip",
}
URL = "https://github.com/astral-sh/python-build-standalone/releases/download"
UV = Path(sys.executable).with_name("uv")

STAND_IN_UV = f"""#!/usr/bin/env bash
# uv, but for packages: there is no index here. `pip` is then a program that installs as little.
if [ "$1" = pip ]; then
    echo "$* from ${{UV_DEFAULT_INDEX:-PyPI}}" >> asked
    printf '#!%s/.venv/bin/python\n' "$(pwd -P)" > .venv/bin/pip
    cp "$0" .venv/bin/uv
    chmod +x .venv/bin/pip
    exit 0
fi
exec {UV} "$@"
"""
STAND_IN_PIP = """import os, pathlib, sys
if os.environ.get("PIP_USER", "0") != "0":
    sys.exit("Can not perform a '--user' install.")
pathlib.Path("asked").open("a").write("pip " + " ".join(sys.argv[1:]) + "\\n")
"""


def archive(folder: Path) -> None:
    """The Python that runs this, without ensurepip and with a pip that only notes what
    it is asked; uv's list of Pythons.
    """
    base = Path(sys.base_prefix)
    name = f"cpython-{platform.python_version()}.tar.gz"
    (folder / "1").mkdir(parents=True)
    with tarfile.open(folder / "1" / name, "w:gz", compresslevel=0) as tar:

        def needed(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
            parts = Path(info.name).parts
            return (
                None
                if LEFT_OUT & set(parts) or any(p.startswith("config-") for p in parts)
                else info
            )

        tar.add(base / "lib" / "python3.12", "python/lib/python3.12", filter=needed)
        tar.add(os.path.realpath(base / "bin" / "python3.12"), "python/bin/python3.12")
        for library in base.glob("lib/libpython3*.so*"):
            tar.add(library, f"python/lib/{library.name}")
        file = folder / "pip.py"
        file.write_text(STAND_IN_PIP)
        tar.add(file, "python/lib/python3.12/pip.py")
    major, minor, patch = map(int, platform.python_version_tuple())
    entry = {
        "name": "cpython",
        "arch": {"family": platform.machine(), "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": f"{URL}/1/{name}",
        "sha256": None,
        "variant": None,
        "build": "1",
    }
    key = f"cpython-{platform.python_version()}-linux-{platform.machine()}-gnu"
    (folder / "list.json").write_text(json.dumps({key: entry}))


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    archive(folder)
    return folder


class Machine:
    """A checkout, and a PATH that has next to nothing."""

    def __init__(self, folder: Path, mirror: Path) -> None:
        self.checkout = folder / "megarl"
        self.path = folder / "bin"
        self.mirror = mirror
        for part in (self.checkout / "launch", self.checkout / "requirements", self.path):
            part.mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "setup.sh", self.checkout / "launch")
        (self.checkout / "requirements" / "cpu.txt").touch()
        (self.checkout / "setup.py").touch()
        for tool in TOOLS.split():
            (self.path / tool).symlink_to(shutil.which(tool) or tool)

    def program(self, name: str, text: str) -> Path:
        file = self.path / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def setup(self, mirror: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        home = str(self.path.parent)
        environment = {
            "PATH": str(self.path),
            "HOME": home,
            "UV_CACHE_DIR": f"{home}/cache",
            "UV_PYTHON_INSTALL_DIR": f"{home}/pythons",
            "UV_PYTHON_DOWNLOADS_JSON_URL": str(self.mirror / "list.json"),
            "UV_HTTP_RETRIES": "0",
            "UV_PYTHON_INSTALL_MIRROR": mirror or f"file://{self.mirror}",
        }
        words = [str(self.path / "bash"), str(self.checkout / "launch" / "setup.sh")]
        return subprocess.run(
            words, env=environment | more, capture_output=True, text=True, timeout=240
        )

    def python(self) -> str:
        shown = [
            str(self.checkout / ".venv" / "bin" / "python"),
            "-c",
            "import sys; print(*sys.version_info[:2])",
        ]
        return subprocess.run(shown, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def machine(tmp_path: Path, mirror: Path) -> Machine:
    return Machine(tmp_path, mirror)


def test_without_any_python_a_uv_fetches_one(machine: Machine) -> None:
    machine.program("uv", STAND_IN_UV)
    done = machine.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making .venv with uv" in done.stdout
    assert machine.python() == "3 12"
    asked = (machine.checkout / "asked").read_text().splitlines()
    assert asked[0] == "pip install --quiet --python .venv/bin/python pip from PyPI"
    assert any("--requirements requirements/cpu.txt" in line for line in asked)
    again = machine.setup()
    assert (again.returncode, again.stdout.count("making")) == (0, 0), "it is up to date"

    # The same Python, which lacks ensurepip, is taken where it is found.
    bare = next(Path(machine.path.parent, "pythons").glob("*/bin/python3.12"))
    (machine.checkout / ".venv" / ".megarl-setup").unlink()
    shutil.rmtree(machine.checkout / ".venv")
    done = machine.setup("file:///nowhere", MEGARL_PYTHON=str(bare))
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.python() == "3 12"


def test_a_copy_of_a_checkout_gets_an_environment_of_its_own(machine: Machine) -> None:
    """Its programs and its megarl would be those of the checkout that was copied."""
    machine.program("uv", STAND_IN_UV)
    assert machine.setup().returncode == 0
    copy = machine.checkout.with_name("copy")
    shutil.copytree(machine.checkout, copy, symlinks=True)
    machine.checkout = copy
    assert "making .venv with uv" in machine.setup().stdout
    assert "making" not in machine.setup().stdout


def test_what_a_site_has_set_for_pip_and_uv(machine: Machine) -> None:
    """Its mirror is asked, also by uv, which does not read pip's settings; nothing goes
    elsewhere than into .venv.
    """
    machine.program("uv", STAND_IN_UV)
    done = machine.setup(PIP_INDEX_URL="https://mirror/simple", PIP_USER="1", UV_SYSTEM_PYTHON="1")
    assert done.returncode == 0, done.stderr
    (asked,) = [
        line for line in (machine.checkout / "asked").read_text().splitlines() if "cpu.txt" in line
    ]
    assert asked.startswith(
        "pip install --python .venv/bin/python "
    )  # which UV_SYSTEM_PYTHON does not change
    assert asked.endswith(" from https://mirror/simple")


def test_the_pip_of_an_old_python_brings_uv(machine: Machine) -> None:
    uv = machine.program("hidden-uv", STAND_IN_UV)
    machine.program(
        "python3",
        f"""#!/usr/bin/env bash
[ "$1 $2 $3" = "-m pip install" ] || exit 1
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/bin" && cp {uv} "$2/bin/uv"
""",
    )
    done = machine.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.python() == "3 12"


def test_where_nothing_can_be_had_the_message_says_what_to_install(machine: Machine) -> None:
    done = machine.setup()
    assert done.returncode == 1
    assert (
        "None was found on PATH or under pyenv, and there is neither uv nor a Python that could"
        in done.stderr
    )
    assert "apt-get install python3.12 python3.12-venv" in done.stderr
    machine.program("uv", STAND_IN_UV)
    done = machine.setup("file:///nowhere")
    assert done.returncode == 1
    assert "uv could not make .venv:" in done.stderr
    assert "UV_PYTHON_INSTALL_MIRROR" in done.stderr
    assert not (machine.checkout / ".venv" / ".megarl-setup").exists()
