"""Carry out the Dockerfile's steps on this machine, in order, as far as they go without
a container engine.

    .venv/bin/python launch/try_image.py [--folder FOLDER] [--install]

Each step is read from the Dockerfile. A line says what was done with it: `ran`, in a
folder that stands for the image's root; `resolved`, all its packages exist for the
image's Python and platform, but none was fetched; or `not run`, and why. --install:
fetch and install the packages too (7 GB for the image `cpu`, 12 GB for `gpu`). The exit
status is 1 as soon as a step fails, and also if the Dockerfile has a step that this
program does not know.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "Dockerfile"
LIMIT_S = 3600
OUR_FOLDERS = ("/wheels", "/tmp/", "/src", "/opt/")
"""Paths of the image that lie in our folder instead."""
NOT_RUN = {
    "apt-get": "it would install Debian's or Ubuntu's packages on this machine",
    "rm": "it only makes a layer smaller",
    "useradd": "it would make a user on this machine",
    "flashinfer": "it fetches kernels from NVIDIA",
    "ls": "it looks at those kernels",
}
"""Why commands that begin with these words are left out."""


class StepFailed(Exception):
    """A step of the Dockerfile that failed, or that this program does not know."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, such as RUN, with its lines joined. stage: the
    name after AS.
    """

    stage: str
    word: str
    text: str


def instructions(text: str) -> Iterator[Instruction]:
    """Yield a Dockerfile's instructions; stage is empty before the first FROM."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stage = ""
    for line in joined.splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        yield Instruction(stage, word, rest.strip())


def commands(run: str) -> list[str]:
    """Return the commands of a RUN instruction."""
    return [part.strip() for part in run.split("&&")]


@dataclass
class Stage:
    """A stage of the build, whose root is a folder. environment: what ENV has set."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    work: str = "/"

    def here(self, path: str) -> Path:
        """Return where a path of the image is: below `work` if it is relative."""
        whole = path if path.startswith("/") else f"{self.work}/{path}"
        return self.root / whole.lstrip("/")

    def moved(self, command: str) -> str:
        """Return a command with the image's folders in our own."""
        names = "|".join(re.escape(folder) for folder in OUR_FOLDERS)
        return re.sub(rf"(?<![\w/.])({names})", rf"{self.root}\1", command)


