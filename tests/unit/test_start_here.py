"""docs/tutorials/start-here.md: its commands, on rows of the published schemas, and
its figures, against the planner's.
"""

import json
import random
import re
import shlex
from pathlib import Path
from threading import Timer

import pytest

from megarl import cli
from megarl.core.base.rundir import RunDir, append_jsonl, write_jsonl
from megarl.core.recipe import dump, load, shipped
from megarl.predict.planning import show
from tests.tiny import tiny_qwen2, tiny_qwen3
from tests.twin_models import character_tokenizer
from tests.unit.conftest import metrics_row, status_tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/start-here.md").read_text()


def lines_of(kind: str) -> list[str]:
    """The lines of the page's blocks of this kind."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Qwen3 and six hundred rows of each set stand for what is downloaded."""
    monkeypatch.chdir(tmp_path)
    tiny_qwen3(tmp_path / "models/Qwen3-8B", vocab_size=128)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "models/Qwen3-8B")
    polaris = [
        {"problem": f"What is {n} + 1?", "answer": str(n + 1), "difficulty": f"{n % 8}/8"}
        for n in range(600)
    ]
    dapo = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"Solve {n} + 2.\n\nAnswer: $Answer"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n + 2), "style": "rule"},
            "extra_info": {"index": f"d{n}"},
        }
        for n in [*range(600), *range(600)]
    ]
    write_jsonl(tmp_path / "polaris.jsonl", polaris)
    write_jsonl(tmp_path / "dapo.jsonl", dapo)
    return tmp_path


def local(command: str) -> list[str]:
    """The command's words after `megarl`, with files in place of the hub's sets."""
    for hub, file in (
        ("hub:POLARIS-Project/Polaris-Dataset-53K", "polaris.jsonl"),
        ("hub:BytedTsinghua-SIA/DAPO-Math-17k", "dapo.jsonl"),
    ):
        command = command.replace(hub, file)
    program, *words = shlex.split(command)
    assert program == "megarl"
    return words


def test_every_command_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for command in lines_of("sh-start"):
        assert cli.main(local(command)) == 0, command
        printed[command] = capsys.readouterr().out
    assert (
        len((folder / "data/dapo/train.jsonl").read_text().splitlines()) == 100
    )  # 600 prompts, 500 of them held out
    (script,) = [
        text
        for command, text in printed.items()
        if "submit" in command and "run.name" not in command
    ]
    assert script.strip() == (folder / "runs/qwen3-8b-2nodes.sbatch").read_text().strip()
    assert (
        "# node 1: controller-0, servers 0-3\n# node 2: learner ranks 0-3, servers 4-5\n" in script
    )
    assert "332 GPU-hours" in script


PLAN = ("--gpus", "16", "--gpu", "h100")
ROW = re.compile(r"^\| `(\S+)` \| `(\S+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


@pytest.mark.parametrize(
    ("recipe", "config", "gigabytes", "seconds", "hours", "gpu_hours"), ROW.findall(PAGE)
)
def test_the_figures_are_the_planners(
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    config: str,
    gigabytes: str,
    seconds: str,
    hours: str,
    gpu_hours: str,
) -> None:
    assert cli.main(["plan", recipe, *PLAN, "--model-config", config, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["as_written"]
    found = (plan["learner_bytes"]["total"] / 1e9, plan["step_seconds"], plan["step_seconds"] / 7.2)
    assert [f"{figure:.0f}" for figure in found] == [gigabytes, seconds, hours]
    assert f"{plan['gpu_hours_per_1000_steps'] / 2:.0f}" == gpu_hours
    stated = re.findall(r"by `megarl plan`: (\d+) of 80 GB", shipped()[recipe].read_text())
    assert stated == ([gigabytes] if recipe.endswith("-2nodes") else [])


def test_the_commands_to_watch_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of a run after three steps, which writes a line and ends while its
    log is followed.
    """
    monkeypatch.chdir(tmp_path)
    status, logs = lines_of("sh-watch")
    recipe = load("qwen3-8b-2nodes")
    rundir = RunDir(Path(recipe.run.path))
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    for step in range(3):
        append_jsonl(rundir.metrics, metrics_row(step, random.Random(step)))
    rundir.status.write_text(json.dumps(status_tree(3)))
    log = rundir.log("learner", "node-2", 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 2 is trained\n")
    assert cli.main(local(status)) == 0
    assert "step 3/500" in capsys.readouterr().out

    def go_on() -> None:
        log.write_text("step 2 is trained\nstep 3 is trained\n")
        rundir.summary.write_text("{}")

    Timer(0.5, go_on).start()
    assert cli.main(local(logs)) == 0
    assert capsys.readouterr().out == "step 2 is trained\nstep 3 is trained\n"


OTHER = dict(
    re.findall(r"^\| ([A-Z][\w.-]+)(?:: [^|]*)? \| `(model\.path=[^|]*)` \|$", PAGE, re.MULTILINE)
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor"
    " %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("name", "begins"), [("DeepSeek-R1-Distill-Qwen-7B", "<think>\n"), ("Qwen2.5-7B-Instruct", "")]
)
def test_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, begins: str
) -> None:
    """A tiny Qwen2 stands for it. What it is asked ends as its own template does:
    R1-Distill's opens the trace itself.
    """
    overrides = shlex.split(OTHER[name])
    path = folder / load("qwen3-8b-2nodes", overrides).model.path
    tiny_qwen2(path, vocab_size=128, head_dim=8, max_position_embeddings=32_768)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE + begins
    tokenizer.save_pretrained(path)
    for command in [line for line in lines_of("sh-start") if "data prepare" in line]:
        assert cli.main(local(command)) == 0
    capsys.readouterr()
    assert cli.main(["data", "inspect", "qwen3-8b-2nodes", *overrides]) == 0
    shown = "\n".join(line.strip("│ ") for line in capsys.readouterr().out.splitlines())
    assert f"<|im_start|>assistant\n{begins}" in shown, shown
    assert ("<think>" in shown) == bool(begins)
    assert (
        cli.main(
            ["plan", "qwen3-8b-2nodes", *PLAN, "--model-config", "qwen2.5-7b", *overrides, "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["as_written"]["learner_bytes"]["total"] < 80e9


def test_the_stated_error_is_that_of_the_plans_page() -> None:
    """Ratios of the table of docs/how-to/plan.md, largest and smallest."""
    rows = re.findall(
        r"^\| 8B.* \| ([\d. to]+) / ([\d. to]+) / ([\d. to]+) \|$",
        (ROOT / "docs/how-to/plan.md").read_text(),
        re.M,
    )
    ratios = [float(ratio) for row in rows for cell in row for ratio in cell.split(" to ")]
    assert (min(ratios), max(ratios)) == show.TAKEN_OVER_PLANNED
    assert all(f"{ratio:g}" in PAGE for ratio in show.TAKEN_OVER_PLANNED)
