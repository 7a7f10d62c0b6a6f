"""Every command in README.md and docs/ is run here as written, or is the subject of a
test of its own.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.telemetry.names import NAMES
from tests.e2e.conftest import EXPORT, SCORE
from tests.e2e.runs import quiet
from tests.processes import LEARNERS, command_line

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md"), key=lambda page: page.name),
]
LIMIT_S = 200.0
TESTED_ELSEWHERE = {
    "make setup": "every test runs in what it makes",
    "make test": "the gate",
    "make test-unit": "a part of it",
    "make test-slow": "the rest of it",
    "make test-predict": "a part of it, and of the gate",
    "make test-agents": "tests/e2e/test_agents.py",
    "make test-faults": "tests/e2e/test_faults.py",
    "make test-recipes": "tests/e2e/test_recipe_twins.py",
    "make test-gpu-paths": "tests/parallel/test_te_layers.py, after minutes of compilation",
    "make quickstart": "its three commands: the fixture `workplace`, test_run.py, test_launch.py",
    'make quickstart ARGS="run.name=seed-1 run.seed=1 pipeline.k=4"': "the same",
    "make quickstart-real": "tests/e2e/test_quickstart_real.py",
    "make quickstart-moe": "its three commands: test_run_moe.py",
    "megarl train quickstart-tasks": "test_run_tasks.py",
    "make quickstart-tools": "its three commands: test_run_tools.py",
    "megarl train quickstart-tools run.name=without-tools \"data.tasks.products.environment=''\"": (
        "the same"
    ),
    "make quickstart-agent": "its three commands: test_agents.py",
    "cp megarl/tasks/agents/calculator.py my_agent.py": "the same",
    'make quickstart-agent ARGS="run.name=mine data.tasks.products.agent=my_agent:solve"': (
        "the same"
    ),
    "python examples/terminal_tasks.py terminal": ("test_agents.py"),
    "python examples/tiny_model.py terminal/init": ("the same"),
    "python -m megarl.tasks.agents.terminal terminal/train terminal/train.jsonl": ("the same"),
    "python -m megarl.tasks.agents.terminal terminal/heldout terminal/heldout.jsonl": ("the same"),
    "megarl sft examples/terminal.yaml": ("the same"),
    "megarl train examples/terminal.yaml": ("the same"),
    "make bench": "a benchmark",
    "export TEACHER_KEY=$(openssl rand -hex 16)": "tests/e2e/test_distillation.py",
    "megarl serve quickstart --model exported --port 30000 --api-key env:TEACHER_KEY &": "the same",
    "megarl train quickstart run.name=distilled teacher.url=http://127.0.0.1:30000"
    " teacher.api_key=env:TEACHER_KEY teacher.weight=1 batch.zero_variance=keep": "the same",
    'make soak ARGS="--seconds 900"': "hours; benchmarks/faults.md says what was run",
    "megarl plan scalerl-8b --gpus 80 --gpu h100 --model-config llama-3.1-8b --mean-tokens 8000 --simulate --out plan.png": (
        "minutes of simulation; tests/unit/predict/planning/test_plan.py simulates a smaller one"
    ),
    "megarl study loo quickstart --with grpo,dapo --seeds 0,1,2 base=quickstart run.steps=80": (
        "tests/e2e/test_study.py"
    ),
    "megarl study compare quickstart grpo dapo --seeds 0,1 base=quickstart run.steps=80": "the same",
    "megarl study results runs/studies/loo-quickstart": (
        "tests/unit/predict/study/test_study_results.py"
    ),
    "megarl train quickstart run.resume=auto": "tests/e2e/test_faults.py",
    "tensorboard --logdir runs/quickstart/tensorboard": (
        "test_run.py reads the same files by tensorboard's reader"
    ),
}


def commands(page: Path) -> list[str]:
    """Lines of the page's `sh` blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def to_run() -> list[str]:
    """The commands of all pages, each once, in the order of the pages: later ones need
    what earlier ones wrote.
    """
    found: dict[str, None] = {}
    for page in PAGES:
        for command in commands(page):
            if command not in TESTED_ELSEWHERE and not command.startswith("launch/bench.sh"):
                found[command.removeprefix(".venv/bin/")] = None
    return [command for command in found if command not in (SCORE, EXPORT)]


@pytest.fixture(scope="module")
def place(quickstart: Path, scored: str, exported: Path) -> Path:
    """Where the commands run: pages name files that lie beside them."""
    (quickstart / "docs").symlink_to(ROOT / "docs", target_is_directory=True)
    return quickstart


@pytest.mark.stack
@pytest.mark.parametrize("command", to_run())
def test_command(command: str, place: Path) -> None:
    """It exits with 0. One of megarl's runs in a process that has imported megarl; one
    that needs a shell is given one.
    """
    words = shlex.split(command)
    if words[0] == "megarl" and ">" not in words:
        status, said = LEARNERS.run(command_line, [words[1:]], place, quiet(), LIMIT_S)
    else:
        environment = quiet() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environment["PYTHONPATH"] = str(ROOT)  # benchmarks are not installed
        done = subprocess.run(
            command,
            shell=True,
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        status = done.returncode
        said = done.stdout
    assert status == 0, said[-4000:]


def test_the_commands_are_found() -> None:
    assert {"megarl doctor", "megarl recipes"} <= set(to_run())


def test_metrics_that_the_pages_name_exist() -> None:
    """`megarl metrics` explains all of them; reference/run-directory.md names those to
    look at first.
    """
    page = (ROOT / "docs/reference/run-directory.md").read_text()
    table = page.partition("Worth a look first")[2]
    named = re.findall(r"`(\w+)(?:/\w+)?`", table)
    assert len(named) > 15
    assert [name for name in named if name not in NAMES] == []


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
