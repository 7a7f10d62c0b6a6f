"""convert, verify and inspect, and what an exported directory says of itself. Layouts
and bad input: the files beside this.
"""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
import yaml

from checkpoints_tools import card
from checkpoints_tools.__main__ import main
from checkpoints_tools.verify import compare
from megarl.cli import main as megarl
from megarl.core.base.rundir import RunDir, append_jsonl, step_folder
from megarl.core.models import build, checkpoint, family_of, hf, parallel
from megarl.core.recipe import Model
from tests.tiny import tiny_llama

# isort: split
from safetensors.torch import load_file, save_file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """bf16, tied, a vocabulary of odd size,
    and something that stands for a tokenizer.
    """
    tiny_llama(
        tmp_path / "hf",
        torch.bfloat16,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        vocab_size=131,
    )
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def test_round_trip_keeps_every_bit(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-0000000"
    back = tmp_path / "back"
    assert main(["convert", "hf-to-megatron", str(directory), str(step)]) == 0
    assert main(["convert", "megatron-to-hf", str(tmp_path / "run"), str(back)]) == 0
    stored = load_file(directory / "model.safetensors")
    again = load_file(back / "model.safetensors")
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert (back / "tokenizer.json").read_text() == "{}"
    config, source = (json.loads((d / "config.json").read_text()) for d in (back, directory))
    assert config == source
    capsys.readouterr()
    assert main(["verify", str(directory), str(step)]) == 0
    assert "equal: 20 tensors" in capsys.readouterr().out


def test_export_takes_the_newest_checkpoint_of_a_run_or_the_one_named(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    for step in (2, 4):
        folder = step_folder(run.checkpoints, step)
        main(["convert", "hf-to-megatron", str(directory), str(folder)])
        meta = checkpoint.read_meta(folder)
        checkpoint.seal(folder, msgspec.structs.replace(meta, step=step, version=step), meta.files)
    assert megarl(["export", str(run.path), str(tmp_path / "none")]) == 2
    assert "not a run directory" in capsys.readouterr().err
    run.recipe.write_text("run: {name: sums}")
    assert megarl(["export", str(run.path), str(tmp_path / "newest")]) == 0
    assert megarl(["export", str(run.path), str(tmp_path / "second"), "--step", "2"]) == 0
    assert "| optimiser steps | 4 |" in (tmp_path / "newest" / "README.md").read_text()
    assert "| optimiser steps | 2 |" in (tmp_path / "second" / "README.md").read_text()
    assert main(["verify", str(tmp_path / "newest"), str(directory)]) == 0
    capsys.readouterr()
    assert megarl(["export", str(run.path), str(tmp_path / "third"), "--step", "3"]) == 2
    assert "has no checkpoint of step 3; it has 2, 4" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


def test_tensors_that_are_not_contiguous_are_compared() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    assert list(compare({"w": tensor}, {"w": tensor.clone()})) == []
    (line,) = compare({"w": tensor}, {"w": tensor + tensor.eq(4)})
    assert line == "w: 1 of 6 values differ, by 1"


def test_verify_names_what_differs(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(directory / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((directory / "config.json").read_text())
    tensors["model.norm.weight"][3] += 0.5
    tensors["x"] = tensors.pop("model.layers.0.input_layernorm.weight")
    save_file(tensors, other / "model.safetensors")
    assert main(["verify", str(directory), str(other)]) == 1
    out = capsys.readouterr().out
    assert "model.norm.weight: 1 of 64 values differ, by " in out
    assert "model.layers.0.input_layernorm.weight: only in the first" in out
    assert "x: only in the second" in out


def test_latest_complete_checkpoint_is_taken_and_old_ones_pruned(
    directory: Path, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    model = Model(dtype="bf16")
    parallel.start(model, seed=0, timeout_s=60)
    chunks = build.build(model, directory)
    hf.load(chunks, family_of(directory), directory)
    for step in (1, 2, 3):
        meta = checkpoint.CheckpointMeta(
            step=step, version=step, hf_source=str(directory), model=model.model_dump()
        )
        checkpoint.save(step_folder(checkpoints, step), checkpoint.model_state(chunks), meta)
    parallel.stop()
    (step_folder(checkpoints, 3) / checkpoint.META).unlink()  # as if it had never been finished
    assert checkpoint.find(tmp_path / "run") == step_folder(checkpoints, 2)
    (checkpoints / ".step-0000004.partial").mkdir()
    checkpoint.prune(checkpoints, keep=1)
    assert [p.name for p in checkpoints.iterdir()] == ["step-0000002"]


def test_inspect(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "hf-to-megatron", str(directory), str(tmp_path / "step"), "--tp", "2"])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "step")]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "step 0" in out
    assert "tensor_parallel=2" in out
    assert "optimiser     none" in out
    assert "recipe        none" in out
    assert "linear_fc2.weight  [2, 64, 96] bfloat16  0.0 MB  4 x [1, 64, 48]" in out
    sizes = []
    for path in (tmp_path / "step", directory):
        main(["inspect", str(path), "--tensors"])
        lines = capsys.readouterr().out.splitlines()
        sizes.append(next(line.split(",", 1)[1] for line in lines if "weights  " in line))
    values, _ = sizes[0].split(" values")
    assert (
        int(values.replace(",", "")) == 94_720 + 64
    )  # one row of padding, which makes 131 divide by 2


def test_inspect_shows_equal_layers_as_one_line(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(directory)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "layers.[0-1]" in lines  # of `model`, which has other children
    assert "gate_proj.weight  [96, 64] bfloat16  0.0 MB  model.safetensors" in lines
    assert sum("gate_proj" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("base", "known"),
    [
        ("meta-llama/Llama-3.1-8B", True),
        ("runs/quickstart-sft", False),
        ("models/Qwen3-8B", False),
        ("/a/b", False),
        ("b", False),
    ],
)
def test_only_a_hub_id_is_the_base_model_of_a_card(base: str, known: bool) -> None:
    assert card._is_hub_id(base) is known


def test_model_card_of_a_run(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the run's own files say up to the checkpoint's step, and nothing that comes
    after it.
    """
    run = RunDir(tmp_path / "run")
    main(["convert", "hf-to-megatron", str(directory), str(run.checkpoints / "step-0000003")])
    step = run.checkpoints / "step-0000003"
    meta = checkpoint.read_meta(step)
    checkpoint.seal(step, msgspec.structs.replace(meta, step=3, version=3), meta.files)
    data = {"services": {"taste": {"url": "http://judge?key=secret"}}, "sandbox": "bubblewrap"}
    recipe = {"run": {"name": "sums"}, "model": {"path": "meta-llama/Llama-3.1-8B"}, "data": data}
    run.recipe.write_text(yaml.safe_dump(recipe))
    for trained in range(5):
        append_jsonl(
            run.metrics,
            {
                "step": trained,
                "compute_hours": 1.0 + trained,
                "compute_unit": "gpu",
                "tokens_trained": 1000,
            },
        )
    for trained, rate in ((0, 0.25), (3, 0.5), (4, 0.75)):
        append_jsonl(run.eval, {"step": trained, "pass_rate": rate, "samples": 4, "n_prompts": 200})
    assert main(["convert", "megatron-to-hf", str(run.path), str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(written.split("---")[1])
    assert front["base_model"] == "meta-llama/Llama-3.1-8B"
    assert "| optimiser steps | 3 |" in written
    assert "sandbox: bubblewrap" in written
    assert "secret" not in written
    assert "| GPU-hours | 3 |" in written
    assert "| tokens trained | 3,000 |" in written
    assert (
        "| evaluation | pass rate 0.5 at step 3: mean of 4 samples on 200 held-out prompts |"
        in written
    )
    capsys.readouterr()
    main(["inspect", str(run.path)])
    out = capsys.readouterr().out
    assert "step 3" in out
    assert "recipe.yaml: sums" in out
    main(
        [
            "convert",
            "megatron-to-hf",
            str(shutil.move(run.checkpoints / "step-0000003", tmp_path)),
            str(tmp_path / "alone"),
        ]
    )
    alone = (tmp_path / "alone" / "README.md").read_text()
    assert "base_model" not in yaml.safe_load(alone.split("---")[1]), (
        "a directory is no model of the hub"
    )
    assert f"| base model | {directory} |" in alone
    assert "evaluation" not in alone