class Trial:
    """The stages of one image after the other."""

    def __init__(self, folder: Path, install: bool) -> None:
        self._folder = folder
        self._install = install
        self.stages: dict[str, Stage] = {}

    def carry_out(self, text: str) -> None:
        """Carry out all instructions. StepFailed at the first failure."""
        for instruction in instructions(text):
            if instruction.word == "FROM":
                self._begin(instruction)
            elif instruction.word == "RUN":
                for command in commands(instruction.text):
                    say(instruction.stage, command, self._run(instruction.stage, command))
            elif instruction.word == "COPY":
                self._copy(instruction)
            elif instruction.word == "ENV":
                settings = shlex.split(instruction.text)
                stage = self.stages[instruction.stage]
                stage.environment |= dict(setting.split("=", 1) for setting in settings)
            elif instruction.word == "WORKDIR":
                self.stages[instruction.stage].work = instruction.text
            elif instruction.word not in ("ARG", "USER", "ENTRYPOINT", "CMD"):
                raise StepFailed(f"{instruction.word} is not known to {Path(__file__).name}")

    def _begin(self, instruction: Instruction) -> None:
        base = instruction.text.partition(" AS ")[0]
        if base in self.stages:
            earlier = self.stages[base]
            stage = Stage(earlier.root, dict(earlier.environment))
            done = f"goes on from stage {base}"
        else:
            stage = Stage(self._folder / instruction.stage)
            stage.root.mkdir(parents=True, exist_ok=True)
            done = f"not run: needs a container engine; {stage.root} stands for it"
        self.stages[instruction.stage] = stage
        say(instruction.stage, f"FROM {base}", done)

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = instruction.text.split()
        stage = self.stages[instruction.stage]
        source_root = ROOT
        if sources[0].startswith("--from="):
            source_root = self.stages[sources.pop(0).removeprefix("--from=")].root
        place = stage.here(target)
        missing = [source for source in sources if not (source_root / source.lstrip("/")).exists()]
        if missing:
            say(instruction.stage, f"COPY {' '.join(missing)}", "not run: it was not made above")
            return
        for source in sources:
            found = source_root / source.lstrip("/")
            into = place / found.name if target.endswith("/") else place
            if found.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, place, dirs_exist_ok=True, ignore=ignored)
            else:
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)
        say(instruction.stage, f"COPY {' '.join(sources)}", "ran")

    def _run(self, stage_name: str, command: str) -> str:
        """Carry out one command; return what was done."""
        stage = self.stages[stage_name]
        words = command.split()
        if words[0] in NOT_RUN:
            return f"not run: {NOT_RUN[words[0]]}"
        if words[:2] == ["pip", "install"] and words[-1].startswith("uv=="):
            return self._own_uv(words[-1])
        if words[:3] == ["python3.12", "-m", "venv"]:
            return "ran, by the first step that needs it"
        if words[:2] == ["uv", "build"]:
            (stage.root / "wheels").mkdir(exist_ok=True)
            return self._do(stage, f"{uv()} {stage.moved(' '.join(words[1:]))} --quiet")
        if words[:3] == ["uv", "pip", "install"]:
            return self._packages(stage, words)
        if words[0] == "launch/build_te.sh":
            return self._transformer_engine(stage, command)
        if words == ["megarl", "doctor"]:
            return self._do(stage, f"{self._python(stage)} -m megarl doctor")
        raise StepFailed(f"{stage_name}: RUN {command}: not known to {Path(__file__).name}")

    def _own_uv(self, pin: str) -> str:
        said = subprocess.run([uv(), "--version"], capture_output=True, text=True, check=True)
        version = said.stdout.split()[1]
        if version != pin.removeprefix("uv=="):
            raise StepFailed(f"the image takes {pin}, and .venv has {version}: make setup")
        return f"ran by .venv's own, which is {pin}"

    def _packages(self, stage: Stage, words: list[str]) -> str:
        """Install packages of a lock if that was asked for, else look whether all of
        them exist. megarl's own wheel is always installed.
        """
        python = self._python(stage)
        listed = "--requirements" in words
        wheels = [str(path) for word in words if "*.whl" in word for path in wheels_at(stage, word)]
        kept = [word for word in words[3:] if word not in ("--system", "--no-cache")]
        kept = [stage.moved(word) for word in kept if "*.whl" not in word]
        if not listed and not wheels:
            return "not run: its wheel was not made above"
        command = [uv(), "pip", "install", "--quiet", "--python", str(python), *kept, *wheels]
        if listed and not self._install:
            self._do(stage, shlex.join([*command, "--dry-run"]))
            return "resolved"
        return self._do(stage, shlex.join(command))

    def _transformer_engine(self, stage: Stage, command: str) -> str:
        if not self._install:
            return "not run: it needs the stack (--install), and compiles for 19 minutes of CPU"
        if not Path("/usr/local/cuda/bin/nvcc").exists():
            return "not run: there is no CUDA toolkit in /usr/local/cuda"
        moved = stage.moved(command).replace('"$VIRTUAL_ENV/bin/python"', str(self._python(stage)))
        return self._do(stage, str(stage.here("launch/build_te.sh")) + moved.partition(".sh")[2])

    def _python(self, stage: Stage) -> Path:
        """Return the Python of a stage's environment. Without --install it also sees
        .venv's packages.
        """
        python = stage.root / "venv" / "bin" / "python"
        if not python.exists():
            folder = python.parents[1]
            subprocess.run(
                [uv(), "venv", "--quiet", "--python", sys.executable, folder], check=True
            )
            if not self._install:
                (site,) = python.parents[1].glob("lib/python3.12/site-packages")
                (ours,) = Path(sys.executable).parents[1].glob("lib/python3.12/site-packages")
                (site / "of_the_checkout.pth").write_text(f"{ours}\n")
        return python

    def _do(self, stage: Stage, command: str) -> str:
        (stage.root / stage.work.lstrip("/")).mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command,
            shell=True,
            cwd=stage.root / stage.work.lstrip("/"),
            env=os.environ | settings_without_paths(stage.environment),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise StepFailed(f"{command}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return "ran"


def settings_without_paths(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a stage's settings except those that name places of the image."""
    return {name: value for name, value in environment.items() if "/" not in value}


def wheels_at(stage: Stage, pattern: str) -> list[Path]:
    """Return the wheels that a pattern such as /tmp/wheels/*.whl names in the stage."""
    return sorted(stage.root.glob(pattern.lstrip("/")))


def uv() -> str:
    return str(Path(sys.executable).with_name("uv"))


def say(stage: str, step: str, done: str) -> None:
    print(f"{stage:>9}  {step[:70]:<70}  {done}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    parser.add_argument("--install", action="store_true", help="fetch and install the packages")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            folder = (options.folder or Path(temporary)).resolve()
            Trial(folder, options.install).carry_out(DOCKERFILE.read_text())
        except StepFailed as failed:
            print(f"try_image: {failed}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
