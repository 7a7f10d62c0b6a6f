"""docs/start-here.md: its commands, on rows of the published schemas, and its figures, against the planner's."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megarl import cli
from megarl.core.base.rundir import write_jsonl
from megarl.lab.planning import show
from tests.tiny import tiny_qwen3
from tests.twin_models import character_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "start-here.md").read_text()
COMMANDS = [
    line for block in re.findall(r"^```sh-start\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Qwen3 and six hundred rows of each set stand for what is downloaded."""
    monkeypatch.chdir(tmp_path)
    tiny_qwen3(tmp_path / "models/Qwen3-8B", vocab_size=128)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(tmp_path / "models/Qwen3-8B")
    polaris = [{"problem": f"What is {n} + 1?", "answer": str(n + 1), "difficulty": f"{n % 8}/8"} for n in range(600)]
    dapo = [
        {"data_source": "math_dapo", "prompt": [{"role": "user", "content": f"Solve {n} + 2.\n\nAnswer: $Answer"}],
         "ability": "MATH", "reward_model": {"ground_truth": str(n + 2), "style": "rule"}, "extra_info": {"index": f"d{n}"}}
        for n in [*range(600), *range(600)]
    ]  # fmt: skip
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
    for command in COMMANDS:
        assert cli.main(local(command)) == 0, command
        printed[command] = capsys.readouterr().out
    assert len((folder / "data/dapo/train.jsonl").read_text().splitlines()) == 100  # 600 prompts, 500 of them held out
    (script,) = [text for command, text in printed.items() if "submit" in command and "run.name" not in command]
    assert script.strip() == (folder / "runs/qwen3-8b-2nodes.sbatch").read_text().strip()
    assert "# node 1: controller-0, servers 0-7\n# node 2: learner ranks 0-3, servers 8-11\n" in script
    assert "380 GPU-hours" in script


ROW = re.compile(r"^\| `(\S+)` \| `(\S+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


@pytest.mark.parametrize(("recipe", "config", "gigabytes", "seconds", "hours", "gpu_hours"), ROW.findall(PAGE))
def test_the_figures_are_the_planners(
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    config: str,
    gigabytes: str,
    seconds: str,
    hours: str,
    gpu_hours: str,
) -> None:
    assert cli.main(["plan", recipe, "--gpus", "16", "--gpu", "h100", "--model-config", config, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["as_written"]
    found = (plan["learner_bytes"]["total"] / 1e9, plan["step_seconds"], plan["step_seconds"] / 7.2)
    assert [f"{figure:.0f}" for figure in found] == [gigabytes, seconds, hours]
    assert f"{plan['gpu_hours_per_1000_steps'] / 2:.0f}" == gpu_hours


def test_the_stated_error_is_that_of_the_plans_page() -> None:
    """Ratios of the table of docs/plan.md, largest and smallest."""
    rows = re.findall(
        r"^\| (?:8B|17Bx16): .* \| ([\d.]+) / ([\d.]+) / ([\d.]+) \|$", (ROOT / "docs/plan.md").read_text(), re.M
    )
    ratios = [float(ratio) for row in rows for ratio in row]
    assert (min(ratios), max(ratios)) == show.TAKEN_OVER_PLANNED
    assert "1.2 to 14 times" in PAGE
