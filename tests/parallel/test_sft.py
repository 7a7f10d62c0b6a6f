"""`megarl sft` as a process: what it writes is a Hugging Face model that has learnt the
traces, judged by transformers.
"""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.core import recipe as recipes
from megarl.core.base.rundir import complete, step_of
from megarl.tasks.data import arithmetic
from tests.parallel.worlds import ROOT, run_world

STEPS = 40
LIMIT_S = 240.0


def loss_by_transformers(folder: Path, rows: list[dict[str, str]]) -> float:
    """Nats per completion token, the end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = 0.0
    count = 0
    with torch.no_grad():
        for row in rows:
            prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
            completion = [
                *tokenizer(row["completion"], add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ]
            ids = torch.tensor([prompt + completion])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            total += float(model(ids, labels=labels).loss) * len(completion)
            count += len(completion)
    return total / count


def written(tmp_path: Path, output: str, checkpoint_every: int = 250) -> Path:
    """A recipe of a warm start on sums."""
    if not (tmp_path / "data").exists():
        arithmetic.write(tmp_path / "data", 0)
    sft = {
        "init": str(tmp_path / "data" / "init"),
        "data": str(tmp_path / "data" / "sft.jsonl"),
        "steps": STEPS,
        "batch_tokens": 1024,
        "optimizer": {"lr": 2e-3},
    }
    path = tmp_path / "recipe.yaml"
    tree = {
        "model": {"path": str(tmp_path / output), "dtype": "fp32"},
        "sft": sft,
        "checkpoint": {"every": checkpoint_every},
    }
    path.write_text(recipes.dump(recipes.from_tree(tree)))
    return path


def sft(recipe: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megarl", "sft", str(recipe), *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def wait_for_a_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not complete(folder):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted warm start: data/, warm/, recipe.yaml, and what it
    printed.
    """
    folder = tmp_path_factory.mktemp("whole")
    (folder / "output.txt").write_text(run_world(1, "megarl", "sft", str(written(folder, "warm"))))
    return folder


def test_the_warm_start_learns_and_is_written_whole(whole: Path) -> None:
    rows = [
        json.loads(line) for line in (whole / "data" / "sft.jsonl").read_text().splitlines()[:40]
    ]
    before, after = (
        loss_by_transformers(path, rows) for path in (whole / "data" / "init", whole / "warm")
    )
    assert after < 0.7 * before
    assert not (whole / "warm.unfinished").exists()
    with pytest.raises(AssertionError, match="exists already"):
        run_world(1, "megarl", "sft", str(whole / "recipe.yaml"))


def test_it_says_what_it_learns_and_how_often(whole: Path) -> None:
    said = (whole / "output.txt").read_text()
    assert "sft.jsonl: 40000 traces, 0 left out (longer than" in said
    assert re.search(
        rf"the traces have \d+ tokens, and sft\.steps={STEPS} go through them about [\d.]+ times",
        said,
    )


def test_a_model_that_cannot_be_trained_is_not_written(tmp_path: Path) -> None:
    """Each step would be skipped, and the model that it began with be taken for a
    trained one.
    """
    recipe = written(tmp_path, "broken")
    file = tmp_path / "data" / "init" / "model.safetensors"
    save_file({name: torch.full_like(value, 3e38) for name, value in load_file(file).items()}, file)
    with pytest.raises(
        AssertionError, match="steps 1 to 3 of 40 were skipped: loss or gradient was not"
    ):
        run_world(1, "megarl", "sft", str(recipe))
    assert not (tmp_path / "broken").exists()


@pytest.mark.faults
@pytest.mark.slow
def test_told_to_stop_it_saves_and_the_same_command_goes_on(whole: Path, tmp_path: Path) -> None:
    """To the same weights as without a stop, bit for bit."""
    saved = tmp_path / "stopped.unfinished"
    recipe = written(tmp_path, "stopped", checkpoint_every=4)
    begun = sft(recipe)
    wait_for_a_checkpoint(saved, begun)
    begun.send_signal(signal.SIGUSR1)
    status, output = ended(begun)
    assert status == 138, output
    assert (
        f"saved after step {step_of(complete(saved)[-1])} of {STEPS}; the same command continues"
        in output
    )
    assert not (tmp_path / "stopped").exists()

    status, output = ended(sft(recipe, "sft.optimizer.lr=0.5"))
    assert status == 2
    assert f"{saved}: a warm start with other settings was begun there" in " ".join(output.split())
    status, output = ended(sft(recipe))
    assert status == 0, output
    assert not saved.exists()
    same, other = (
        load_file(path / "model.safetensors") for path in (whole / "warm", tmp_path / "stopped")
    )
    assert all(torch.equal(same[name], other[name]) for name in same)


@pytest.mark.faults
@pytest.mark.slow
def test_two_ranks_of_which_only_torchrun_is_told(tmp_path: Path) -> None:
    saved = tmp_path / "stopped.unfinished"
    recipe = written(tmp_path, "stopped")
    ranks = "resources.learner_ranks=2"
    begun = sft(recipe, ranks, "checkpoint.every=4")
    wait_for_a_checkpoint(saved, begun)
    begun.terminate()
    status, output = ended(begun)
    assert status == 143, output
    step = step_of(complete(saved)[-1])
    assert f"saved after step {step} of {STEPS}" in output
    other = sft(recipe)
    second = sft(recipe)
    (status, output) = ended(other)
    (refused, message) = ended(second)
    assert sorted([status, refused]) == [0, 2], output + message
    assert "another `megarl sft`" in " ".join((output + message).split())
    assert f"in steps {step + 1} to {STEPS}" in output + message
