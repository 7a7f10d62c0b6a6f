"""launch/try_image.py knows every step of the Dockerfile,
and says so when one fails.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_image", ROOT / "launch" / "try_image.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "try_image", module)
    spec.loader.exec_module(module)
    return module


def test_each_step_of_the_dockerfile_is_known(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is started here: what would be is noted."""
    started = []

    def do(_trial: object, _stage: object, command: str) -> str:
        started.append(command)
        if " build " in command:
            (tmp_path / "wheel" / "wheels" / "megarl-0.1.0.whl").touch()
        return "ran"

    monkeypatch.setattr(program.Trial, "_do", do)
    monkeypatch.setattr(program.Trial, "_python", lambda *_: Path("python"))
    monkeypatch.setattr(program.Trial, "_own_uv", lambda *_: "ran")
    program.Trial(tmp_path, install=False).carry_out(program.DOCKERFILE.read_text())
    said = capsys.readouterr().out
    for stage in ("wheel", "cpu", "cuda", "compiled", "gpu"):
        assert f"\n{stage:>9}  FROM " in f"\n{said}"
    assert "not run: it fetches kernels from NVIDIA" in said
    locks = [command.split("--requirements ")[1] for command in started if "--dry-run" in command]
    assert locks == [
        f"{tmp_path}/cpu/tmp/cpu.txt --dry-run",
        f"{tmp_path}/cuda/tmp/gpu.txt --dry-run",
    ]
    assert (tmp_path / "cuda" / "tmp" / "gpu.txt").read_text() == (
        ROOT / "requirements" / "gpu.txt"
    ).read_text()
    wheels = [command for command in started if command.endswith(".whl")]
    assert len(wheels) == 2, "one in each image"


@pytest.mark.parametrize(
    "step", ["RUN make everything", "ONBUILD RUN true", "RUN apt-get update && make everything"]
)
def test_a_step_that_is_not_known_is_said(program: ModuleType, tmp_path: Path, step: str) -> None:
    with pytest.raises(program.StepFailed, match="not known to try_image"):
        program.Trial(tmp_path, install=False).carry_out(f"FROM a AS b\n{step}\n")


def test_a_step_that_fails_is_said(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM a AS b\nRUN megarl doctor\n")
    monkeypatch.setattr(program, "DOCKERFILE", dockerfile)
    monkeypatch.setattr(program.Trial, "_python", lambda *_: "echo no such Python >&2; false")
    monkeypatch.setattr(sys, "argv", ["try_image.py", "--folder", str(tmp_path / "root")])
    assert program.main() == 1
    assert "no such Python" in capsys.readouterr().err


def test_lines_are_joined_and_remarks_left_out(program: ModuleType) -> None:
    text = "FROM a AS b\n# remark\nRUN one \\\n    # within\n    && two\n"
    first, second = program.instructions(text)
    assert (first.stage, first.word) == ("b", "FROM")
    assert program.commands(second.text) == ["one", "two"]
